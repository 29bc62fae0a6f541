"""The core: what a node's replicas share by an agent.

Clients open payloads. Each payload is fetched and verified once, by threads of the core, in the
order of urgency and, among clients, in turn by bytes. Any fault is a miss with a reason.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from threading import Condition, Lock, Thread, get_ident
from time import monotonic
from typing import Final, NamedTuple

from objkv.agent.arena_cache import ArenaCache, CachedPayload, Waiter
from objkv.agent.disk import Disk
from objkv.agent.fill import (
    NO_PARTS,
    DiskCopy,
    Fill,
    KnownLayouts,
    MissError,
    PartPolicy,
    PayloadRequest,
    Staging,
)
from objkv.agent.memory.arena import Arena, CellState
from objkv.agent.messages import ClaimRow, Claims, MissReason, Urgency, is_held_back
from objkv.agent.spill import Spill
from objkv.background import join_all
from objkv.cache.chunks import ChunkCache
from objkv.cache.lookup import LOOKUP_TTL_S
from objkv.codec.values import Claim
from objkv.errors import ObjkvError, PayloadError, StoreError, ValueTooLong
from objkv.index.base import ShardRecord, ShardRecords
from objkv.keys.chunk import ChunkKey, payload_path
from objkv.net.deadline import EndsBy
from objkv.telemetry import FailureLog, Recorder

logger = logging.getLogger(__name__)
_IDLE_S = 10.0
"""After this time without a payload, a fetching thread gives its staging buffer back."""
_LATE_S = 0.2
"""A thread hangs if it goes on for this time after its payload's deadline."""
_OPEN_AT_ONCE = 8
"""Payloads under one hold of the lock: a prefetch of thousands must not delay other replicas."""
_OVERDUE_SHARE = 1 / 4
"""A load between steps is overdue after this share of its time."""
_TYPICAL_BYTES = 1 << 20
"""Of a payload whose record has to be looked up."""


class Priority(NamedTuple):
    """When a payload will be fetched."""

    urgency: Urgency
    priority: int
    """Among payloads of one urgency lower values go first."""
    deadline: float
    """By ``monotonic``."""


class FetchJob(NamedTuple):
    """A payload, or the rest of one, that waits to be fetched."""

    urgency: Urgency
    priority: int
    turn: int
    """The client's bytes so far, on a clock that all clients share."""
    number: int
    one: CachedPayload
    claim: Claim
    record: ShardRecord | None
    """The payload's record; None if no lookup of this node has found it lately."""
    deadline: float
    overdue: float
    """When it goes first, if no forward pass waits for it."""
    fill: Fill | None = None
    """The fill that this job continues; None at the beginning."""


