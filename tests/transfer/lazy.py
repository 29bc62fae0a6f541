"""A lane that copies as late as it may: when somebody waits, or computing would come next."""

from collections.abc import Callable
from threading import Lock

import torch

from objkv.transfer.lanes import HostBlocks, HostLane, Pages, Recast


class LazyLane(HostLane):
    """Reads the pages it is given when a mark behind them is waited for, not before."""

    def __init__(self) -> None:
        self._given: list[Callable[[], None]] = []
        self._passed = 0
        self._lock = Lock()

    def scatter(
        self, pages: Pages, cache: torch.Tensor, placed: HostBlocks, recast: Recast | None = None
    ) -> None:
        self._given.append(lambda: HostLane.scatter(self, pages, cache, placed, recast))

    def mark(self) -> "LazyMark":
        return LazyMark(self, len(self._given))

    def has_passed(self, number: int) -> bool:
        """Whether so many copies have been made."""
        return self._passed >= number

    def let_pass(self, number: int) -> None:
        """Make copies until there are so many."""
        with self._lock:
            while self._passed < number:
                self._given[self._passed]()
                self._passed += 1


class LazyMark:
    def __init__(self, lane: LazyLane, number: int) -> None:
        self._lane = lane
        self._number = number

    def done(self) -> bool:
        return self._lane.has_passed(self._number)

    def wait(self) -> None:
        self._lane.let_pass(self._number)

    def hold_compute(self) -> None:
        self._lane.let_pass(self._number)
