"""How long a step with nothing to compute may wait for what its requests need. vLLM makes empty
steps in a loop, which takes the processor from the agent and the threads that it waits for. So an
empty step sleeps until a lookup has ended or, without one, a load."""

from typing import Final

EMPTY_STEP_S: Final = 0.01
"""How long an empty step waits. A connector does not see new requests, so one that arrives may wait
this long. While a lookup hung, the first token of a short request took 25 ms alone, and in
the median 31, 37, 52 and 66 with waits of 1, 10, 20 and 50 ms (2 cores, 2026-11)."""
_BESIDE_STEPS_S: Final = 1e-4
"""While another step computes, whose result must not wait. Lets other threads have the GIL."""


class EmptySteps:
    """For the scheduler's thread only. vLLM may plan several steps, and then waits for the oldest.
    Source: vLLM 0.31-0.33, ``step_with_batch_queue`` in ``v1/engine/core.py``."""

    def __init__(self, steps_in_flight: int, *, has_peers: bool = False) -> None:
        """``steps_in_flight``: how many steps are planned before the first one ends. ``has_peers``:
        whether other engines, data-parallel ranks, wait for each step of this one."""
        self._steps_in_flight, self._has_peers = steps_in_flight, has_peers
        self._since_busy = steps_in_flight

    @property
    def others_run(self) -> bool:
        """Whether a step that computes or waits may be in progress, here or at peers."""
        return self._has_peers or self._since_busy < self._steps_in_flight - 1

    @property
    def wait_s(self) -> float:
        """How long the scheduler may wait in the empty step that it plans now."""
        return _BESIDE_STEPS_S if self.others_run else EMPTY_STEP_S

    def planned(self, *, busy: bool) -> None:
        """Record a planned step. ``busy``: whether it computes, or a worker waits in it."""
        self._since_busy = 0 if busy else self._since_busy + 1