class FetchQueue:
    """A queue by urgency and priority, and among clients in turn by bytes. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[FetchJob] = []
        self._jobs: dict[CachedPayload, FetchJob] = {}
        """The valid job of each payload: one that was hastened leaves its old one in the heap."""
        self._numbers = count()
        self._between: deque[FetchJob] = deque()
        """Loads between steps, in the order in which they came."""
        self._was_overdue = False
        self._clock = 0
        self._due: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(
        self,
        client: object,
        one: CachedPayload,
        claim: Claim,
        record: ShardRecord | None,
        due: Priority,
    ) -> None:
        """Queue a payload."""
        turn = max(self._due.get(client, 0), self._clock)
        self._due[client] = turn + (_TYPICAL_BYTES if record is None else record.nbytes)
        now = monotonic()
        overdue = now + _OVERDUE_SHARE * (due.deadline - now)
        number, deadline = next(self._numbers), due.deadline
        self._push(FetchJob(*due[:2], turn, number, one, claim, record, deadline, overdue))

    def add_rest(self, job: FetchJob) -> None:
        """Queue the rest of a payload, behind the beginnings of others of its urgency."""
        self._push(job._replace(priority=job.priority + 1, number=next(self._numbers)))

    def hasten(self, one: CachedPayload, due: Priority) -> bool:
        """Another client waits for a payload too: if it is queued, the more urgent of both
        urgencies and the later of both deadlines apply. Returns whether it is queued."""
        if (job := self._jobs.get(one)) is None:
            return False
        urgency, priority = min(due[:2], job[:2])
        deadline = max(job.deadline, due.deadline)
        new = job._replace(urgency=urgency, priority=priority, deadline=deadline)
        if new != job:
            self._push(new._replace(number=next(self._numbers)))
        return True

    def discard(self, given_up: Callable[[CachedPayload], bool]) -> None:
        """Remove the payloads that are ``given_up``."""
        for one in [one for one in self._jobs if given_up(one)]:
            del self._jobs[one]

    def next_urgency(self) -> Urgency | None:
        """Return the urgency of the next one; None if there is none."""
        while self._heap and self._jobs.get(self._heap[0].one) is not self._heap[0]:
            heappop(self._heap)
        return self._heap[0].urgency if self._heap else None

    def pop(self) -> FetchJob:
        """Take the next one."""
        assert self.next_urgency() is not None
        job = self._pop_overdue() or heappop(self._heap)
        del self._jobs[job.one]
        self._clock = max(self._clock, job.turn)
        return job

    def _push(self, job: FetchJob) -> None:
        self._jobs[job.one] = job
        heappush(self._heap, job)
        if job.urgency is Urgency.BETWEEN_STEPS:
            self._between.append(job)

    def _pop_overdue(self) -> FetchJob | None:
        """Take a load between steps that is overdue, so that forward passes do not starve them. At
        most every second one, so that they do not starve forward passes."""
        between = self._between
        while between and self._jobs.get(between[0].one) is not between[0]:
            between.popleft()
        self._was_overdue = (
            not self._was_overdue and bool(between) and monotonic() >= between[0].overdue
        )
        return between.popleft() if self._was_overdue else None

    def forget(self, client: object) -> None:
        """The client has gone."""
        self._due.pop(client, None)


_CHUNKS_MAX: Final = 32_768
"""Chunks whose records are kept: about 25 MB. The oldest ones go first."""
_ANSWERS_MAX: Final = 4
"""Of one chunk: replicas of a node may ask for different payloads of it."""


class _Answer(NamedTuple):
    namespace: str
    """Chunks of different namespaces may have the same hash: a tier's are vLLM's."""
    shards: ShardRecords
    end_s: float


class FoundRecords:
    """The records of payloads that lookups of this node have found lately. Thread-safe. A client
    opens payloads by their keys, and the agent fetches them by their records, which it has just
    looked up for the client. One that is not kept any more is looked up again."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._by_chunk: OrderedDict[bytes, tuple[_Answer, ...]] = OrderedDict()
        """The last answers about each chunk, the newest first."""

    def add(self, namespace: str, found: Iterable[tuple[bytes, ShardRecords | None]]) -> None:
        """Keep what a lookup has found, by prefix hash."""
        end_s = self._clock() + LOOKUP_TTL_S
        with self._lock:
            for prefix_hash, shards in found:
                if shards is not None:
                    new = _Answer(namespace, shards, end_s)
                    others = self._by_chunk.pop(prefix_hash, ())
                    if others:
                        others = tuple(one for one in others if not _replaces(new, one))
                    self._by_chunk[prefix_hash] = (new, *others[: _ANSWERS_MAX - 1])
            while len(self._by_chunk) > _CHUNKS_MAX:
                self._by_chunk.popitem(last=False)

    def of(self, key: ChunkKey) -> ShardRecord | None:
        """Return a payload's record; None if it is not kept."""
        now = self._clock()
        for namespace, shards, end_s in self._by_chunk.get(key.prefix_hash, ()):
            if namespace == key.namespace and now < end_s and key.field in shards:
                return shards[key.field]
        return None

    def forget(self, prefix_hash: bytes) -> None:
        """Forget a chunk: something about its record has changed."""
        if prefix_hash in self._by_chunk:
            with self._lock:
                self._by_chunk.pop(prefix_hash, None)


