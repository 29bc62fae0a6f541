"""Whole payloads by the agent, for the connectors that have no paged cache.

``PayloadReader`` opens payloads in the agent's arena, waits until the agent has verified them,
verifies them again and shows them to their reader. ``PayloadWriter`` has payloads written into an
outbox and hands them over. Each has one thread and one connection. Any fault, such as no agent, is
a miss or a drop.
"""

import logging
import math
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import Lock, Thread
from time import monotonic, time
from typing import Any

import numpy as np

from objkv.agent.client import ArenaLease, ArenaLeases, Connect
from objkv.agent.memory.arena import CellState, Progress
from objkv.agent.messages import Claims, CommitStatus, MissReason, Urgency
from objkv.agent.outbox import AgentSaves, Outbox, OutboxPayload
from objkv.background import JOIN_S, Alarm, Pool, join_all, wait_for
from objkv.codec.payload import encode_in_place, frame_pages, header_room, read_claimed
from objkv.codec.values import Claim, LayerSpec, Provenance
from objkv.errors import ConfigError, ObjkvError, PayloadError, TransferError
from objkv.telemetry import FailureLog

logger = logging.getLogger(__name__)
_SHARE = 4
"""Divisor: of a small arena, payloads that are open take at most this fraction."""
_IDLE_S = 5.0
_SHED_S = 0.1
"""How long writes pause after the agent's store refused one."""


class ReadOutcome(Enum):
    """How a read ended. The value is a connector's counter of such reads."""

    READ = "loads"
    """``take`` was called with the verified pages."""
    MISSING = "load_ghosts"
    """Not stored. Its record is forgotten."""
    CORRUPT = "load_corrupt"
    """Not what its key promises. It is not served again, and its record is forgotten."""
    REFUSED = "load_refused"
    """The agent has no room, or it is intact, but of other layers than this reader expects."""
    LATE = "load_deadlines"
    """The deadline passed."""
    FAILED = "load_errors"
    """The store, the agent or ``take`` failed, or the reader is closed."""
    UNWANTED = "load_unwanted"


_OUTCOMES = {
    MissReason.MISSING: ReadOutcome.MISSING,
    MissReason.CORRUPT: ReadOutcome.CORRUPT,
    MissReason.NO_ROOM: ReadOutcome.REFUSED,
    MissReason.LATE: ReadOutcome.LATE,
}


class WriteOutcome(Enum):
    """How a write ended. The value is a connector's counter of such writes."""

    ACCEPTED = "saves_accepted"
    """The agent has a copy, and saves it."""
    HELD_BACK = "saves_kept"
    """The agent has a copy, which other nodes do not find until it is seen again."""
    EXISTED = "save_existed"
    """It is being saved, or was just saved, by this agent."""
    REPEATED = "save_repeats"
    """This process has just handed it over."""
    OVER_QUOTA = "save_over_quota"
    SHED = "saves_shed"
    """The agent's store has just refused a save."""
    FAILED = "save_errors"
    """The agent, or ``write``, failed."""
    DROPPED = "save_drops"
    """The deadline passed, it is not needed any more, or the writer is closed."""


_WRITTEN = {
    CommitStatus.ACCEPTED: WriteOutcome.ACCEPTED,
    CommitStatus.HELD_BACK: WriteOutcome.HELD_BACK,
    CommitStatus.REPEATED: WriteOutcome.EXISTED,
    CommitStatus.SHED: WriteOutcome.SHED,
}
"""All others are failures."""


