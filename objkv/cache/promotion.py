"""Copies payloads that are loaded often from the bulk to the hot store, beside the loads.

One thread, a bounded queue; what does not fit is dropped and counted. Order: hot first, the record
that promises it last, so that a crash leaves a copy that nobody asks for, and which expires. The
record is changed under the lease that savers and sweeps take: what a sweep deletes meanwhile is not
announced again.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from threading import Condition, Thread
from time import monotonic
from uuid import uuid4

from objkv.cache.placement import HotLimits, OftenLoaded
from objkv.codec.payload import Claim, check_frames, read_header
from objkv.codec.seal import Seal
from objkv.errors import ObjkvError, PayloadError, StoreError
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import WriteStore
from objkv.telemetry import Recorder

_QUEUE_MAX = 64


class Promoter:
    """Safe from many threads; nothing here raises or waits, except ``close``."""

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
        self._owner = f"promoter-{uuid4().hex}"  # a saver of this process must wait, too
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
        self._queue: deque[Claim] = deque()
        self._changed = Condition()
        self._thread: Thread | None = None
        self._busy = False
        self._closed = False

    def loaded(self, claim: Claim, nbytes: int) -> None:
        """A payload of ``nbytes`` was loaded from bulk, because it has no hot copy, or no more."""
        path = claim.key.path()
        if not self._often.note(path, nbytes):
            return
        with self._changed:
            taken = not self._closed and len(self._queue) < _QUEUE_MAX and self._has_thread()
            if taken:
                self._queue.append(claim)
                self._changed.notify_all()
        if not taken:
            self._often.forget(path)
            self._recorder.count("hot_promote_drops")

    def drain(self, deadline_s: float) -> bool:
        """Wait until nothing is left to copy, at most so long; True if nothing is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, deadline_s)

    def close(self, deadline_s: float) -> bool:
        """Drop what waits, and end the thread; True if it has ended within the bound."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _has_thread(self) -> bool:
        """Whether there is a thread, which the first one who needs it starts."""
        if self._thread is None:
            thread = Thread(target=self._work, name="objkv-promote", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process may have no more threads, or is about to end
                return False
            self._thread = thread
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                claim = self._queue.popleft()
                self._busy = True
            try:
                self._promote(claim)
            except ObjkvError:
                self._recorder.count("hot_promote_errors")
                self._often.forget(claim.key.path())
            except Exception:  # a dead thread would let the queue fill up for ever
                self._recorder.count("hot_promote_errors")
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _promote(self, claim: Claim) -> None:
        key = claim.key
        shard = self._record(key)
        if shard is None or shard.nbytes > self._limits.payload_bytes_max:
            return  # withdrawn meanwhile
        if shard.hot and self._hot.head(key.path()) is not None:
            return  # promoted by another replica
        # Read once more: the bytes that were loaded lie in a slab that the load needs back.
        # No more of them than the record promised, whatever lies there now.
        room = memoryview(bytearray(shard.nbytes))
        nbytes = self._bulk.get_into(key.path(), room)
        if nbytes is None:
            return
        payload = room[:nbytes]
        header = read_header(payload, seal=self._seal)
        if header.claim != claim or header.checksum != shard.header_checksum:
            return
        if header.nbytes != len(payload):
            raise PayloadError(f"{len(payload)} bytes where the header says {header.nbytes}")
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
            return False  # somebody saves or deletes it right now
        try:
            if self._record(key) != shard or self._clock() >= end_s:
                return False  # what was withdrawn, or replaced, meanwhile is not brought back
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
        except StoreError:  # it ends by itself
            self._recorder.count("lease_errors")

    def _record(self, key: ChunkKey) -> ShardRecord | None:
        (record,) = self._index.lookup(key.namespace, [key.prefix_hash])
        return None if record is None else record.shards.get(key.field)
