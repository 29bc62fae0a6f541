"""Whether the forward pass may wait for the store: not after it waited in vain.

A load within the step that is never answered holds up every request of the replica until its
deadline. A breaker alone does not help: it lets a call through again every few seconds, and the
model would wait for each. A load between steps holds up its own request only, so the next loads are
of that kind until one succeeds, and soon enough for a step to have waited for it.
"""

from collections.abc import Callable, Iterable
from time import monotonic

from objkv.connector.metadata import StepReport
from objkv.transfer.plan import LoadPlan


class Confidence:
    """The scheduler's thread only."""

    def __init__(self, bound_s: float, *, clock: Callable[[], float] = monotonic) -> None:
        """``bound_s``: how long the forward pass waits for a load within the step."""
        self._bound_s = bound_s
        self._clock = clock
        self._within: frozenset[str] = frozenset()
        self._between: dict[str, float] = {}
        self.holds = True
        """Whether loads within the step may be planned."""

    def planned(self, loads: Iterable[LoadPlan]) -> None:
        """A step was planned, with these loads."""
        now = self._clock()
        self._within = frozenset(load.request_id for load in loads if load.sync)
        self._between |= {load.request_id: now for load in loads if not load.sync}

    def reported(self, report: StepReport) -> None:
        """What workers told of it. A payload that was refused, or gone, was an answer."""
        for request_id in report.failed:
            self._between.pop(request_id, None)
        if not report.rejected and self._within & report.failed:
            self.holds = False

    def received(self, request_id: str) -> None:
        """A load between steps is over; it succeeded, unless ``reported`` said otherwise before."""
        started = self._between.pop(request_id, None)
        if started is not None and self._clock() - started < self._bound_s:
            self.holds = True