@dataclass(slots=True, eq=False)
class PayloadTransfer:
    """One payload to read or to save. A reader or a writer calls its methods, on its thread."""

    claim: Claim
    layers: tuple[LayerSpec, ...]
    deadline: float
    """Time on the clock of reader or writer until which it is of use."""
    token_digest: str = field(default="0" * 64, kw_only=True)
    """See ``Provenance``."""

    @property
    def is_needed(self) -> bool:
        """Whether it is still needed."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of its pages."""
        return sum(layer.nbytes for layer in self.layers)

    def take_pages(self, pages: Sequence[memoryview]) -> None:
        """Use the verified pages of each layer, which change afterwards. May raise anything."""

    def write_pages(self, pages: memoryview) -> None:
        """Fill ``pages`` with those of all layers. May wait, or raise: it is not saved then."""

    def end(self, outcome: Any, nbytes: int) -> None:
        """Called once, last. Must not raise. ``outcome``: a ``ReadOutcome``, or a ``WriteOutcome``.
        ``nbytes``: of the payload that was read or that the agent has a copy of, else 0."""


class PayloadReader:
    """Reads payloads. Thread-safe. No method waits but ``close``."""

    def __init__(
        self, connect: Connect, name: str, *, clock: Callable[[], float] = monotonic
    ) -> None:
        """``connect``: the agent is reached when there is something to read. ``name``: of the
        payloads, in the plural, for the log and the thread."""
        self._clock = clock
        self._lock = Lock()
        self._closed = False
        self._waiting: deque[PayloadTransfer] = deque()
        """Nothing comes after ``_closed`` is set, with the lock. The rest is the thread's."""
        self._open: list[tuple[PayloadTransfer, ArenaLease]] = []
        reach = partial(connect, wants_arena=True)
        self._link = ArenaLeases(reach, f"loads of {name}", share=_SHARE)
        self._alarm = Alarm()
        self._thread = Thread(target=self._work, name=f"objkv-load-{name}", daemon=True)
        self._thread.start()

    def read(self, payloads: Iterable[PayloadTransfer]) -> None:
        """Read payloads in order, behind those that wait. Each gets an ``end``."""
        with self._lock:
            if not self._closed:
                self._waiting.extend(payloads)
                self._alarm.set()
                return
        for one in payloads:
            one.end(ReadOutcome.FAILED, 0)

    def recheck(self) -> None:
        """Look soon which payloads are needed still."""
        self._alarm.set()

    def close(self) -> None:
        """End everything and stop the thread. Idempotent."""
        with self._lock:
            self._closed = True
        self._alarm.set()
        if names := join_all([self._thread], JOIN_S):
            logger.warning("threads still loading at shutdown names=%s", ",".join(names))

    def _work(self) -> None:
        try:
            while not self._closed:
                try:
                    self._step()
                except Exception:  # a dead thread would hang every later read
                    logger.exception("loads failed unexpectedly")
                    self._disconnect()
        finally:
            self._disconnect()
            self._alarm.close()

    def _step(self) -> None:
        link = self._link
        if link.agent is None and self._waiting and not link.connect():
            self._fail()
        if link.agent is None:
            wait_for([self._alarm], _IDLE_S)
            return
        try:
            self._open_next()
            self._advance()
            if not link.wait(self._idle_s(), self._alarm):
                link.disconnect()
        except TransferError as exc:
            link.failure_log.failed(exc)
            self._disconnect()

    def _idle_s(self) -> float:
        """Return how long nothing is due, unless something wakes the thread."""
        if self._waiting and min(self._link.room()) > 0:
            return 0.0
        left = [read.deadline - self._clock() for read, _ in self._open]
        return max(0.0, min([*left, _IDLE_S]))

    def _open_next(self) -> None:
        """Open the next payloads of one namespace, as many as there is room for."""
        batch, leases = list[PayloadTransfer](), None
        count, nbytes = self._link.room()
        while self._waiting and len(batch) < count and nbytes > 0:
            one = self._waiting[0]
            if batch and one.claim.key.namespace != batch[0].claim.key.namespace:
                break
            self._waiting.popleft()
            if not one.is_needed:
                self._end(one, ReadOutcome.UNWANTED)
            elif self._clock() >= one.deadline:
                self._end(one, ReadOutcome.LATE)
            else:
                batch.append(one)
                nbytes -= one.nbytes
        if not batch:
            return
        try:
            leases = self._link.open(
                Claims.of([one.claim for one in batch]),
                sum(one.nbytes for one in batch),
                deadline_s=max(one.deadline for one in batch) - self._clock(),
                urgency=Urgency.BETWEEN_STEPS,
            )
        finally:
            if leases is None:  # the agent is replaced, or each of them fails and gets its end
                self._waiting.extendleft(reversed(batch))
        if leases is not None:
            self._open += zip(batch, leases, strict=True)

    def _advance(self) -> None:
        ended, nbytes = list[int](), 0
        for one in list(self._open):
            read, lease = one
            if (outcome := self._look_at(read, lease)) is not None:
                self._open.remove(one)
                ended.append(lease.number)
                nbytes += read.nbytes
                self._end(read, outcome)
        self._link.release(ended, nbytes)

    def _look_at(self, read: PayloadTransfer, lease: ArenaLease) -> ReadOutcome | None:
        """Return how a read has ended, None if it goes on."""
        progress = lease.progress
        if not read.is_needed:
            return ReadOutcome.UNWANTED
        if progress.state is CellState.FILLING:
            progress = self._link.present.arena.board.read(lease.cell)
        if progress.state is CellState.READY:
            return self._deliver(read, progress)
        if progress.state is CellState.FAILED:
            return _OUTCOMES.get(MissReason(progress.reason), ReadOutcome.FAILED)
        return ReadOutcome.LATE if self._clock() >= read.deadline else None

    def _deliver(self, read: PayloadTransfer, at: Progress) -> ReadOutcome:
        payload = self._link.present.arena.view[at.offset : at.offset + at.nbytes]
        try:
            header = read_claimed(payload, read.claim, read.layers)
            if header.nbytes != at.nbytes or header.codec != "none":
                raise PayloadError(f"{at.nbytes} bytes in the arena, not {header.nbytes}")
            if header.frames.layers != read.layers:
                return ReadOutcome.REFUSED
            pages = [frame_pages(header, n, payload, None) for n in range(len(header.frames))]
        except PayloadError as exc:
            logger.warning("payload refused key=%s reason=%s", read.claim.key.path(), exc)
            # Before it ends: it may be made and saved again at once.
            self._link.present.reject(read.claim)
            return ReadOutcome.CORRUPT
        try:
            read.take_pages(pages)
        except Exception:
            logger.exception("load failed unexpectedly key=%s", read.claim.key.path())
            return ReadOutcome.FAILED
        return ReadOutcome.READ

    def _end(self, read: PayloadTransfer, outcome: ReadOutcome) -> None:
        try:
            read.end(outcome, read.nbytes if outcome is ReadOutcome.READ else 0)
        except Exception:  # the other reads go on
            logger.exception("load not ended, unexpectedly")

    def _disconnect(self) -> None:
        """Give up the connection and everything that waits."""
        self._waiting.extendleft(read for read, _ in self._open)
        self._open.clear()
        self._fail()
        self._link.disconnect()

    def _fail(self) -> None:
        """Fail what waits now. What comes meanwhile, as from a read that ends, gets its own try."""
        for _ in range(len(self._waiting)):
            self._end(self._waiting.popleft(), ReadOutcome.FAILED)


