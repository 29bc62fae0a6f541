"""Many units of work by several threads: it can be stopped at any time, and go on later.

Whatever ends it, every unit is either done and told to the checkpoint, or done once more next time.
A unit whose work others may undo, or whose outcome depends on more than what it is named after, is
done in every run.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event, Lock
from time import monotonic
from typing import Literal

from objkv.ops.checkpoint import Checkpoint
from objkv.ops.tally import Tally

Ending = Literal["complete", "interrupted", "deadline", "limit"]
Check = Callable[[], None]
Tell = Callable[[int, int], None]
"""Told how many units are done, and of how many."""
_AHEAD = 2
"""Units under way or waiting, per thread."""


class Halted(Exception):
    """There is no time, or no allowance, for more."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Some work, whose name is the same in every run."""

    name: str
    work: Callable[[Tally, Check], None]
    """Counts what it finds; calls the check now and then, and lets what that raises pass."""
    again: bool = False
    """Never done for good: a run that continues another does it anew, and counts it anew."""


class Crew:
    """Runs units, as often as it is asked. Its owner's thread waits, and may be interrupted."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        workers: int,
        deadline_s: float | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``deadline_s``: from now on; nothing is begun afterwards."""
        self._checkpoint = checkpoint
        self._workers = workers
        self._clock = clock
        self._ends = None if deadline_s is None else clock() + deadline_s
        self._stop = Event()
        self._lock = Lock()
        self.ending: Ending = "complete"
        self.partial = Tally()
        """What units found that did not finish, or never do for good: it will be found again."""

    def run(self, units: Iterable[Unit], tell: Tell = lambda done, total: None) -> None:
        """Run those that are not done yet; nothing, if an earlier run of this crew was stopped.

        Raises the first error of a unit, after those under way have ended.
        """
        every = list(units)
        left = [unit for unit in every if unit.again or unit.name not in self._checkpoint.done]
        if self.ending != "complete":
            return
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="objkv-ops")
        running: dict[Future[Tally | None], Unit] = {}
        try:
            begun = self._begin(pool, left, running)
            self._wait_for(begun, running, lambda n: tell(len(every) - len(left) + n, len(every)))
        except KeyboardInterrupt:
            self.halt("interrupted")
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for future, unit in running.items():  # what ended while this thread was interrupted
                if not future.cancelled() and future.exception() is None:
                    self._take(unit, future.result())
            if self.ending == "complete":
                self._stop.clear()

    def halt(self, why: Ending) -> None:
        """No unit begins any more; those under way end at their next check."""
        with self._lock:
            if self.ending == "complete":
                self.ending = why
        self._stop.set()

    def check(self) -> None:
        """Raises ``Halted`` if it is time to end."""
        if self._ends is not None and self._clock() >= self._ends:
            self.halt("deadline")
        if self._stop.is_set():
            raise Halted

    def _begin(
        self, pool: ThreadPoolExecutor, left: list[Unit], running: dict[Future[Tally | None], Unit]
    ) -> Iterator[None]:
        """Begins as many as there is room for, each time it is asked; ends when all have begun."""
        for unit in left:
            while len(running) >= _AHEAD * self._workers:
                yield
            running[pool.submit(self._work, unit)] = unit

    def _wait_for(
        self,
        begun: Iterator[None],
        running: dict[Future[Tally | None], Unit],
        tell: Callable[[int], None],
    ) -> None:
        done = 0
        tell(done)
        while next(begun, None) or running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                done += self._take(running[future], future.result())
                del running[future]
            tell(done)

    def _take(self, unit: Unit, found: Tally | None) -> bool:
        if found is None:
            return False
        if unit.again:
            with self._lock:
                self.partial.add(found)
        else:
            self._checkpoint.finish(unit.name, found)
        return True

    def _work(self, unit: Unit) -> Tally | None:
        found = Tally()
        try:
            self.check()
            unit.work(found, self.check)
        except BaseException as exc:
            with self._lock:
                self.partial.add(found)
            if isinstance(exc, Halted):
                return None
            self._stop.set()
            raise
        return found
