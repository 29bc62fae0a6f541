"""Counts the payloads that a node makes across the fleet, and saves those that are due.

No commit and no request waits for it: one thread sends as many sightings in a round trip as have
come during the last one. If the index fails, payloads count as not seen.
"""

from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Final

from objkv.agent.unsaved.payloads import UnsavedPayloads
from objkv.background import JOIN_S, Pool
from objkv.cache.chunks import ChunkCache
from objkv.codec.payload import Claim
from objkv.telemetry import Recorder

_WAITING_MAX: Final = 65_536
"""Payloads whose sighting may wait for a round trip. Further ones are not recorded."""
_BATCH: Final = 1000
"""The most payloads per round trip."""


class Sightings:
    """Thread-safe. ``add`` and ``wake`` never wait."""

    def __init__(
        self,
        cache: ChunkCache,
        unsaved: UnsavedPayloads,
        save: Callable[[Claim], None],
        has_room: Callable[[], bool],
        recorder: Recorder,
    ) -> None:
        """``save``: called on this object's thread for each payload that is due, while ``has_room``
        returns True. After that, ``wake`` must be called when there is room again."""
        self._cache, self._unsaved, self._save, self._has_room = cache, unsaved, save, has_room
        self._recorder = recorder
        self._lock = Lock()
        self._new: deque[str] = deque()
        self._pool: Pool[None] = Pool("objkv-sight", 1, self._run)
        unsaved.on_due = self.wake

    def add(self, path: str) -> None:
        """Record that a payload was made on this node."""
        with self._lock:
            if len(self._new) >= _WAITING_MAX:
                self._recorder.count("agent_sighting_drops")
                return
            self._new.append(path)
        self.wake()

    def wake(self) -> None:
        """Let the thread look for due payloads and new ones."""
        if not self._pool.waiting:  # a waiting job looks at everything
            self._pool.put((None,))

    def drain(self, seconds: float) -> bool:
        """Wait until everything was looked at, for at most ``seconds``. Returns whether it was."""
        return self._pool.drain(seconds)

    def close(self) -> None:
        """Stop. Idempotent."""
        self._pool.close(JOIN_S)

    def __repr__(self) -> str:
        return f"<Sightings {len(self._new)} waiting, {self._unsaved!r}>"

    def _run(self, job: None) -> None:
        while True:
            while self._has_room() and (claim := self._unsaved.take_due()) is not None:
                self._save(claim)
            with self._lock:
                names = [self._new.popleft() for _ in range(min(len(self._new), _BATCH))]
            if not names:
                return
            seen = self._cache.sight(names)
            for name, is_seen in zip(names, seen, strict=True):
                if is_seen:
                    self._recorder.count("agent_sighted_before")
                    self._unsaved.seen_again(name)