class PayloadWriter:
    """Writes payloads, one after the other, on one thread. Thread-safe. Only ``close`` waits."""

    def __init__(
        self,
        connect: Connect,
        nbytes_max: int,
        name: str,
        *,
        writer: str,
        puts: bool = False,
        begin: Callable[[], None] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``connect`` and ``name``: see ``PayloadReader``. ``nbytes_max``: see
        ``payload_bytes_max``; takes no more memory than the longest that is written. ``writer``:
        the name of this process in payloads. ``puts``: whether the agent must not hold payloads
        back. ``begin``: called by the thread before its first write. Raises ``ConfigError`` if the
        system makes no outbox."""
        self._name, self._writer, self._puts, self._clock = name, writer, puts, clock
        self._failure_log = FailureLog(logger, f"saves of {name}")
        self._shed_until = -math.inf
        try:
            outbox = Outbox(nbytes_max)
            self._memory = np.frombuffer(mmap.mmap(outbox.fd, outbox.nbytes), np.uint8)
        except OSError as exc:
            raise ConfigError(f"no outbox of {nbytes_max >> 20:,} MiB for saves: {exc}") from exc
        # The agent copies a payload before it answers, so one after the other is enough.
        self._saves = AgentSaves(lambda fd: connect(outbox=fd), outbox, self._memory, clock=clock)
        self._pool: Pool[PayloadTransfer] = Pool(f"objkv-save-{name}", 1, self._run, begin=begin)

    def write(self, payload: PayloadTransfer) -> None:
        """Queue a payload. How many wait is the caller's concern."""
        if not self._pool.put((payload,)):
            payload.end(WriteOutcome.DROPPED, 0)

    def drain(self, seconds: float) -> bool:
        """See ``Pool.drain``."""
        return self._pool.drain(seconds)

    def close(self, drain_s: float) -> None:
        """Drain within the bound, then stop. The rest is dropped. Idempotent."""
        if not self.drain(drain_s):
            logger.warning("%s dropped at shutdown count=%d", self._name, self._pool.waiting)
        if names := self._pool.close(JOIN_S, give_up=self._drop):
            logger.warning("threads still saving at shutdown names=%s", ",".join(names))
        self._saves.close()

    def _drop(self, payloads: Sequence[PayloadTransfer]) -> None:
        for one in payloads:
            one.end(WriteOutcome.DROPPED, 0)

    def _run(self, payload: PayloadTransfer) -> None:
        outcome, nbytes = WriteOutcome.FAILED, 0
        try:
            outcome, nbytes = self._write(payload)
        except ObjkvError as exc:
            self._failure_log.failed(exc)
        except Exception:
            logger.exception("save failed unexpectedly key=%s", payload.claim.key.path())
        finally:
            payload.end(outcome, nbytes)

    def _write(self, payload: PayloadTransfer) -> tuple[WriteOutcome, int]:
        path = payload.claim.key.path()
        now = self._clock()
        if not payload.is_needed or now >= payload.deadline:
            return WriteOutcome.DROPPED, 0
        if now < self._shed_until:
            return WriteOutcome.SHED, 0
        if not self._saves.has_room():
            return WriteOutcome.OVER_QUOTA, 0
        if not self._saves.begin_save(path, puts=self._puts):
            return WriteOutcome.REPEATED, 0
        try:
            return self._hand_over(payload)
        finally:
            self._saves.end_save(path)

    def _hand_over(self, payload: PayloadTransfer) -> tuple[WriteOutcome, int]:
        claim, layers = payload.claim, payload.layers
        start = header_room(layers)
        end = start + payload.nbytes
        if end > self._memory.nbytes:
            raise TransferError(f"a payload of {end} bytes, the outbox has {self._memory.nbytes}")
        payload.write_pages(self._memory[start:end].data)
        provenance = Provenance(payload.token_digest, self._writer, int(time()))
        text, header = encode_in_place(
            claim, layers, self._memory[:end].data, codec="none", provenance=provenance
        )
        (status,) = self._saves.save((OutboxPayload(claim.key, claim.key.path(), text),))
        outcome = _WRITTEN.get(status)
        if outcome is None:
            raise TransferError(f"the agent did not take a payload: {status.name}")
        if outcome is WriteOutcome.SHED:
            self._shed_until = self._clock() + _SHED_S
            return outcome, 0
        self._failure_log.worked()
        return outcome, 0 if outcome is WriteOutcome.EXISTED else header.nbytes
