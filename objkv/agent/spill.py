"""The tier below the arena: payloads that were read are kept on a local disk too.

One background thread writes them, from under a lease and never while a reader waits for it. A fill
looks here before it requests anything from the stores, and verifies the bytes in the same way.
After any fault the payload comes from the stores, as if there were no disk.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import BoundedSemaphore, Event
from time import monotonic

from objkv.agent.arena_cache import ArenaCache, CachedPayload
from objkv.agent.disk import HELD_BACK, Disk
from objkv.agent.fill import DiskCopy, Fill, PayloadRequest, Staging
from objkv.agent.held_back import parse_held_back
from objkv.background import Pool
from objkv.codec.header import HEADER_BYTES_MAX
from objkv.codec.payload import recode
from objkv.codec.seal import Seal
from objkv.errors import LeftAlone, PayloadError, StoreError, ValueTooLong
from objkv.net.breaker import BreakerLimits, Breakers
from objkv.net.deadline import ends_s
from objkv.stores.base import Arrived
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)
_HANGS_S = 1.0
"""If no read brings a byte within this time, the disk hangs. A payload whose turn to be read has
not come by then comes sooner from the stores, from a disk that works, too."""
_LOOK_S = 1.0
"""How often to look whether another agent gave up the folder."""
_QUEUE_MAX = 1024
"""Payloads that may wait to be written. They have no lease meanwhile."""
_PURGE = ""
"""The job that only removes files."""


class Spill:
    """Thread-safe. Only ``read`` and ``close`` wait, ``read`` for the disk."""

    def __init__(
        self,
        arena_cache: ArenaCache,
        disk: Disk,
        seal: Seal | None,
        readers: int,
        recorder: Recorder,
    ) -> None:
        """Takes over ``disk``. ``seal``: seals files as it seals payloads in the stores.
        ``readers``: threads that may read at once: not all, since a disk that hangs keeps them."""
        self.disk = disk
        self._arena_cache, self._held = arena_cache, arena_cache.held_back
        self._seal, self._recorder = seal, recorder
        self._slots = BoundedSemaphore(readers)
        self._arrived_s = -math.inf
        """When a read last brought bytes."""
        self._breakers = Breakers("disk", BreakerLimits(), recorder)
        self._ended = Event()
        self._pool: Pool[str] = Pool("objkv-spill", 1, self._write, begin=self._load)

    def offer(self, one: CachedPayload) -> None:
        """Have a payload that is READY written, unless it is on disk. Never waits."""
        if one.is_spilled:
            return
        if self.disk.size_of(one.key) is None:
            if self._pool.waiting >= _QUEUE_MAX:
                self._recorder.count("agent_disk_drops")
                return
            self._pool.put((one.key,))
        one.is_spilled = True  # if two threads come here, the second job finds it on disk

    def disk_copy(self, wanted: PayloadRequest) -> DiskCopy | None:
        """Return a payload's copy on the disk; None if it has to come from the stores."""
        key, raw_bytes = wanted.claim.key.path(), wanted.record.raw_bytes
        nbytes = self.disk.size_of(key)
        if nbytes is None or self._ended.is_set():
            return None
        if not 0 <= nbytes - raw_bytes <= HEADER_BYTES_MAX:
            self._refuse(key, f"{nbytes} bytes for {raw_bytes} of pages")
            return None
        return DiskCopy(nbytes, partial(self._get_into, key))

    def read(self, fill: Fill, staging: Staging) -> bool:
        """Complete a fill of a ``disk_copy``. Return False if it has to come from the stores:
        readers know of no frame then. A wrong file goes. Raises ``MissError``."""
        key = fill.wanted.claim.key.path()
        try:
            with self._breakers.attempt("read", "read"), self._slot():
                if fill.run(staging):
                    self._recorder.count("agent_disk_hits")
                    self._recorder.count("agent_disk_read_bytes", fill.nbytes)
                    self.disk.use(key)
                    return True
                self.forget(key)
        except LeftAlone:
            self._recorder.count("agent_disk_busy")
        except (PayloadError, ValueTooLong) as exc:
            self._refuse(key, str(exc))
        except StoreError as exc:
            self._recorder.count("agent_disk_errors")
            logger.debug("payload not read from disk reason=%s", exc)
            self.forget(key)
        return False

    def forget(self, key: str) -> None:
        """Remove a payload, also if it is being written. The arena must have forgotten it."""
        if self.disk.discard(key):
            self._arena_cache.note_lost(key)
        if self.disk.has_dropped and not self._pool.waiting:  # a waiting job removes it, too
            self._pool.put((_PURGE,))

    def drain(self, seconds: float) -> bool:
        """Wait until all files are written, for at most ``seconds``. Returns whether they are."""
        return self._pool.drain(seconds)

    def close(self, seconds: float) -> None:
        """Give the folder to the next agent. Waiting payloads are not written. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        if not self._pool.close(seconds):  # otherwise the process's end gives it up
            self._hand_over_held_back()
            self.disk.folder.close()

    def _hand_over_held_back(self) -> None:
        kept = self._held.written()
        if not kept or not self.disk.is_loaded:
            return
        try:
            self.disk.folder.write(HELD_BACK, memoryview(b"".join(kept.values())))
        except StoreError as exc:
            logger.warning("held-back payloads not listed for the next agent reason=%s", exc)
            return
        for path in kept:
            self._held.saved(path)

    def _find_held_back(self) -> None:
        for line in self.disk.folder.take_held_back().splitlines():
            claim, record = parse_held_back(line)
            path = claim.key.path()
            if path not in self._held and self.disk.mark_only_copy(path):
                self._held.add(claim, record, is_due=False)

    def _load(self) -> None:
        try:
            folder = self.disk.folder
            if not folder.lock():
                logger.warning("disk left out while another agent has it folder=%s", folder.path)
                while not folder.lock():
                    if self._ended.wait(_LOOK_S):
                        return
            self.disk.load(self._ended.is_set)
            self._find_held_back()
        except PayloadError as exc:
            logger.warning("held-back payloads of the last agent left out reason=%s", exc)
        except StoreError as exc:
            self._recorder.count("agent_disk_errors")
            logger.warning("disk left out until the agent's next start reason=%s", exc)
        except Exception:  # it would end the thread
            logger.exception("disk left out, unexpectedly")

    def _write(self, key: str) -> None:
        """Write one payload, on the background thread."""
        try:
            with self._breakers.attempt("write", "write"):
                self.disk.purge()
                if key != _PURGE and self.disk.is_loaded and self.disk.size_of(key) is None:
                    self._write_resident(key)
        except LeftAlone:
            self._recorder.count("agent_disk_drops")
        except StoreError as exc:
            self._recorder.count("agent_disk_errors")
            logger.debug("payload not written to disk reason=%s", exc)

    def _write_resident(self, key: str) -> None:
        self.disk.begin(key)  # first, so that no ``forget`` is missed
        one = self._arena_cache.lease_ready(key)
        if one is None:
            self._recorder.count("agent_disk_drops")
            return
        try:
            payload = self._arena_cache.view(one)
            if self._seal is not None:
                payload, _ = recode(payload, codec="none", seal=self._seal)
            evicted = self.disk.make_room(len(payload))
            for path in filter(None, evicted):  # they were nowhere else
                self._arena_cache.note_lost(path)
            is_written = self.disk.write(key, payload)
        finally:
            self._arena_cache.release(one)
        if not is_written:
            self._recorder.count("agent_disk_drops")
            self.disk.purge()
            return
        self._recorder.count("agent_disk_writes")
        self._recorder.count("agent_disk_written_bytes", len(payload))
        self._recorder.count("agent_disk_evictions", len(evicted))

    def _get_into(self, key: str, buffer: memoryview, arrived: Arrived) -> int | None:
        def seen(nbytes: int) -> None:
            self._arrived_s = monotonic()
            arrived(nbytes)

        return self.disk.get_into(key, buffer, seen)

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """Be one of the threads that read. Raises ``LeftAlone`` if none of them ends in time."""
        began_s = monotonic()
        seconds = max(0.0, min(_HANGS_S, ends_s() - began_s))
        if not self._slots.acquire(timeout=seconds):
            error = LeftAlone("disk: reads hang")
            if seconds == _HANGS_S and self._arrived_s < began_s:
                self._breakers.read.open(error)
            raise error
        try:
            yield
        finally:
            self._slots.release()

    def _refuse(self, key: str, reason: str) -> None:
        self._recorder.count("agent_disk_corrupt")
        logger.warning("payload on disk refused key=%s reason=%s", key, reason)
        self.forget(key)
