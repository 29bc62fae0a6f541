"""The hot copies of payloads, as saves and loads see them: shortcuts, which may be gone any time.

A hot store that fails is one without copies: counted, never raised.
"""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from objkv.cache.placement import HotLimits, belongs_in_hot
from objkv.errors import StoreError
from objkv.stores.base import Buffer, WriteStore
from objkv.telemetry import Recorder

_PATHS_MAX = 65_536


class HotCopies:
    """Copies by path; without a store there are none. Safe from many threads."""

    def __init__(self, store: WriteStore | None, limits: HotLimits, recorder: Recorder) -> None:
        self._store = store
        self._limits = limits
        self._recorder = recorder
        self._lock = Lock()
        self._lost: OrderedDict[str, None] = OrderedDict()
        self._distrusted: OrderedDict[str, None] = OrderedDict()

    def get(self, path: str, get: Callable[[WriteStore], int | None]) -> int | None:
        """What ``get`` finds of a promised copy; None where bulk has to be asked."""
        if self._store is None or self._is_distrusted(path):
            return None
        try:
            nbytes = get(self._store)
        except StoreError:
            self._recorder.count("hot_errors")
            return None
        self._recorder.count("hot_misses" if nbytes is None else "hot_hits")
        with self._lock:
            self._lost.pop(path, None)
            if nbytes is None:  # evicted, or its time was over before the record's
                _remember(self._lost, path)
        return nbytes

    def distrust(self, path: str) -> None:
        """A payload that was promised to be hot was corrupt: its copy is not asked for any more
        until this process has made another, whoever promises it. It may not be this one's to make,
        and bulk may be fine."""
        with self._lock:
            _remember(self._distrusted, path)

    def is_lost(self, path: str) -> bool:
        """Whether a copy that was promised was not there when it was last asked for."""
        with self._lock:
            return path in self._lost

    def has(self, path: str, nbytes: int) -> bool:
        """Whether there is a copy of this size, which costs a round trip."""
        if self._store is None or nbytes > self._limits.payload_bytes_max:
            return False
        if self._is_distrusted(path):
            return False
        try:
            entry = self._store.head(path)
        except StoreError:
            self._recorder.count("hot_errors")
            return False
        return entry is not None and entry.nbytes == nbytes

    def put(self, path: str, payload: Buffer, *, suspect: bool) -> bool:
        """Make a copy if ``payload`` is small; whether there is one now. ``suspect``: an older
        payload was corrupt, which may have been its copy: that is replaced whatever its size."""
        if self._store is None:
            return False
        nbytes = len(payload)
        mends = suspect and nbytes <= self._limits.payload_bytes_max
        if not (mends or belongs_in_hot(nbytes, self._limits)):
            return False
        try:
            self._store.put(path, payload)
        except StoreError:
            self._recorder.count("hot_errors")
            return False
        with self._lock:
            self._distrusted.pop(path, None)
        return True

    def _is_distrusted(self, path: str) -> bool:
        with self._lock:
            return path in self._distrusted


def _remember(paths: "OrderedDict[str, None]", path: str) -> None:
    paths[path] = None
    while len(paths) > _PATHS_MAX:
        paths.popitem(last=False)
