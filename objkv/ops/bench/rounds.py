"""Rounds: every round runs all sides in turn, so that a noisy machine is noisy for all of them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from objkv.ops.bench.rows import Row, Target

Work = Callable[[], float]
"""Does one round's share of one side and returns how long it took, in seconds."""

ROUNDS_MIN = 1


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds by side, one per round."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, side: str) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds[side])

    def ratio(self, side: str, by: str) -> float:
        """The median of the rounds' own ratios of seconds: what slowed one round slowed both."""
        pairs = zip(self.seconds[side], self.seconds[by], strict=True)
        return statistics.median(one / other for one, other in pairs)


def interleave(sides: Mapping[str, Work], rounds: int, *, warm_ups: int = 1) -> Timings:
    """Run every side once a round, in turn, every second round in the opposite order.

    ``warm_ups`` rounds come first and are not counted: connections are made, pages are touched.
    """
    assert rounds >= ROUNDS_MIN
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(warm_ups + rounds):
        for name in names:
            took = sides[name]()
            if number >= warm_ups:
                seconds[name].append(took)
        names.reverse()
    return Timings(seconds)


@dataclass(frozen=True, slots=True)
class Compared:
    """One side and its limit among the sides of some rounds."""

    timings: Timings
    side: str
    limit: str
    limit_name: str

    def throughput(
        self, name: str, nbytes: int, target: Target | None = None, detail: str = ""
    ) -> Row:
        """A row in GB/s for sides that moved ``nbytes`` a round each."""
        return Row(
            name,
            "GB/s",
            ours=nbytes / self.timings.median(self.side) / 1e9,
            limit=nbytes / self.timings.median(self.limit) / 1e9,
            limit_name=self.limit_name,
            ratio=self.timings.ratio(self.limit, self.side),
            target=target,
            detail=detail,
        )

    def duration(self, name: str, unit: str, target: Target | None = None, detail: str = "") -> Row:
        """A row in ``s``, ``ms`` or ``µs``."""
        scale = SCALES[unit]
        return Row(
            name,
            unit,
            ours=self.timings.median(self.side) * scale,
            limit=self.timings.median(self.limit) * scale,
            limit_name=self.limit_name,
            ratio=self.timings.ratio(self.side, self.limit),
            target=target,
            detail=detail,
        )


SCALES = {"s": 1.0, "ms": 1e3, "µs": 1e6}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` (0 to 1) of the values do not exceed."""
    assert values
    ordered = sorted(values)
    rank = -(-share * len(ordered) // 1)
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]
