"""The agent's core: what a node's replicas share, without sockets.

Clients open payloads. Each payload is fetched and verified once, by threads of the core, in the
order of urgency and, among clients, in turn by bytes. Any fault is a miss with a reason.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from itertools import count
from threading import Condition, Lock, Thread
from time import monotonic
from typing import NamedTuple

from objkv.agent.arena import Arena, CellState
from objkv.agent.fill import Fill, NoRoomError, Source, Staging, Wanted
from objkv.agent.residents import MissReason, Resident, Residents, Waiter
from objkv.agent.spill.disk import Disk
from objkv.agent.spill.spill import Spill, SpillLimits
from objkv.agent.unsaved.payloads import is_unsaved
from objkv.background import join_all
from objkv.cache.chunks import ChunkCache
from objkv.codec.payload import LayerSpec
from objkv.errors import ObjkvError, PayloadError, ValueTooLong
from objkv.net.deadline import EndsBy
from objkv.telemetry import Recorder, Trouble

logger = logging.getLogger(__name__)
_IDLE_S = 10.0
"""After this time without a payload, a fetching thread gives its staging buffer back."""
_KNOWN_MAX = 1024
"""Shards whose layers are remembered, so that headers are parsed quickly."""


class Urgency(IntEnum):
    """Which fetches go first."""

    IN_STEP = 0
    """A forward pass waits."""
    BETWEEN_STEPS = 1
    PREFETCH = 2


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Bounds of the core."""

    threads: int
    queue_max: int
    """Payloads that may wait for a thread. Further ones are misses."""
    disk_keeps_all: bool = False
    """Whether payloads are written to the disk that were not read."""


class Due(NamedTuple):
    """When a payload will be fetched."""

    urgency: Urgency
    priority: int
    """Among payloads of one urgency lower values go first."""
    deadline: float
    """By ``monotonic``."""


class _Job(NamedTuple):
    urgency: Urgency
    priority: int
    turn: int
    """The client's bytes so far, on a clock that all clients share."""
    number: int
    one: Resident
    wanted: Wanted
    deadline: float


