"""Whose blocks may not be saved yet, because a load into them within the step may still fail.

Whether it succeeded is known only when that step is over, and those scheduled meanwhile; until then
the blocks given out in these steps may hold anything. Of objkv's own loads a worker knows by
itself, but not of those of other ranks, and under vLLM's ``MultiConnector`` another connector may
load. Source: vLLM 0.31-0.33, ``v1/core/sched/scheduler.py``, where blocks loaded within a step are
in the prefix cache before they are filled.
"""

from typing import TYPE_CHECKING

from objkv.connector.tracking import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Admissions:
    """Requests by the step in which they were given blocks. The scheduler's thread only."""

    def __init__(self, steps_in_flight: int, *, ranks: int = 1) -> None:
        self._steps_in_flight = steps_in_flight
        self._ranks = ranks
        self._step = 0
        self._doubtful_until = 0
        self._admitted: list[Tracked] = []

    def add(self, tracked: Tracked) -> None:
        """The request was given blocks, for a step that is being scheduled."""
        # Out of these nothing was saved yet. If it ends while they are being filled, the load alone
        # keeps them: vLLM does not expect to hear of a save as well.
        tracked.saved = False
        self._admitted.append(tracked)

    def next_step(self, output: "SchedulerOutput") -> None:
        """A step was scheduled, with what was added since the last."""
        admitted, self._admitted = self._admitted, []
        self._step += 1
        doubtful = self._ranks > 1 or any(_filled_by_another(one) for one in admitted)
        if output.has_sync_kv_loads and doubtful:
            self._doubtful_until = self._step + self._steps_in_flight
        if self._step < self._doubtful_until:
            for tracked in admitted:
                tracked.doubtful_until = self._doubtful_until

    def trusts(self, tracked: Tracked) -> bool:
        """Whether what this step leaves in the request's blocks may be saved."""
        return self._step >= tracked.doubtful_until


def _filled_by_another(tracked: Tracked) -> bool:
    return bool(tracked.request.num_computed_tokens > tracked.accounted)
