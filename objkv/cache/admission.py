"""Decides which part of a match loads faster than it computes, from this replica's measurements.

A load takes the latency of each store it uses, plus its bytes at that store's speed. Computing
takes a measured time per token. A match that loads more slowly is refused; if only its tail does,
the head is loaded. With few measurements everything is loaded, which produces them. Now and then a
load that should lose is admitted, because stores and networks recover.

Estimates are medians of the last few observations: refused loads are hardly measured, so one bad
load must not refuse the next ones, and a few good ones must admit them again. That attention makes
later tokens more expensive is ignored, which favours computing on very long prompts.

The requests behind a computing one wait for it, while loads run in parallel with the model. So the
more requests wait, the more time a load saves (``docs/scaling.md``).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Literal, NamedTuple

from objkv.cache.speed import Typical
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)

Tier = Literal["hot", "bulk"]
Mode = Literal["auto", "always", "never"]

OBSERVATIONS_MIN = 3
"""Number of loads from a tier, or of steps, from which their estimates are used."""
STEP_TOKENS_MIN = 64
"""A step with fewer tokens measures the time of a step, not of a token."""
RETRY_S = 30.0
"""After this time without a load from a tier the next one is admitted."""


class ChunkSize(NamedTuple):
    """Size of one chunk of a match."""

    nbytes: int
    """Of this worker's payloads, as stored."""
    tokens: int
    """That need not be computed."""
    tier: Tier


@dataclass(frozen=True, slots=True)
class LoadTime:
    """Duration of a load on its slowest worker."""

    seconds: float
    """From plan to last byte."""
    first_s: float
    """From plan to first byte."""


class _TierCost:
    """Latency and speed of one store."""

    def __init__(self) -> None:
        self.moving = Typical()
        """Time per byte after the first byte."""
        self.latency = Typical()
        self.last_s = 0.0
        """Time of the last admitted load, on the clock of ``AdmissionPolicy``."""

    def observe(self, nbytes: int, load: LoadTime) -> None:
        self.latency.observe(1, max(load.first_s, 1e-9))
        # In a small load the time after the first byte is too short to measure. The whole duration
        # is then the upper bound.
        moving_s = load.seconds - load.first_s
        self.moving.observe(nbytes, moving_s if moving_s > 0 else load.seconds)


class AdmissionPolicy:
    """Decides about loads, and learns from them. For the scheduler's thread. Never waits."""

    def __init__(
        self,
        mode: Callable[[], Mode],
        recorder: Recorder,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``mode`` may change from call to call."""
        self._mode, self._recorder, self._clock = mode, recorder, clock
        self._tiers: dict[Tier, _TierCost] = {"hot": _TierCost(), "bulk": _TierCost()}
        self._prefill = Typical()
        self._has_logged = False

    def loaded(self, tier: Tier, nbytes: int, load: LoadTime) -> None:
        """Record a successful load of ``nbytes``, as stored, from ``tier``."""
        if nbytes > 0 and 0 <= load.first_s <= load.seconds > 0:
            self._tiers[tier].observe(nbytes, load)

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens >= STEP_TOKENS_MIN:
            self._prefill.observe(tokens, seconds)

    @property
    def decided(self) -> bool | None:
        """Whether every match is loaded, or none; None if it depends on the match."""
        mode = self._mode()
        return None if mode == "auto" else mode == "always"

    @property
    def seconds_per_token(self) -> float | None:
        """Typical recent time to compute a token of a prompt; None after few measurements."""
        prefill = self._prefill
        return prefill.seconds_per_unit if prefill.count >= OBSERVATIONS_MIN else None

    def admit(self, chunks: Sequence[ChunkSize], *, waiting: int = 0) -> int:
        """Return how many leading chunks to load: what saves this and ``waiting`` requests most."""
        if (decided := self.decided) is not None or not chunks:
            return len(chunks) if decided else 0
        now = self._clock()
        admitted = len(chunks) if self._is_due(chunks, now) else self._best(chunks, 1 + waiting)
        for tier in {chunk.tier for chunk in chunks[:admitted]}:
            self._tiers[tier].last_s = now
        if admitted < len(chunks):
            refused = sum(chunk.tokens for chunk in chunks[admitted:])
            self._recorder.count("admission_refused_tokens", refused)
            self._recorder.count("admission_refused" if admitted == 0 else "admission_cut")
            if not self._has_logged:
                self._has_logged = True
                logger.info(
                    "not loading stored tokens, computing them is faster here tokens=%d, the "
                    "first of those that admission_refused and admission_cut count",
                    refused,
                )
        return admitted

    def _is_due(self, chunks: Sequence[ChunkSize], now: float) -> bool:
        """Whether one of the needed tiers must be measured, again or for the first time."""
        tiers = [self._tiers[tier] for tier in {chunk.tier for chunk in chunks}]
        return self._prefill.count < OBSERVATIONS_MIN or any(
            tier.moving.count < OBSERVATIONS_MIN or now - tier.last_s >= RETRY_S for tier in tiers
        )

    def _best(self, chunks: Sequence[ChunkSize], requests: int) -> int:
        token_s = requests * (self._prefill.seconds_per_unit or 0.0)
        saved_s, best_s, best = 0.0, 0.0, 0
        byte_s: dict[Tier, float] = {}
        for number, (nbytes, tokens, tier) in enumerate(chunks, start=1):
            if tier not in byte_s:
                byte_s[tier] = self._tiers[tier].moving.seconds_per_unit or 0.0
                saved_s -= self._tiers[tier].latency.seconds_per_unit or 0.0
            saved_s += tokens * token_s - nbytes * byte_s[tier]
            if saved_s > best_s:
                best_s, best = saved_s, number
        return best
