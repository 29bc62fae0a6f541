"""Background saves of any kind: deadline, lease, encoding, store and counters.

Each failed save is counted. A store that keeps failing is logged once. When a store is overloaded,
saves are the first calls to stop.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Generic, Protocol, TypeVar

from objkv.background import JOIN_S, Pool
from objkv.cache.chunks import ChunkCache, SaveOutcome
from objkv.codec.payload import Claim, Header
from objkv.errors import LeftAlone, ObjkvError, StoreBusy
from objkv.telemetry import Recorder, Trouble

logger = logging.getLogger(__name__)

SHED_S = 0.1
"""How long saves pause after the store refused one."""


class Save(Protocol):
    """An item to save. Its key was passed to ``ChunkCache.begin_save``."""

    @property
    def claim(self) -> Claim:
        """The claim of its payload."""

    @property
    def deadline(self) -> float:
        """Time on the pool's clock after which it is dropped."""

    def encode(self) -> tuple[memoryview, Header]:
        """Return the payload, which stays valid until ``release``. May wait for the device."""

    def release(self) -> None:
        """Release the item's resources. Called once, on a thread of the pool."""


Item = TypeVar("Item", bound=Save)


class SavePool(Generic[Item]):
    """Threads that save items. Thread-safe. Only ``drain`` and ``close`` wait."""

    def __init__(
        self,
        name: str,
        threads: int,
        cache: ChunkCache,
        recorder: Recorder,
        *,
        late: Callable[[Item], object],
        saved: Callable[[Header, float, SaveOutcome], None] = lambda *_: None,
        leased: Callable[[Item], object] = lambda _: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            name: the kind of items, in the plural, for the log.
            late: called for an item whose deadline has passed.
            saved: called with the header, seconds and outcome of each save.
            leased: called for an item that another process is saving.
        """
        self._name = name
        self._cache = cache
        self._recorder = recorder
        self._late = late
        self._saved, self._leased = saved, leased
        self._clock = clock
        self._trouble = Trouble(logger, name)
        self._shed_until = -math.inf
        label = name.removesuffix("s").replace(" ", "-")
        self._pool = Pool(f"objkv-{label}", threads, self._save, failed=self._failed)

    @property
    def waiting(self) -> int:
        """Items that no thread has taken yet."""
        return self._pool.waiting

    @property
    def threads(self) -> int:
        """Threads that have not ended."""
        return self._pool.threads

    @property
    def is_shedding(self) -> bool:
        """Whether saves pause because the store has just refused one."""
        return self._clock() < self._shed_until

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._pool.is_closed

    def put(self, items: Iterable[Item]) -> bool:
        """Queue all items. After ``close``, queue none and return False."""
        return self._pool.put(items)

    def drain(self, seconds: float) -> bool:
        """Wait for all saves, for at most ``seconds``. Returns whether all have ended."""
        return self._pool.drain(seconds)

    def close(self, drain_s: float, give_up: Callable[[Sequence[Item]], object]) -> None:
        """Drain within the bound, then stop. ``give_up`` receives the items that no thread has
        begun. If a store hangs, its thread keeps its item until the call ends. Idempotent."""
        end = monotonic() + drain_s
        if not self._pool.drain(drain_s):
            count = self._pool.waiting + self._pool.busy
            logger.warning("%s dropped at shutdown count=%d", self._name, count)
        stuck = self._pool.close(max(end - monotonic(), JOIN_S), give_up=give_up)
        if stuck:
            logger.warning("threads still saving at shutdown names=%s", ",".join(stuck))

    def __str__(self) -> str:
        return str(self._pool)

    def _save(self, item: Item) -> None:
        try:
            self._store(item)
        finally:
            item.release()
            self._cache.end_save(item.claim.key)
        self._trouble.worked()

    def _store(self, item: Item) -> None:
        key = item.claim.key
        if self._clock() >= item.deadline:
            self._late(item)
            return
        if self.is_shedding:
            raise LeftAlone("saves pause after the store refused one")
        if not self._cache.take_lease(key):
            self._recorder.count("save_leased_elsewhere")
            self._leased(item)
            return
        started = self._clock()
        try:
            payload, header = item.encode()
            outcome = self._cache.save(item.claim, payload, header)
        finally:
            self._cache.release_lease(key)
        seconds = self._clock() - started
        self._recorder.observe("save_seconds", seconds)
        if outcome is SaveOutcome.SAVED:
            self._recorder.count("saves")
            self._recorder.count("save_bytes", header.nbytes)
        else:
            self._recorder.count("save_existed")
        self._saved(header, seconds, outcome)

    def _failed(self, item: Item, error: Exception) -> None:
        if isinstance(error, LeftAlone | StoreBusy):  # logged by the circuit breaker
            self._recorder.count("saves_shed")
            if not self.is_shedding:
                self._shed_until = self._clock() + SHED_S
            return
        self._recorder.count("save_errors")
        if isinstance(error, ObjkvError):
            self._trouble.failed(error)
        else:
            path = item.claim.key.path()
            logger.error("%s failed unexpectedly key=%s", self._name, path, exc_info=error)