class _Turns:
    """A queue by urgency and priority, and among clients in turn by bytes. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[_Job] = []
        self._jobs: dict[Resident, _Job] = {}
        """The valid job of each payload: one that was hastened leaves its old one in the heap."""
        self._numbers = count()
        self._clock = 0
        self._due: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, client: object, one: Resident, wanted: Wanted, due: Due) -> None:
        """Queue a payload."""
        turn = max(self._due.get(client, 0), self._clock)
        self._due[client] = turn + wanted.record.nbytes
        self._push(_Job(*due[:2], turn, next(self._numbers), one, wanted, due.deadline))

    def hasten(self, one: Resident, due: Due) -> None:
        """Another client waits for a payload too: if it is queued, the more urgent of both
        urgencies and the later of both deadlines apply."""
        job = self._jobs.get(one)
        if job is None:
            return
        sooner = due[:2] if due[:2] < job[:2] else job[:2]
        if sooner != job[:2] or due.deadline > job.deadline:
            number, deadline = next(self._numbers), max(job.deadline, due.deadline)
            self._push(_Job(*sooner, job.turn, number, one, job.wanted, deadline))

    def next_urgency(self) -> Urgency | None:
        """Return the urgency of the next one; None if there is none."""
        while self._heap and self._jobs.get(self._heap[0].one) is not self._heap[0]:
            heappop(self._heap)
        return self._heap[0].urgency if self._heap else None

    def take(self) -> _Job:
        """Take the next one."""
        assert self.next_urgency() is not None
        job = heappop(self._heap)
        del self._jobs[job.one]
        self._clock = max(self._clock, job.turn)
        return job

    def _push(self, job: _Job) -> None:
        self._jobs[job.one] = job
        heappush(self._heap, job)

    def forget(self, client: object) -> None:
        """The client has gone."""
        self._due.pop(client, None)


class Core:
    """Thread-safe. ``open`` and ``release`` never wait."""

    on_rejected: Callable[[str, bytes], object] = staticmethod(lambda namespace, prefix_hash: None)
    """Called for the chunk of each payload whose record was forgotten."""

    def __init__(
        self,
        cache: ChunkCache,
        arena: Arena,
        limits: CoreLimits,
        recorder: Recorder,
        *,
        disk: Disk | None = None,
    ) -> None:
        """The core closes ``disk``, and neither ``cache`` nor ``arena``."""
        self.residents = Residents(arena, recorder)
        self.spill: Spill | None = None
        """The tier below the arena; None if there is none."""
        if disk is not None:
            readers = max(1, limits.threads - max(1, limits.threads // 4))
            bounds = SpillLimits(readers, keeps_all=limits.disk_keeps_all)
            self.spill = Spill(self.residents, disk, cache.seal, bounds, recorder)
        self._cache, self._limits, self._recorder = cache, limits, recorder
        self._trouble = Trouble(logger, "loads")
        self._changed = Condition(Lock())
        self._turns = _Turns()
        self._prefetching = 0
        self._closed = self._draining = False
        self._known: dict[tuple[str, str], tuple[LayerSpec, ...]] = {}
        self._threads = [
            Thread(target=self._work, name=f"objkv-fill-{n}", daemon=True)
            for n in range(limits.threads)
        ]
        for thread in self._threads:
            thread.start()

    def open(
        self,
        client: Waiter,
        wanted: Sequence[Wanted],
        *,
        deadline_s: float,
        urgency: Urgency,
        priority: int = 0,
    ) -> list[Resident | MissReason]:
        """Take a lease of each payload, and fetch those that are not resident within
        ``deadline_s``. ``client`` is woken at each progress. The caller releases each lease.
        ``priority``: among payloads of one urgency lower values go first."""
        if self._draining:
            return [MissReason.CLOSED] * len(wanted)
        due = Due(urgency, priority, monotonic() + deadline_s)
        return [self._open(client, one, due) for one in wanted]

    def _open(self, client: Waiter, one: Wanted, due: Due) -> Resident | MissReason:
        ahead = due.urgency is Urgency.PREFETCH
        with self._changed:  # a client that finds it must be able to hasten it
            lease = self.residents.open(one.claim.key.path(), client, ahead=ahead)
            if lease is None:
                return MissReason.NO_ROOM
            resident, is_new = lease
            is_lost = is_new and not self._queue(client, resident, one, due)
            if not is_new and self.residents.is_filling(resident):
                self._turns.hasten(resident, due)
            self._changed.notify()
        if is_lost:
            self.residents.failed(resident, MissReason.NO_ROOM)
        if not ahead:
            self._recorder.count("agent_fills" if is_new else "agent_hits")
            self._keep(resident)
        elif is_new:
            self._recorder.count("agent_prefetches")
        return resident

    def reject(self, wanted: Wanted) -> None:
        """Stop serving this copy of a payload, and forget its record."""
        key = wanted.claim.key
        self.residents.forget(key.path())
        if self.spill is not None:
            self.spill.forget(key.path())
        self._reject(wanted, corrupt=True)

    def forget_client(self, client: Waiter) -> None:
        """The client has gone; its leases were released."""
        with self._changed:
            self._turns.forget(client)

    def drain(self) -> None:
        """Open nothing from now on. Payloads that were opened before are still fetched."""
        self._draining = True

    def close(self, seconds: float) -> bool:
        """End the threads within ``seconds``. Waiting payloads fail. Idempotent."""
        self.residents.close()
        with self._changed:
            self._closed = True
            left = [self._turns.take() for _ in range(len(self._turns))]
            self._changed.notify_all()
        for job in left:
            self.residents.failed(job.one, MissReason.CLOSED)
        if self.spill is not None:
            self.spill.close(seconds)
        return not join_all(self._threads, seconds)

    def __repr__(self) -> str:
        return f"<Core {self.residents!r}, {len(self._turns)} waiting>"

    def _queue(self, client: Waiter, one: Resident, wanted: Wanted, due: Due) -> bool:
        if self._closed or len(self._turns) >= self._limits.queue_max:
            return False
        self._turns.add(client, one, wanted, due)
        return True

    def _work(self) -> None:
        staging = Staging()
        while True:
            with self._changed:
                while (job := self._take()) is None and not self._closed:
                    if not self._changed.wait(_IDLE_S if staging else None):
                        staging.clear()
            if job is None:
                return
            self._run(job, staging)
            if job.urgency is Urgency.PREFETCH:
                with self._changed:
                    self._prefetching -= 1
                    self._changed.notify()
            del job

    def _take(self) -> _Job | None:
        """Return the next job; None if there is none, or only prefetches, and the other threads are
        kept for loads."""
        urgency = self._turns.next_urgency()
        if urgency is None or self._closed:
            return None
        if urgency is Urgency.PREFETCH:
            if self._prefetching >= max(1, self._limits.threads * 3 // 4):
                return None
            self._prefetching += 1
        return self._turns.take()

    def _run(self, job: _Job, staging: Staging) -> None:
        """Fill one payload. Every fault is a miss."""
        if self.residents.give_up(job.one):
            return
        key = job.wanted.claim.key
        fill, reason = None, MissReason.STORE
        try:
            with EndsBy(job.deadline):
                spilled = self._from_disk(job, staging)
                if spilled is not None:
                    fill, reason = spilled, MissReason.NONE
                else:
                    fill, reason = self._from_stores(job, staging)
            if fill is not None and fill.header is not None:
                self._remember((key.namespace, key.field), fill.header.frames.layers)
        except NoRoomError:
            reason = MissReason.NO_ROOM
        except Exception:  # a dead thread would hang every later load
            self._recorder.count("load_errors")
            logger.exception("payload not loaded, unexpectedly key=%s", key.path())
        layers = 0 if fill is None else fill.layers
        if reason is not MissReason.NONE:
            self.residents.failed(job.one, reason, layers)
            return
        self.residents.ready(job.one, layers)
        if not job.one.is_unused:
            self._keep(job.one)
            self.residents.unsaved.seen_again(job.one.key)

    def _new_fill(self, job: _Job, source: Source | None = None) -> Fill:
        key = job.wanted.claim.key
        known = self._known.get((key.namespace, key.field), ())
        return Fill(job.one, job.wanted, self.residents, self._cache, known, source=source)

    def _from_disk(self, job: _Job, staging: Staging) -> Fill | None:
        """Return the complete fill; None if the payload has to come from the stores."""
        if self.spill is None or monotonic() >= job.deadline:
            return None
        self.spill.disk.untie(job.one.key)
        return self.spill.fill(job.wanted, partial(self._new_fill, job), job.one, staging)

    def _from_stores(self, job: _Job, staging: Staging) -> tuple[Fill | None, MissReason]:
        """Return the fill, and why it failed. A record that is only this node's is replaced by that
        of the index: its payload has left the node."""
        if is_unsaved(job.wanted.record):
            found = self._stored(job)
            if isinstance(found, MissReason):
                return None, found
            job = job._replace(wanted=found)
        fill = self._new_fill(job)
        return fill, self._fill(fill, job, staging)

    def _keep(self, one: Resident) -> None:
        """Have a payload that was read written to the disk."""
        if self.spill is not None and one.state is CellState.READY:
            self.spill.offer(one)

    def _stored(self, job: _Job) -> Wanted | MissReason:
        """Return the payload by its record in the index: the client's is that of a payload in
        memory, which has been evicted."""
        claim = job.wanted.claim
        try:
            with EndsBy(job.deadline):
                record = self._cache.record_of(claim.key)
        except Exception as exc:  # a dead thread would hang every later load
            self._recorder.count("load_errors")
            if isinstance(exc, ObjkvError):
                self._trouble.failed(exc)
            else:
                logger.exception("payload not found, unexpectedly key=%s", claim.key.path())
            return MissReason.LATE if monotonic() >= job.deadline else MissReason.STORE
        if record is None:
            self._recorder.count("agent_unsaved_misses")
            return MissReason.MISSING
        return Wanted(claim, record)

    def _fill(self, fill: Fill, job: _Job, staging: Staging) -> MissReason:
        claim, record = job.wanted.claim, job.wanted.record
        began = monotonic()
        if began >= job.deadline:
            return MissReason.LATE
        try:
            is_stored = fill.run(staging)
            self._trouble.worked()
        except (PayloadError, ValueTooLong) as exc:
            logger.warning("payload refused key=%s reason=%s", claim.key.path(), exc)
            self._recorder.count("load_corrupt")
            self._reject(job.wanted, corrupt=True)
            return MissReason.CORRUPT
        except NoRoomError:
            return MissReason.NO_ROOM
        except ObjkvError as exc:
            self._recorder.count("load_errors")
            self._trouble.failed(exc)
            return MissReason.LATE if monotonic() >= job.deadline else MissReason.STORE
        if not is_stored:
            self._recorder.count("load_ghosts")
            self._reject(job.wanted, corrupt=False)
            return MissReason.MISSING
        assert fill.header is not None
        self._recorder.count("load_bytes", fill.header.nbytes)
        self._cache.note_load(claim, fill.header, hot=record.hot, seconds=monotonic() - began)
        return MissReason.NONE

    def _reject(self, wanted: Wanted, *, corrupt: bool) -> None:
        """Forget a record, also in what lookups remember: it would be a miss again and again."""
        key = wanted.claim.key
        self._cache.reject(key, {key.field: wanted.record}, corrupt=corrupt)
        self.on_rejected(key.namespace, key.prefix_hash)

    def _remember(self, shape: tuple[str, str], layers: tuple[LayerSpec, ...]) -> None:
        """Keep one tuple of layers per shard: the header's parser goes by its identity."""
        if shape in self._known:
            return
        with self._changed:
            while len(self._known) >= _KNOWN_MAX:
                del self._known[next(iter(self._known))]
            self._known[shape] = layers
