"""The agent's core: what a node's replicas share, without sockets.

Clients open payloads. Each payload is fetched and verified once, by threads of the core, in the
order of urgency and, among clients, in turn by bytes. Any fault is a miss with a reason.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count
from threading import Condition, Lock, Thread
from time import monotonic
from typing import NamedTuple

from objkv.agent.arena import Arena
from objkv.agent.fill import Fill, NoRoomError, Staging, Wanted
from objkv.agent.residents import MissReason, Resident, Residents, Waiter
from objkv.agent.unsaved.payloads import is_unsaved
from objkv.background import join_all
from objkv.cache.chunks import ChunkCache
from objkv.codec.payload import LayerSpec
from objkv.errors import ObjkvError, PayloadError, ValueTooLong
from objkv.net.deadline import EndsBy
from objkv.telemetry import Recorder, Trouble

logger = logging.getLogger(__name__)
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


class _Job(NamedTuple):
    urgency: int
    turn: int
    """The client's bytes so far, on a clock that all clients share."""
    number: int
    one: Resident
    wanted: Wanted
    deadline: float


class _Turns:
    """A queue by urgency, and among clients in turn by bytes. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[_Job] = []
        self._numbers = count()
        self._clock = 0
        self._due: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def add(
        self, client: object, urgency: Urgency, one: Resident, wanted: Wanted, deadline: float
    ) -> None:
        """Queue a payload."""
        turn = max(self._due.get(client, 0), self._clock)
        self._due[client] = turn + wanted.record.nbytes
        job = _Job(urgency, turn, next(self._numbers), one, wanted, deadline)
        heappush(self._heap, job)

    def take(self) -> _Job:
        """Take the next one."""
        job = heappop(self._heap)
        self._clock = max(self._clock, job.turn)
        return job

    def forget(self, client: object) -> None:
        """The client has gone."""
        self._due.pop(client, None)


class Core:
    """Thread-safe. ``open`` and ``release`` never wait."""

    def __init__(
        self, cache: ChunkCache, arena: Arena, limits: CoreLimits, recorder: Recorder
    ) -> None:
        """The core closes neither ``cache`` nor ``arena``."""
        self.residents = Residents(arena, recorder)
        self._cache, self._limits, self._recorder = cache, limits, recorder
        self._trouble = Trouble(logger, "loads")
        self._changed = Condition(Lock())
        self._turns = _Turns()
        self._closed = False
        self._known: dict[tuple[str, str], tuple[LayerSpec, ...]] = {}
        self._threads = [
            Thread(target=self._work, name=f"objkv-fill-{n}", daemon=True)
            for n in range(limits.threads)
        ]
        for thread in self._threads:
            thread.start()

    def open(
        self, client: Waiter, wanted: Sequence[Wanted], *, deadline_s: float, urgency: Urgency
    ) -> list[Resident | MissReason]:
        """Take a lease of each payload, and fetch those that are not resident within
        ``deadline_s``. ``client`` is woken at each progress. The caller releases each lease."""
        deadline = monotonic() + deadline_s
        opened: list[Resident | MissReason] = []
        for one in wanted:
            ahead = urgency is Urgency.PREFETCH
            lease = self.residents.open(one.claim.key.path(), client, ahead=ahead)
            if lease is None:
                opened.append(MissReason.NO_ROOM)
                continue
            resident, is_new = lease
            opened.append(resident)
            if not ahead:
                self._recorder.count("agent_fills" if is_new else "agent_hits")
            elif is_new:
                self._recorder.count("agent_prefetches")
            if is_new and not self._queue(client, urgency, resident, one, deadline):
                self.residents.failed(resident, MissReason.NO_ROOM)
        return opened

    def reject(self, wanted: Wanted) -> None:
        """Stop serving this copy of a payload, and forget its record."""
        key = wanted.claim.key
        self.residents.forget(key.path())
        self._cache.reject(key, {key.field: wanted.record}, corrupt=True)

    def forget_client(self, client: Waiter) -> None:
        """The client has gone; its leases were released."""
        with self._changed:
            self._turns.forget(client)

    def close(self, seconds: float) -> bool:
        """End the threads within ``seconds``. Waiting payloads fail. Idempotent."""
        with self._changed:
            self._closed = True
            left = [self._turns.take() for _ in range(len(self._turns))]
            self._changed.notify_all()
        for job in left:
            self.residents.failed(job.one, MissReason.CLOSED)
        return not join_all(self._threads, seconds)

    def __repr__(self) -> str:
        return f"<Core {self.residents!r}, {len(self._turns)} waiting>"

    def _queue(
        self, client: Waiter, urgency: Urgency, one: Resident, wanted: Wanted, deadline: float
    ) -> bool:
        with self._changed:
            if self._closed or len(self._turns) >= self._limits.queue_max:
                return False
            self._turns.add(client, urgency, one, wanted, deadline)
            self._changed.notify()
            return True

    def _work(self) -> None:
        staging = Staging()
        while True:
            with self._changed:
                while not len(self._turns) and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._turns.take()
            self._run(job, staging)
            del job

    def _run(self, job: _Job, staging: Staging) -> None:
        """Fill one payload. Every fault is a miss."""
        if not self.residents.is_wanted(job.one):
            self.residents.failed(job.one, MissReason.LATE)
            return
        if is_unsaved(job.wanted.record):
            found = self._stored(job)
            if isinstance(found, MissReason):
                self.residents.failed(job.one, found)
                return
            job = job._replace(wanted=found)
        key = job.wanted.claim.key
        shape = key.namespace, key.field
        fill = Fill(job.one, job.wanted, self.residents, self._cache, self._known.get(shape, ()))
        reason = MissReason.STORE
        try:
            with EndsBy(job.deadline):
                reason = self._fill(fill, job, staging)
        except Exception:  # a dead thread would hang every later load
            self._recorder.count("load_errors")
            logger.exception("payload not loaded, unexpectedly key=%s", key.path())
        if reason is MissReason.NONE:
            assert fill.header is not None
            self._remember(shape, fill.header.frames.layers)
            self.residents.ready(job.one, fill.layers)
        else:
            self.residents.failed(job.one, reason, fill.layers)

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
            self._cache.reject(claim.key, {claim.key.field: record}, corrupt=True)
            return MissReason.CORRUPT
        except NoRoomError:
            return MissReason.NO_ROOM
        except ObjkvError as exc:
            self._recorder.count("load_errors")
            self._trouble.failed(exc)
            return MissReason.LATE if monotonic() >= job.deadline else MissReason.STORE
        if not is_stored:
            self._recorder.count("load_ghosts")
            self._cache.reject(claim.key, {claim.key.field: record}, corrupt=False)
            return MissReason.MISSING
        assert fill.header is not None
        self._recorder.count("load_bytes", fill.header.nbytes)
        self._cache.note_load(claim, fill.header, hot=record.hot, seconds=monotonic() - began)
        return MissReason.NONE

    def _remember(self, shape: tuple[str, str], layers: tuple[LayerSpec, ...]) -> None:
        """Keep one tuple of layers per shard: the header's parser goes by its identity."""
        if shape not in self._known:
            while len(self._known) >= _KNOWN_MAX:
                del self._known[next(iter(self._known))]
            self._known[shape] = layers
