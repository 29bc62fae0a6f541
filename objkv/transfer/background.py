"""Threads that save what a queue holds, in order, and how that ends.

What is saved, and how long it may wait, is its owner's business; here it is a callable. No thread
dies of what it saves: an error is counted and told to the log, a store that keeps failing once, and
the next save begins.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from threading import Condition, Thread
from time import monotonic
from typing import Generic, Protocol, TypeVar

from objkv.errors import LeftAlone, ObjkvError, StoreBusy
from objkv.telemetry import Recorder, Trouble

logger = logging.getLogger(__name__)

_JOIN_S = 1.0
"""At least so long ``close`` waits for threads that have nothing left to do."""
_SHED_S = 0.1
"""So long nothing is tried after a save that was not wanted."""


class Save(Protocol):
    """Something to be saved."""

    @property
    def path(self) -> str:
        """Where to, for the log."""


Item = TypeVar("Item", bound=Save)


class SaveCrew(Generic[Item]):
    """Safe from many threads; nothing waits, except ``drain`` and ``close``."""

    def __init__(
        self,
        name: str,
        threads: int,
        save: Callable[[Item], None],
        recorder: Recorder,
        *,
        start: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            name: what is saved, in the plural, as the log calls it.
            save: saves one item and lets go of what it holds, also when it raises.
            start: called by each thread before anything else.
        """
        self._name = name
        self._save = save
        self._start = start
        self._recorder = recorder
        self._clock = clock
        self._trouble = Trouble(logger, name)
        self._changed = Condition()
        self._queue: deque[Item] = deque()
        self._busy = 0
        self._closed = False
        self._shed_until = -math.inf
        label = name.removesuffix("s").replace(" ", "-")
        self._threads = [
            Thread(target=self._work, name=f"objkv-{label}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Items that no thread has taken yet."""
        return len(self._queue)

    @property
    def is_shedding(self) -> bool:
        """Whether the store was just found to be left alone, or asked too much: nothing is worth
        being taken for a moment. Saves are the first to give way."""
        return self._clock() < self._shed_until

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._closed

    def put(self, items: Iterable[Item]) -> bool:
        """Queue them all; False, and none is, once ``close`` was called."""
        with self._changed:
            if self._closed:
                return False
            self._queue.extend(items)
            self._changed.notify_all()
        return True

    def drain(self, deadline_s: float) -> bool:
        """Wait until all saves are through, at most so long; True if they are."""
        end = self._clock() + deadline_s
        with self._changed:
            while self._queue or self._busy:
                left = end - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self, drain_deadline_s: float, give_up: Callable[[Iterable[Item]], object]) -> None:
        """Drain within the bound, then stop: ``give_up`` is handed what is left. A thread whose
        store does not answer keeps what it saves until then. Idempotent."""
        end = monotonic() + drain_deadline_s
        if not self.drain(drain_deadline_s):
            left_over = len(self._queue) + self._busy
            logger.warning("%s dropped at shutdown count=%d", self._name, left_over)
        with self._changed:
            self._closed = True
            left, self._queue = self._queue, deque()
            self._changed.notify_all()
        give_up(left)
        end = max(end, monotonic() + _JOIN_S)
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))
        if stuck := [thread.name for thread in self._threads if thread.is_alive()]:
            logger.warning("threads still saving at shutdown names=%s", ",".join(stuck))

    def __str__(self) -> str:
        return f"{len(self._queue)} waiting, {self._busy} under way"

    def __repr__(self) -> str:
        return f"<SaveCrew {self._name}: {self}>"

    def _work(self) -> None:
        self._start()
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                item = self._queue.popleft()
                self._busy += 1
            try:
                self._save(item)
                self._trouble.worked()
            except (LeftAlone, StoreBusy):  # told by the breaker
                self._recorder.count("saves_shed")
                if not self.is_shedding:
                    self._shed_until = self._clock() + _SHED_S
            except ObjkvError as exc:
                self._recorder.count("save_errors")
                self._trouble.failed(exc)
            except Exception:  # a dead thread would let the queue fill up for ever
                self._recorder.count("save_errors")
                logger.exception("%s failed unexpectedly key=%s", self._name, item.path)
            finally:
                del item  # what it holds must not live until the next one comes
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()
