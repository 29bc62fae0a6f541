"""Payloads that replicas handed over: the agent verifies them, keeps them resident, and saves them.

From ``commit`` on, the bytes are in the agent's memory: the replica may end. Those that are held
back are saved when they are seen a second time, see ``objkv.agent.unsaved``.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from time import monotonic

from objkv.agent.memory.arena import ALL_FRAMES
from objkv.agent.messages import CommitStatus, MissReason
from objkv.agent.outbox import ClientOutbox
from objkv.agent.residents import Resident, Residents
from objkv.agent.unsaved.payloads import unsaved_record
from objkv.agent.unsaved.policy import PutPolicy
from objkv.agent.unsaved.sightings import Sightings
from objkv.cache.chunks import ChunkCache
from objkv.cache.codec_choice import CodecChooser
from objkv.cache.saving import SavePool
from objkv.codec.payload import (
    Claim,
    Header,
    encode,
    frame_pages,
    header_bytes_needed,
    read_header,
)
from objkv.errors import PayloadError
from objkv.stores.base import Buffer
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)
_LENGTH_BYTES = 8
_CHOOSERS_MAX = 64
_LOOK_S = 0.05
"""How often ``drain`` looks at payloads that are due while there is no room to save them."""
_SHARE = 4
"""Divisor: payloads that wait to be saved lease at most this fraction of the arena."""


@dataclass(frozen=True, slots=True)
class NodeSaveLimits:
    """Bounds of saves, and the codec of payloads."""

    threads: int
    queue_max: int
    """Payloads that may wait for a thread, each with a lease. At most a quarter of the arena."""
    deadline_s: float
    codec: str
    """A codec of the payload format, or ``auto``."""
    far: bool
    """Whether the bulk store is behind a network. If not, ``auto`` compresses nothing."""
    may_save: bool = True
    """Whether payloads may be saved at all. If not, all are held back, for this node."""


@dataclass(frozen=True, slots=True, eq=False)
class CommittedSave:
    """A save of a resident payload. It holds a lease of the payload."""

    saves: "NodeSaves"
    resident: Resident
    claim: Claim
    deadline: float

    def encode(self) -> tuple[memoryview, Header]:
        """See ``Save``."""
        return self.saves.encode(self)

    def release(self) -> None:
        """See ``Save``."""
        self.saves.released(self)


class NodeSaves:
    """Thread-safe. ``commit`` copies and verifies in the calling thread, and never waits for a
    store."""

    def __init__(
        self,
        cache: ChunkCache,
        residents: Residents,
        limits: NodeSaveLimits,
        policy: PutPolicy,
        recorder: Recorder,
    ) -> None:
        """``policy``: which payloads are saved only when they are seen a second time."""
        self.residents, self.policy = residents, policy
        self._cache, self._limits, self._recorder = cache, limits, recorder
        self._codec = limits.codec if limits.codec != "auto" or limits.far else "none"
        self._lock = Lock()
        self._choosers: dict[str, CodecChooser] = {}
        self._pool: SavePool[CommittedSave] = SavePool(
            "saves",
            limits.threads,
            cache,
            recorder,
            late=self._late,
            saved=self._saved,
            leased=lambda save: self._unsaved.leased_elsewhere(save.claim.key.path()),
        )
        self._leased_bytes = 0
        """Bytes of payloads that wait for a thread, or are being saved."""
        self._has_released = Event()
        """Set when a save has ended."""
        self._unsaved = residents.unsaved
        self._sightings = Sightings(
            cache, self._unsaved, self._save_due, lambda: self._has_turns, recorder
        )

    def commit(
        self, outbox: ClientOutbox, offset: int, nbytes: int, *, puts: bool = False
    ) -> CommitStatus:
        """Take a copy of an uncompressed, unsealed payload, and save it.

        It may change at any time: only the copy is trusted, once it is verified. ``puts``: whether
        to save it at once if that is possible, and to hold it back only if not.
        """
        try:
            needed = header_bytes_needed(outbox.read(offset, _LENGTH_BYTES))
            text = outbox.read(offset, min(nbytes, needed))
            header = _claimed(text, nbytes)
        except PayloadError as exc:
            logger.warning("payload of a client refused reason=%s", exc)
            return CommitStatus.REFUSED
        key = header.claim.key
        was_held_back = key.path() in self._unsaved
        holds_back = not self._limits.may_save
        holds_back |= self.policy.holds_back(header.claim, nbytes)
        if holds_back and was_held_back and self.residents.holds([key.path()])[0]:
            if not self._limits.may_save:
                return CommitStatus.KEPT
            if self._unsaved.seen_again(key.path()) or key.path() not in self._unsaved:
                return CommitStatus.ACCEPTED
            return CommitStatus.KEPT
        refusal = None
        if puts or not holds_back:
            refusal = self._refusal()
            if refusal is CommitStatus.ACCEPTED:
                holds_back = False
            elif not holds_back:
                return refusal
        if not self._cache.begin_save(key):
            self._recorder.count("save_repeats")
            return CommitStatus.REPEATED
        resident = None
        try:
            read = partial(outbox.read_into, offset=offset)
            status, resident, is_new = self._keep(header, text, read)
        finally:
            if resident is None:
                self._cache.end_save(key)
                self._recorder.count("save_drops")
        if resident is None:
            return status
        if holds_back:
            if is_new and not (was_held_back and self._limits.may_save):
                status = self._hold_back(resident, header)
                if refusal is CommitStatus.NO_ROOM and self._unsaved.put(key.path()):
                    return CommitStatus.ACCEPTED  # it is saved when there is room
                return status
            refusal = self._refusal() if self._limits.may_save else CommitStatus.REPEATED
            if refusal is not CommitStatus.ACCEPTED:
                self._cache.end_save(key)
                self.residents.release(resident)
                return refusal
        # Replicas find it from now on: lookups know it before the client does.
        self.residents.note_unsaved(resident, header.claim, unsaved_record(header), is_due=True)
        return status if self._begin(resident, header.claim) else CommitStatus.NO_ROOM

    def released(self, save: CommittedSave) -> None:
        """A save has ended, whatever its outcome."""
        self._unsaved.not_saved(save.claim.key.path())
        with self._lock:
            self._leased_bytes -= save.resident.nbytes
        self.residents.release(save.resident)
        if self._unsaved.has_due:
            self._sightings.wake()
        self._has_released.set()

    def encode(self, save: CommittedSave) -> tuple[memoryview, Header]:
        """Return the payload in its stored form."""
        one = save.resident
        plain = self.residents.view(one)
        header = read_header(plain[: header_bytes_needed(plain[:_LENGTH_BYTES])])
        frames = header.frames
        first, last = frames.starts[0], frames.ends[-1]
        codec = self._codec
        if codec == "auto":
            group = header.claim.key.group
            codec = self._chooser(header).choose(group, frames.layers, plain[first:last])
        if codec == "none" and self._cache.seal is None:
            return plain, header
        pages = [plain[start:end] for start, end in zip(frames.starts, frames.ends, strict=True)]
        payload = encode(
            header.claim,
            frames.layers,
            pages,
            codec=codec,
            provenance=header.provenance,
            seal=self._cache.seal,
        )
        return payload, read_header(payload, seal=self._cache.seal)

    def drain(self, seconds: float) -> bool:
        """Wait for all saves, for at most ``seconds``. Returns whether all have ended. Payloads
        that were not seen again do not count."""
        end = monotonic() + seconds
        while True:
            self._has_released.clear()
            was_idle = not self._unsaved.has_due
            for part in (self._sightings, self._pool):
                if not part.drain(max(0.0, end - monotonic())):
                    return False
            is_idle = not self._unsaved.has_due  # one may have become due meanwhile
            left_s = end - monotonic()
            if (was_idle and is_idle) or self._pool.is_closed or left_s <= 0:
                return is_idle
            if not is_idle:
                self._has_released.wait(min(left_s, _LOOK_S))

    def close(self, drain_s: float) -> None:
        """Drain within the bound, then stop. Idempotent."""
        end = monotonic() + drain_s
        self.drain(drain_s)
        self._sightings.close()
        self._pool.close(max(0.0, end - monotonic()), self._give_up)

    @property
    def waiting(self) -> int:
        """Payloads that wait to be saved."""
        return self._pool.waiting

    @property
    def is_shedding(self) -> bool:
        """Whether saves pause because the store has just refused one."""
        return self._pool.is_shedding

    @property
    def _has_turns(self) -> bool:
        """Whether another save may wait for a thread."""
        has_room = self._leased_bytes * _SHARE < self.residents.total_bytes
        return has_room and self._pool.waiting < self._limits.queue_max

    def _refusal(self) -> CommitStatus:
        """Return why nothing can be saved now, or ACCEPTED."""
        if not (self._limits.may_save and self._cache.has_room()):
            self._recorder.count("save_over_quota")
            return CommitStatus.OVER_QUOTA
        if self.is_shedding:
            self._recorder.count("saves_shed")
            return CommitStatus.SHED
        if not self._has_turns:
            self._recorder.count("save_drops")
            return CommitStatus.NO_ROOM
        return CommitStatus.ACCEPTED

    def _begin(self, resident: Resident, claim: Claim) -> bool:
        """Queue a save, whose lease and turn were taken. Gives them back if it cannot."""
        save = CommittedSave(self, resident, claim, monotonic() + self._limits.deadline_s)
        with self._lock:
            self._leased_bytes += resident.nbytes
        if self._pool.put((save,)):
            return True
        self._give_up((save,))
        return False

    def _hold_back(self, resident: Resident, header: Header) -> CommitStatus:
        """Leave a payload in the arena, and count it across the fleet."""
        self.residents.note_unsaved(resident, header.claim, unsaved_record(header), is_due=False)
        self._cache.end_save(header.claim.key)
        self.residents.release(resident)
        self._recorder.count("agent_held_back")
        if self._limits.may_save:
            self._sightings.add(resident.key)
        return CommitStatus.KEPT

    def _save_due(self, claim: Claim) -> None:
        """Save a payload that was held back and then seen again."""
        path = claim.key.path()
        if self._refusal() is CommitStatus.ACCEPTED:
            resident = self.residents.hold(path)
            if resident is None:  # evicted meanwhile, or being read from disk
                self._unsaved.absent(path)
                if self.residents.holds([path])[0]:  # since then, when it was due already
                    self._unsaved.seen_again(path)
                return
            if self._cache.begin_save(claim.key):
                self._begin(resident, claim)
                return
            self.residents.release(resident)
        self._unsaved.not_saved(path)

    def _keep(
        self, header: Header, text: bytes, read: Callable[[memoryview], None]
    ) -> tuple[CommitStatus, Resident | None, bool]:
        """Have the payload in the arena, with a lease. ``text``: what the header was read from.
        ``read``: fills a buffer with the payload. The last result: whether it is new there."""
        opened = self.residents.open(header.claim.key.path(), None)
        if opened is None:
            return CommitStatus.NO_ROOM, None, False
        resident, is_new = opened
        if not is_new:
            return *self._join(header.claim, resident), False
        reason = MissReason.CLOSED
        try:
            reason = self._copy(header, text, read, resident)
        finally:
            if reason is MissReason.NONE:
                self.residents.ready(resident, ALL_FRAMES)
            else:
                self.residents.failed(resident, reason)
                self.residents.release(resident)
        if reason is MissReason.NONE:
            return CommitStatus.ACCEPTED, resident, True
        status = CommitStatus.NO_ROOM if reason is MissReason.NO_ROOM else CommitStatus.REFUSED
        return status, None, True

    def _copy(
        self,
        header: Header,
        text: bytes,
        read: Callable[[memoryview], None],
        resident: Resident,
    ) -> MissReason:
        """Copy a payload to its place and verify it there."""
        place = self.residents.allot(resident, header.nbytes)
        if place is None:
            return MissReason.NO_ROOM
        try:
            read(place)
            if place[: len(text)] != text:
                raise PayloadError("the payload changed while it was copied")
            for frame in range(len(header.frames)):
                frame_pages(header, frame, place, None)
        except PayloadError as exc:
            logger.warning("payload of a client refused reason=%s", exc)
            return MissReason.CORRUPT
        return MissReason.NONE

    def _join(self, claim: Claim, resident: Resident) -> tuple[CommitStatus, Resident | None]:
        """Save a payload that is resident already, and so verified."""
        status = CommitStatus.REPEATED  # it is being fetched, so it is stored
        if self.residents.is_ready(resident):
            plain = self.residents.view(resident)
            text = plain[: header_bytes_needed(plain[:_LENGTH_BYTES])]
            if _claimed(text, len(plain)).claim == claim:
                return CommitStatus.ACCEPTED, resident
            logger.warning("payload of a client refused reason=it claims other tokens")
            status = CommitStatus.REFUSED
        self.residents.release(resident)
        return status, None

    def _chooser(self, header: Header) -> CodecChooser:
        name = header.claim.key.namespace
        with self._lock:
            while len(self._choosers) >= _CHOOSERS_MAX and name not in self._choosers:
                del self._choosers[next(iter(self._choosers))]
            return self._choosers.setdefault(
                name, CodecChooser(lambda: self._cache.link.bytes_per_s)
            )

    def _late(self, save: CommittedSave) -> None:
        self._recorder.count("save_drops")

    def _saved(self, header: Header, seconds: float, outcome: object) -> None:
        self._recorder.count(f"save_codec_{header.codec.partition('+')[0]}")
        key = header.claim.key
        if key.path() in self._unsaved and self._cache.was_published(key):
            self._unsaved.saved(key.path())
        if self._codec == "auto":
            self._chooser(header).saved(seconds)

    def _give_up(self, saves: Sequence[CommittedSave]) -> None:
        for save in saves:
            self._cache.end_save(save.claim.key)
            save.release()
            self._recorder.count("save_drops")


def _claimed(text: Buffer, nbytes: int) -> Header:
    """Return the header of a payload of ``nbytes`` whose frames are not verified yet. ``text``: its
    start, up to the frames. Raises ``PayloadError``."""
    header = read_header(text)
    if header.nbytes != nbytes or header.codec != "none" or any(header.marks):
        raise PayloadError("a payload of another length, compressed or sealed")
    return header