def _replaces(new: _Answer, old: _Answer) -> bool:
    return new.namespace == old.namespace and all(field in new.shards for field in old.shards)


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Bounds of the core."""

    threads: int
    queue_max: int = 4096
    """Payloads of some long prompts. Further ones are misses: they would only be late."""
    disk_keeps_all: bool = False
    """Whether payloads are written to the disk that were not read."""
    part_policy: PartPolicy = field(default_factory=PartPolicy)


class Core:
    """Thread-safe. ``open`` and ``release`` never wait."""

    def __init__(
        self,
        cache: ChunkCache,
        arena: Arena,
        limits: CoreLimits,
        recorder: Recorder,
        *,
        disk: Disk | None = None,
        changed: Callable[[bytes], object] = lambda prefix_hash: None,
        came_due: Callable[[], object] = lambda: None,
    ) -> None:
        """The core closes ``disk``, and neither ``cache`` nor ``arena``. ``changed``: called for a
        chunk after a lookup of it has another outcome. ``came_due``: called after payloads that
        were held back are to be saved. Neither may wait."""
        self.found = FoundRecords()
        self._answers_changed = changed
        self.arena_cache = ArenaCache(arena, recorder, self.record_changed, came_due, disk)
        self.spill: Spill | None = None
        if disk is not None:
            readers = max(1, limits.threads - max(1, limits.threads // 4))
            self.spill = Spill(self.arena_cache, disk, cache.seal, readers, recorder)
        self._cache, self._limits, self._recorder = cache, limits, recorder
        self._failure_log = FailureLog(logger, "loads")
        self._changed = Condition(Lock())
        self._fetches = FetchQueue()
        self._busy: dict[int, float] = {}
        """The deadline of the payload that each busy thread fetches, by thread id."""
        self._prefetching = 0
        self._closed = self._draining = False
        self.layouts = KnownLayouts()
        self._threads = [
            Thread(target=self._serve, name=f"objkv-fill-{n}", daemon=True)
            for n in range(limits.threads)
        ]
        for thread in self._threads:
            thread.start()

    def open(
        self,
        client: Waiter,
        wanted: Claims,
        *,
        deadline_s: float,
        urgency: Urgency,
        priority: int = 0,
    ) -> list[CachedPayload | MissReason]:
        """Take a lease of each payload, and fetch those that are not resident within
        ``deadline_s``. ``client`` is woken at each progress. The caller releases each lease.

        A claim that differs from that of a payload here is a miss. If that is READY it is rejected,
        which may wait for the index; if not, its own fetch shows what it is.
        """
        if self._draining:
            return [MissReason.CLOSED] * len(wanted)
        due = Priority(urgency, priority, monotonic() + deadline_s)
        opened: list[CachedPayload | MissReason] = []
        rows = list(wanted)
        for at in range(0, len(rows), _OPEN_AT_ONCE):
            opened += self._open(client, wanted, rows[at : at + _OPEN_AT_ONCE], due)
        if MissReason.CORRUPT in opened:
            for row, one in zip(rows, opened, strict=True):
                if one is MissReason.CORRUPT:
                    claim = wanted.claim(row)
                    logger.warning("payload refused reason=not as opened: %s", claim)
                    if self.arena_cache.contains_ready([claim.key.path()])[0]:
                        self.reject(claim)
        return opened

    def _open(
        self, client: Waiter, wanted: Claims, rows: Sequence[ClaimRow], due: Priority
    ) -> list[CachedPayload | MissReason]:
        ahead = due.urgency is Urgency.PREFETCH
        opened = list[CachedPayload | MissReason]()
        new, old, lost = list[CachedPayload](), list[CachedPayload](), list[CachedPayload]()
        with self._changed:  # a client that finds a payload must be able to hasten it
            for row in rows:
                prefix_hash, parent_hash, start, end, field = row
                path = payload_path(wanted.namespace, prefix_hash, wanted.fields[field])
                lease = self.arena_cache.open(path, (parent_hash, start, end), client, ahead=ahead)
                if isinstance(lease, MissReason):
                    opened.append(lease)
                    continue
                resident, is_new = lease
                is_filling = not is_new and resident.state is CellState.FILLING
                if is_filling and not self._joins(resident, due):
                    opened.append(MissReason.NO_ROOM)
                    continue
                resident.deadline = max(resident.deadline, due.deadline)
                if is_new and not self._queue(client, resident, wanted.claim(row), due):
                    lost.append(resident)
                opened.append(resident)
                (new if is_new else old).append(resident)
        for resident in lost:
            self.arena_cache.failed(resident, MissReason.NO_ROOM)
        if new:
            self._recorder.count("agent_prefetches" if ahead else "agent_fills", len(new))
        if old and not ahead:
            self._recorder.count("agent_hits", len(old))
            for resident in old if self.spill is not None else ():
                self.offer_to_disk(resident, was_read=True)
        return opened

    def _joins(self, resident: CachedPayload, due: Priority) -> bool:
        """Whether one more client may wait for a fill, maybe sooner. If not, ends its lease."""
        if self._is_stuck():
            self.arena_cache.release(resident)
            return False
        if self._fetches.hasten(resident, due):
            self._changed.notify()
        return True

    def reject(self, claim: Claim) -> None:
        """Stop serving this copy of a payload, and forget its record. May wait for the index."""
        key, held = claim.key, self.arena_cache.held_back
        record, is_held_back = self.found.of(key), key.path() in held
        self.arena_cache.forget(key.path())
        if self.spill is not None:
            self.spill.forget(key.path())
        if record is None and not is_held_back:
            with suppress(StoreError):
                record = self._cache.record_of(key)
        self._reject(key, record, corrupt=True)

    def record_changed(self, prefix_hash: bytes) -> None:
        """A lookup of a chunk has another outcome from now on. Never waits."""
        self.found.forget(prefix_hash)
        self._answers_changed(prefix_hash)

    def offer_to_disk(self, one: CachedPayload, *, was_read: bool) -> None:
        """Have a payload written to the disk, if it is READY, and such payloads are."""
        is_kept = was_read or self._limits.disk_keeps_all
        if is_kept and self.spill is not None and one.state is CellState.READY:
            self.spill.offer(one)

    def forget_client(self, client: Waiter) -> None:
        """The client has gone; its leases were released."""
        with self._changed:
            self._fetches.forget(client)

    def drain(self) -> None:
        """Open nothing from now on. Payloads that were opened before are still fetched."""
        self._draining = True

    def close(self, seconds: float) -> bool:
        """End the threads within ``seconds``. Waiting payloads fail. Idempotent."""
        self.arena_cache.close()
        with self._changed:
            self._closed = True
            left = [self._fetches.pop() for _ in range(len(self._fetches))]
            self._changed.notify_all()
        for job in left:
            self.arena_cache.failed(job.one, MissReason.CLOSED)
        if self.spill is not None:
            self.spill.close(seconds)
        return not join_all(self._threads, seconds)

    def _queue(self, client: Waiter, one: CachedPayload, claim: Claim, due: Priority) -> bool:
        if len(self._fetches) >= self._limits.queue_max:
            self._fetches.discard(self.arena_cache.cancel_fill)
        if self._closed or len(self._fetches) >= self._limits.queue_max or self._is_stuck():
            return False
        record = self.found.of(claim.key) or self.arena_cache.held_back.record_of(one.key)
        self._fetches.add(client, one, claim, record, due)
        self._changed.notify()
        return True

    def _is_stuck(self) -> bool:
        """Whether all threads work well beyond their payloads' deadlines, as in calls of a file
        system that hangs, which cannot be cancelled. To queue more is pointless then."""
        if len(self._busy) < self._limits.threads:
            return False
        return max(self._busy.values()) + _LATE_S < monotonic()

    def _serve(self) -> None:
        staging = Staging()
        while True:
            with self._changed:
                while (job := self._next_job()) is None and not self._closed:
                    if not self._changed.wait(_IDLE_S if staging else None):
                        staging.clear()
            if job is None:
                return
            rest = None
            try:
                rest = self._run(job, staging)
            finally:
                self._end(job, rest)
            del job, rest

    def _end(self, job: FetchJob, rest: FetchJob | None) -> None:
        with self._changed:
            del self._busy[get_ident()]
            if job.urgency is Urgency.PREFETCH:
                self._prefetching -= 1
            if rest is not None and not self._closed:
                deadline = max(rest.deadline, job.one.deadline)
                self._fetches.add_rest(rest._replace(deadline=deadline))
                rest = None
            self._changed.notify()
        if rest is not None:
            layers = 0 if rest.fill is None else rest.fill.layers
            self.arena_cache.failed(job.one, MissReason.CLOSED, layers)

    def _next_job(self) -> FetchJob | None:
        """Return the next job, or None. Some threads are kept free of prefetches."""
        urgency = self._fetches.next_urgency()
        if urgency is None or self._closed:
            return None
        if urgency is Urgency.PREFETCH:
            if self._prefetching >= max(1, self._limits.threads * 3 // 4):
                return None
            self._prefetching += 1
        job = self._fetches.pop()
        self._busy[get_ident()] = job.deadline
        if self._fetches.next_urgency() is not None:
            self._changed.notify()
        return job

    def _run(self, job: FetchJob, staging: Staging) -> FetchJob | None:
        """Fill a payload, or a part: returns the job if it goes on. Every fault is a miss."""
        if self.arena_cache.cancel_fill(job.one):
            return None
        fill, reason = job.fill, MissReason.STORE
        try:
            with EndsBy(job.deadline):
                if fill is None:
                    record = job.record or self._look_up(job)
                    fill = self._from_disk(job, record, staging)
                if fill is None:
                    if is_held_back(record):  # it was in this node's memory, and is not any more
                        record = self._look_up(job)
                    fill = self._new_fill(job, record)
                is_over = fill.is_complete
                reason = MissReason.NONE if is_over else self._fill(fill, job.deadline, staging)
        except MissError as exc:
            reason = exc.reason
        except ObjkvError as exc:
            self._recorder.count("load_errors")
            self._failure_log.failed(exc)
            reason = MissReason.LATE if monotonic() >= job.deadline else MissReason.STORE
        except Exception:  # a dead thread would hang every later load
            self._recorder.count("load_errors")
            logger.exception("payload not loaded, unexpectedly key=%s", job.one.key)
        layers = 0 if fill is None else fill.layers
        if reason is MissReason.NONE:
            if fill is not None and not fill.is_complete:
                return job._replace(fill=fill)
            self.arena_cache.ready(job.one, layers)
            self.offer_to_disk(job.one, was_read=not job.one.is_unused)
            if not job.one.is_unused:
                self.arena_cache.held_back.seen_again(job.one.key)
        elif self.arena_cache.cancel_fill(job.one):
            return None
        elif self._is_worth_another_try(job, reason, layers):
            self.arena_cache.deallocate(job.one)
            return job._replace(deadline=job.one.deadline, fill=None)
        else:
            self.arena_cache.failed(job.one, reason, layers)
        return None

    def _is_worth_another_try(self, job: FetchJob, reason: MissReason, layers: int) -> bool:
        """Whether a fetch failed at the deadline of one client, and another has more time. Not if
        readers know a part of the payload: another try may bring other bytes."""
        is_over = job.one.deadline <= max(job.deadline, monotonic())
        return not layers and not is_over and reason in (MissReason.LATE, MissReason.STORE)

    def _new_fill(
        self, job: FetchJob, record: ShardRecord, disk_copy: DiskCopy | None = None
    ) -> Fill:
        return Fill(
            job.one,
            PayloadRequest(job.claim, record),
            self.arena_cache,
            self._cache,
            self.layouts,
            disk_copy=disk_copy,
            part_policy=self._limits.part_policy if job.urgency is Urgency.IN_STEP else NO_PARTS,
        )

    def _from_disk(self, job: FetchJob, record: ShardRecord, staging: Staging) -> Fill | None:
        """Return the complete fill; None if the payload has to come from the stores."""
        if self.spill is None or monotonic() >= job.deadline:
            return None
        self.spill.disk.unmark_only_copy(job.one.key)
        disk_copy = self.spill.disk_copy(PayloadRequest(job.claim, record))
        if disk_copy is None:
            return None
        fill = self._new_fill(job, record, disk_copy)
        if self.spill.read(fill, staging):
            return fill
        self.arena_cache.deallocate(job.one)
        return None

    def _look_up(self, job: FetchJob) -> ShardRecord:
        """Return the payload's record in the index. Raises ``MissError`` and ``StoreError``."""
        record = self._cache.record_of(job.claim.key)
        if record is None:
            if job.record is not None:
                self._recorder.count("agent_unsaved_misses")
            raise MissError(MissReason.MISSING)
        return record

    def _fill(self, fill: Fill, deadline: float, staging: Staging) -> MissReason:
        """Fetch a payload, or its next part. Returns why it is missed, or NONE."""
        wanted, claim = fill.wanted, fill.wanted.claim
        began = monotonic()
        if began >= deadline:
            return MissReason.LATE
        try:
            is_stored = fill.run(staging)
            self._failure_log.worked()
        except (PayloadError, ValueTooLong) as exc:
            logger.warning("payload refused key=%s reason=%s", claim.key.path(), exc)
            self._recorder.count("load_corrupt")
            self._reject(claim.key, wanted.record, corrupt=True)
            return MissReason.CORRUPT
        if not is_stored:
            self._recorder.count("load_ghosts")
            self._reject(claim.key, wanted.record, corrupt=False)
            return MissReason.MISSING
        if fill.is_complete:
            assert fill.header is not None
            self._recorder.count("load_bytes", fill.header.nbytes)
            where = "hot_load_bytes" if fill.is_hot else "bulk_load_bytes"
            self._recorder.count(where, fill.header.nbytes)
            if fill.is_whole and not wanted.record.hot:
                self._cache.link.gets.observe(fill.header.nbytes, monotonic() - began)
        return MissReason.NONE

    def _reject(self, key: ChunkKey, record: ShardRecord | None, *, corrupt: bool) -> None:
        """Forget a record, also in what lookups remember: it would be a miss again and again."""
        self._cache.reject(key, record, corrupt=corrupt)
        self.record_changed(key.prefix_hash)
