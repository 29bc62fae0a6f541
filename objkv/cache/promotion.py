"""Copies frequently loaded payloads from the bulk store to the hot store, in the background.

It has one thread and a bounded queue. Payloads that do not fit are dropped and counted. It writes
the hot copy first and the record that promises it last, so a crash leaves only an unused copy,
which expires. The record is changed under the lease that savers and sweeps take, so a payload that
a sweep deletes meanwhile is not published again.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock
from time import monotonic
from uuid import uuid4

from objkv.background import Pool
from objkv.codec.payload import Claim, check_frames, read_header
from objkv.codec.seal import Seal
from objkv.errors import ObjkvError, PayloadError, StoreError
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import WriteStore
from objkv.telemetry import Recorder

HOUR_S = 3600.0
_PATHS_MAX = 65_536
_BUCKET_S = 60.0
"""Interval in which the budget of an hour is tracked."""


@dataclass(frozen=True, slots=True)
class HotLimits:
    """The hot store's limits from ``Config``: small payloads are copied when they are saved, larger
    ones when they are loaded often. A megabyte costs Redis twice: memory, and time of its single
    thread."""

    payload_bytes_max: int
    """Larger payloads never become hot; 0 disables the hot store for all."""
    save_bytes_max: int
    """Payloads up to this size become hot when they are saved."""
    promote_loads: int
    """This many loads from bulk within an hour make a payload hot."""
    promote_bytes_max: int
    """Maximum bytes that this process promotes within an hour."""


def belongs_in_hot(payload_bytes: int, limits: HotLimits) -> bool:
    """Whether a payload of this size is copied to the hot store when it is saved."""
    return payload_bytes <= min(limits.payload_bytes_max, limits.save_bytes_max)


class OftenLoaded:
    """Counts loads from bulk, to find payloads that should be hot. Bounded and thread-safe."""

    def __init__(self, limits: HotLimits, *, clock: Callable[[], float] = monotonic) -> None:
        assert limits.promote_loads >= 1
        self._limits = limits
        self._clock = clock
        self._lock = Lock()
        self._loads: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._spent: deque[tuple[float, int]] = deque()

    def note(self, path: str, nbytes: int) -> bool:
        """Record that ``path``, a payload of ``nbytes``, was loaded from bulk. Return True if it
        should become hot now. That happens at most once an hour per payload, and only within the
        budget, which is then charged."""
        limits = self._limits
        if nbytes > min(limits.payload_bytes_max, limits.promote_bytes_max):
            return False
        now = self._clock()
        with self._lock:
            count, since = self._loads.pop(path, (0, now))
            if now - since >= HOUR_S:
                count, since = 0, now
            due = count + 1 == limits.promote_loads
            promoted = due and self._spend(nbytes, now)
            if promoted or not due:  # without budget, the next load tries again
                count = min(count + 1, limits.promote_loads)
            self._loads[path] = count, since
            while len(self._loads) > _PATHS_MAX:
                self._loads.popitem(last=False)
            return promoted

    def forget(self, path: str) -> None:
        """Restart the count of a payload that did not become hot."""
        with self._lock:
            self._loads.pop(path, None)

    def _spend(self, nbytes: int, now: float) -> bool:
        while self._spent and now - self._spent[0][0] >= HOUR_S + _BUCKET_S:
            self._spent.popleft()
        if sum(spent for _, spent in self._spent) + nbytes > self._limits.promote_bytes_max:
            return False
        if self._spent and now - self._spent[-1][0] < _BUCKET_S:
            since, spent = self._spent.pop()
            self._spent.append((since, spent + nbytes))
        else:
            self._spent.append((now, nbytes))
        return True


_QUEUE_MAX = 64


class Promoter:
    """Copies payloads on its own thread. Thread-safe; only ``close`` and ``drain`` wait, and
    nothing raises."""

    def __init__(
        self,
        bulk: WriteStore,
        hot: WriteStore,
        index: WriteIndex,
        limits: HotLimits,
        *,
        ttl_s: int,
        lease_ms: int,
        recorder: Recorder,
        seal: Seal | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._owner = (
            f"promoter-{uuid4().hex}"  # its own name, so that a saver of this process must wait too
        )
        self._lease_ms = lease_ms
        self._clock = clock
        self._bulk = bulk
        self._hot = hot
        self._index = index
        self._limits = limits
        self._ttl_s = ttl_s
        self._recorder = recorder
        self._seal = seal
        self._often = OftenLoaded(limits, clock=clock)
        self._pool: Pool[Claim] = Pool(
            "objkv-promote", 1, self._promote, failed=self._failed, lazy=True
        )

    def loaded(self, claim: Claim, nbytes: int) -> None:
        """Record that a payload of ``nbytes`` was loaded from bulk, because it had no hot copy."""
        path = claim.key.path()
        if not self._often.note(path, nbytes):
            return
        if not (self._pool.waiting < _QUEUE_MAX and self._pool.put((claim,))):
            self._often.forget(path)
            self._recorder.count("hot_promote_drops")

    def drain(self, deadline_s: float) -> bool:
        """Wait at most ``deadline_s`` until the queue is empty. Return True if it is."""
        return self._pool.drain(deadline_s)

    def close(self, deadline_s: float) -> bool:
        """Drop queued payloads and end the thread. Return True if it ended within
        ``deadline_s``."""
        return not self._pool.close(deadline_s)

    def _failed(self, claim: Claim, error: Exception) -> None:
        self._recorder.count("hot_promote_errors")
        if isinstance(error, ObjkvError):
            self._often.forget(claim.key.path())

    def _promote(self, claim: Claim) -> None:
        key = claim.key
        shard = self._record(key)
        if shard is None or shard.nbytes > self._limits.payload_bytes_max:
            return  # withdrawn meanwhile
        if shard.hot and self._hot.head(key.path()) is not None:
            return  # promoted by another replica
        # Read once more, because the load needs its slab back. Read no more bytes than the record
        # promised, whatever is stored now.
        room = memoryview(bytearray(shard.nbytes))
        nbytes = self._bulk.get_into(key.path(), room)
        if nbytes is None:
            return
        payload = room[:nbytes]
        header = read_header(payload, seal=self._seal)
        if header.claim != claim or header.checksum != shard.header_checksum:
            return
        if header.nbytes != len(payload):
            raise PayloadError(
                f"the payload has {len(payload)} bytes, its header announces {header.nbytes}"
            )
        check_frames(header, payload)
        self._hot.put(key.path(), payload)
        if self._announce(claim, shard):
            self._recorder.count("hot_promotions")
            self._recorder.count("hot_promoted_bytes", len(payload))

    def _announce(self, claim: Claim, shard: ShardRecord) -> bool:
        key = claim.key
        end_s = self._clock() + self._lease_ms / 1000
        if not self._index.lease(key.path(), self._owner, ttl_ms=self._lease_ms):
            self._often.forget(key.path())
            return False  # another process is saving or deleting it
        try:
            if self._record(key) != shard or self._clock() >= end_s:
                return False  # it was withdrawn or replaced meanwhile
            chunk = ChunkEntry(
                key.namespace,
                key.prefix_hash,
                claim.parent_hash,
                claim.token_start,
                claim.token_end,
            )
            self._index.publish(chunk, {key.field: replace(shard, hot=True)}, ttl_s=self._ttl_s)
        finally:
            self._release(key)
        return True

    def _release(self, key: ChunkKey) -> None:
        try:
            self._index.release(key.path(), self._owner)
        except StoreError:  # the lease expires
            self._recorder.count("lease_errors")

    def _record(self, key: ChunkKey) -> ShardRecord | None:
        (record,) = self._index.lookup(key.namespace, [key.prefix_hash])
        return None if record is None else record.shards.get(key.field)
