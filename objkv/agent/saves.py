"""Payloads that replicas hand over, whole or in parts: the agent verifies, keeps and saves them.

From ``commit`` on, the bytes are in the agent's memory: the replica may end. Those that are held
back (``objkv.agent.held_back``) are counted across the fleet, and saved when they are seen a second
time. No commit waits for that. When a store is overloaded, saves are the first calls to stop.

Parts that the ranks of a replica hand over are joined. A join is whole or not at all. It begins
with the part that comes first, and ends with the last, when a rank drops its part, at its deadline,
or when the replica has gone. It is known then until all parts have come: they are not copied.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Lock
from time import monotonic
from typing import Final

from objkv.agent.arena_cache import ArenaCache, CachedPayload
from objkv.agent.core import Core
from objkv.agent.held_back import held_back_record
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import Commit, CommitStatus, Drop, SavedPart
from objkv.agent.outbox import ClientOutbox
from objkv.background import JOIN_S, Pool
from objkv.cache.chunks import ChunkCache, InFlightSaves
from objkv.cache.codec_choice import CodecChooser
from objkv.cache.worth import PutPolicy
from objkv.codec.header import claim_in, header_bytes_needed, parse_known, read_header
from objkv.codec.join import Join, check_moved
from objkv.codec.payload import check_frames, recode
from objkv.codec.values import Claim, Header
from objkv.errors import LeftAlone, ObjkvError, PayloadError, StoreBusy
from objkv.stores.base import Buffer
from objkv.telemetry import FailureLog, Recorder

logger = logging.getLogger(__name__)
_HEADER_GUESS = 32 << 10
"""Covers the header of most models, which saves a second read."""
_LOOK_S = 0.05
"""How often ``drain`` looks at payloads that are due while there is no room to save them."""
_SHED_S = 0.1
"""How long saves pause after the store refused one."""
_SIGHTINGS_MAX: Final = 65_536
"""Payloads whose sighting may wait for a round trip. Further ones are not recorded."""
_BATCH: Final = 1000
"""The most sightings per round trip."""
JOINS_MAX: Final = 16_384
"""Joins that an agent knows, those that have ended included."""
_SHARE = 4
"""Divisor: open joins take at most this share of the arena, and so do saves that wait."""
Name = tuple[bytes, str]
"""Replica, and path of the payload."""


@dataclass(eq=False, slots=True)
class SaveRequest:
    """What a client wants to have saved, and what was decided about it."""

    path: str
    claim: Claim
    puts: bool
    """Whether to save it at once if that is possible, and to hold it back only if not."""
    was_held_back: bool = False
    holds_back: bool = False
    """Whether it is not to be saved until it is seen again, or there is room."""
    waits: bool = False
    """Whether it is saved as soon as there is room, unless its memory is needed before that."""

    @property
    def waiting(self) -> CommitStatus:
        """What to answer if it waits: no promise."""
        return CommitStatus.ACCEPTED if self.puts else CommitStatus.HELD_BACK


@dataclass(eq=False, slots=True)
class _OpenJoin:
    """A join. Guarded by the lock of ``Joins``, except for its memory."""

    number: int
    parts: int
    deadline: float
    status: CommitStatus | None = None
    """What further parts are answered; None as long as they are wanted."""
    open: tuple[Join, CachedPayload, SaveRequest] | None = None
    """With its memory, and the request of the part that came first."""
    seen: int = 0
    """Parts that were handed over or dropped."""
    copying: int = 0
    """Threads that copy a part into the memory."""


Joined = tuple[SaveRequest, Header, CachedPayload]
"""A whole payload in reserved memory, which the caller adopts or releases."""


class Joins:
    """The joins of one agent. Thread-safe. Copies in the calling thread."""

    def __init__(
        self,
        arena_cache: ArenaCache,
        in_flight: InFlightSaves,
        admit: Callable[[SaveRequest, int], CommitStatus | None],
        recorder: Recorder,
        deadline_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``admit``: decides once for each join whether a payload of some length is wanted: returns
        None if it is, and has begun its save in ``in_flight``, or else what to answer."""
        self._arena_cache, self._in_flight, self._recorder = arena_cache, in_flight, recorder
        self._admit = admit
        self._deadline_s, self._clock = deadline_s, clock
        self._lock = Lock()
        self._known: dict[Name, _OpenJoin] = {}
        """Oldest first."""
        self._reserved_bytes = 0
        self._replicas = Counter[bytes]()
        """Connections of each replica."""

    def __len__(self) -> int:
        return len(self._known)

    def add(
        self,
        replica: bytes,
        outbox: ClientOutbox,
        commit: Commit,
        header: Header,
        request: SaveRequest,
    ) -> CommitStatus | Joined:
        """Copy a part. Returns the whole payload, or an answer. Raises ``PayloadError``."""
        part, path = commit.part, request.path
        assert part is not None
        part.position.check()
        with self._lock:
            one = self._find((replica, path), part.number, part.position.parts)
            if one is None:
                return CommitStatus.DROPPED
            if one.open is None and one.status is None:
                one.status = self._begin(one, header, part, request)
            one.seen += 1
            if one.status is not None:
                self._forget_seen((replica, path), one)
                return one.status
            assert one.open is not None
            join, reserved, _ = one.open
            try:
                moves = join.add(header, part.position)
            except PayloadError:
                self._drop(one, "refused")
                raise
            one.copying += 1
        memory, fault = self._arena_cache.view(reserved), "refused"
        try:
            places = [memory[to : to + nbytes] for _, to, nbytes in moves]
            outbox.read_pieces(places, commit.offset + moves[0].source)
            check_moved(header, moves, memory)
            fault = ""
        finally:
            with self._lock:
                one.copying -= 1
                if fault:
                    self._drop(one, fault)
                status = self._status_of((replica, path), one)
        return self._finish(one) if status is None else status

    def _status_of(self, name: Name, one: _OpenJoin) -> CommitStatus | None:
        """Return what to answer a part that was copied; None if it completes the payload."""
        if one.status is not None:
            self._free(one)
            self._forget_seen(name, one)
            return one.status
        assert one.open is not None
        if not one.open[0].is_complete or one.copying:
            return CommitStatus.PART
        if self._known.get(name) is one:
            del self._known[name]
        return None

    def _finish(self, one: _OpenJoin) -> Joined:
        assert one.open is not None
        join, memory, request = one.open
        try:
            header = join.finish(self._arena_cache.view(memory))
        except PayloadError:
            with self._lock:
                self._drop(one, "refused")
            raise
        with self._lock:
            self._reserved_bytes -= memory.nbytes
        self._recorder.count("joins")
        return request, header, memory

    def drop(self, replica: bytes, drop: Drop) -> None:
        """Record that a rank does not hand over its part."""
        with self._lock:
            name = replica, drop.path
            if (one := self._find(name, drop.number, drop.parts)) is None:
                return
            if one.open is None and one.status is None:
                one.status = CommitStatus.DROPPED
            self._drop(one, "rank")
            one.seen += 1
            self._forget_seen(name, one)

    def client_connected(self, replica: bytes) -> None:
        """Record a connection of a replica."""
        with self._lock:
            self._replicas[replica] += 1

    def client_left(self, replica: bytes) -> None:
        """Record that a connection has ended. With the last one the replica's open joins do."""
        with self._lock:
            self._replicas[replica] -= 1
            if self._replicas[replica] > 0:
                return
            del self._replicas[replica]
            for name in [name for name in self._known if name[0] == replica]:
                self._drop(self._known.pop(name), "gone")

    def expire(self) -> None:
        """Drop the joins whose deadline has passed. The agent calls this every second or so."""
        now = self._clock()
        with self._lock:
            while self._known:
                name = next(iter(self._known))
                if self._known[name].deadline > now:
                    return
                self._drop(self._known.pop(name), "late")

    def _find(self, name: Name, number: int, parts: int) -> _OpenJoin | None:
        """Return a part's join; None if a newer one has replaced it, or there are too many."""
        one = self._known.get(name)
        if one is not None and one.number >= number:
            return one if one.number == number else None
        if one is not None:
            self._drop(self._known.pop(name), "replaced")
        if len(self._known) >= JOINS_MAX:
            self._recorder.count("joins_dropped_full")
            return None
        one = self._known[name] = _OpenJoin(number, parts, self._clock() + self._deadline_s)
        return one

    def _begin(
        self, one: _OpenJoin, header: Header, part: SavedPart, request: SaveRequest
    ) -> CommitStatus | None:
        """Give a join its memory. Returns what to answer if it gets none."""
        join = Join(header, part.position)
        if (status := self._admit(request, join.nbytes)) is not None:
            return status
        is_much = (self._reserved_bytes + join.nbytes) * _SHARE > self._arena_cache.total_bytes
        memory = None if is_much else self._arena_cache.reserve(request.path, join.nbytes)
        if memory is None:
            self._in_flight.end(request.path)
            self._recorder.count("save_drops")
            return CommitStatus.NO_ROOM
        self._reserved_bytes += join.nbytes
        one.open = join, memory, request
        return None

    def _forget_seen(self, name: Name, one: _OpenJoin) -> None:
        """Forget a join that has ended, once all parts are known of."""
        if one.seen >= one.parts and self._known.get(name) is one:
            del self._known[name]

    def _drop(self, one: _OpenJoin, reason: str) -> None:
        """End a join that is open. Its memory goes when nothing is being copied there."""
        if one.status is not None:
            return
        one.status = CommitStatus.DROPPED
        self._recorder.count("save_drops")
        self._recorder.count(f"joins_dropped_{reason}")
        if one.open is not None:
            self._in_flight.end(one.open[1].key)
        self._free(one)

    def _free(self, one: _OpenJoin) -> None:
        if one.open is not None and not one.copying:
            _, memory, _ = one.open
            self._reserved_bytes -= memory.nbytes
            self._arena_cache.release(memory)
            one.open = None


@dataclass(frozen=True, slots=True)
class NodeSaveLimits:
    """Bounds of saves, and the codec of payloads."""

    threads: int
    queue_max: int
    """Payloads that may wait for a thread, each with a lease. At most a quarter of the arena."""
    deadline_s: float
    codec: str
    """A codec of the payload format, or ``auto``: by what a network's bandwidth makes worth it."""
    may_save: bool = True
    """Whether payloads may be saved at all. If not, all are held back, for this node."""


@dataclass(frozen=True, slots=True, eq=False)
class _Save:
    """A payload to save. It was announced to ``InFlightSaves``, and has a lease."""

    resident: CachedPayload
    header: Header
    deadline: float


class NodeSaves:
    """Thread-safe. ``commit`` copies and verifies in the calling thread, and waits for no store."""

    def __init__(
        self,
        cache: ChunkCache,
        core: Core,
        limits: NodeSaveLimits,
        policy: PutPolicy,
        recorder: Recorder,
    ) -> None:
        """``policy``: which payloads are saved only when they are seen a second time."""
        self.policy = policy
        self._cache, self._core, self._arena_cache = cache, core, core.arena_cache
        self._limits, self._recorder = limits, recorder
        self._lock = Lock()
        self._chooser = CodecChooser(lambda: cache.link.bytes_per_s)
        self._leased_bytes = 0
        """Bytes of payloads that wait for a thread, or are being saved."""
        self._leased_bytes_max = self._arena_cache.total_bytes // _SHARE
        """Another save may begin below this."""
        self._has_ended = Event()
        """Set when a save has ended."""
        self._failure_log = FailureLog(logger, "saves")
        self._shed_until = -math.inf
        self._pool: Pool[_Save] = Pool(
            "objkv-save", limits.threads, self._save, failed=self._failed
        )
        self._made: deque[str] = deque()
        """Paths of payloads whose sighting is not recorded yet."""
        self._sighting: Pool[None] = Pool("objkv-sight", 1, self._catch_up)
        self.joins = Joins(
            core.arena_cache, cache.in_flight, self._admit, recorder, limits.deadline_s
        )
        self._held = core.arena_cache.held_back

    def commit(self, outbox: ClientOutbox, commit: Commit, replica: bytes = b"") -> CommitStatus:
        """Take a copy of an uncompressed, unsealed payload, and save it; of a part, once all are
        there. The outbox may change at any time: only the copy is trusted, once it is verified."""
        try:
            text = outbox.read(commit.offset, min(commit.nbytes, _HEADER_GUESS))
            if (needed := header_bytes_needed(text)) > len(text):
                text = outbox.read(commit.offset, min(commit.nbytes, needed))
            text = text[:needed]
            header = self._read_header(text)
            if header.nbytes != commit.nbytes or header.codec != "none" or any(header.marks):
                raise PayloadError("a payload of another length, compressed or sealed")
            claim = header.claim
            request = SaveRequest(claim.key.path(), claim, commit.puts)
            if commit.part is not None:
                joined = self.joins.add(replica, outbox, commit, header, request)
                return (
                    joined if isinstance(joined, CommitStatus) else self._save_or_hold_back(*joined)
                )
            status = self._admit(request, commit.nbytes)
            if status is not None:
                return status
            return self._copy(request, header, text, outbox, commit.offset)
        except PayloadError as exc:
            logger.warning("payload of a client refused reason=%s", exc)
            return CommitStatus.REFUSED

    def _admit(self, request: SaveRequest, nbytes: int) -> CommitStatus | None:
        """Begin a payload's save in ``in_flight`` if it is wanted, or return what to answer."""
        path = request.path
        request.was_held_back = path in self._held
        holds_back = self.policy.holds_back(request.claim, nbytes) or not self._limits.may_save
        if holds_back and request.was_held_back and self._arena_cache.contains_ready([path])[0]:
            is_due = self._limits.may_save and (
                self._held.seen_again(path) or path not in self._held
            )
            return CommitStatus.ACCEPTED if is_due else CommitStatus.HELD_BACK
        refusal = None
        if request.puts or not holds_back:
            refusal = self._refusal()
            if refusal not in (CommitStatus.ACCEPTED, CommitStatus.NO_ROOM) and not holds_back:
                return refusal
            holds_back = refusal is not CommitStatus.ACCEPTED
        request.holds_back, request.waits = holds_back, refusal is CommitStatus.NO_ROOM
        if request.waits and self._arena_cache.contains_ready([path])[0] and self._held.put(path):
            return request.waiting
        if not self._cache.in_flight.begin(path):
            self._recorder.count("save_repeats")
            return CommitStatus.REPEATED
        return None

    def _copy(
        self, request: SaveRequest, header: Header, text: bytes, outbox: ClientOutbox, offset: int
    ) -> CommitStatus:
        """Copy, verify and save a payload. ``text``: its header. Raises ``PayloadError``."""
        path = request.path
        known = self._arena_cache.lease_ready(path)
        memory = known or self._arena_cache.reserve(path, header.nbytes)
        if memory is None:
            self._drop(path)
            return CommitStatus.NO_ROOM
        if known is None:
            is_right = False
            try:
                place = self._arena_cache.view(memory)
                outbox.read_into(place, offset)
                if place[: len(text)] != text:
                    raise PayloadError("the payload changed while it was copied")
                check_frames(header, place)  # all are there: the lengths are equal
                is_right = True
            finally:
                if not is_right:
                    self._arena_cache.release(memory)
                    self._drop(path)
        return self._save_or_hold_back(request, header, memory, is_reserved=known is None)

    def _save_or_hold_back(
        self,
        request: SaveRequest,
        header: Header,
        memory: CachedPayload,
        *,
        is_reserved: bool = True,
    ) -> CommitStatus:
        """Save or hold back a payload. ``is_reserved``: whether no other thread finds it."""
        path, claim, resident, is_new = memory.key, header.claim, memory, False
        if is_reserved:
            shard = claim.key.namespace, claim.key.field
            layout = self._core.layouts.note(*shard, header.frames.layers, header.data_start)
            origin = claim.parent_hash, claim.token_start, claim.token_end
            resident, is_new = self._arena_cache.adopt(memory, origin, layout)
        if is_new:
            self._core.offer_to_disk(resident, was_read=False)
        elif (status := self._differs(claim, resident)) is not None:
            self._arena_cache.release(resident)
            self._drop(path)
            return status
        if request.holds_back:
            if is_new and not (request.was_held_back and self._limits.may_save):
                self._arena_cache.add_held_back(
                    resident, claim, held_back_record(header), is_due=False
                )
                self._cache.in_flight.end(path)
                self._arena_cache.release(resident)
                if request.waits and self._held.put(path):
                    return request.waiting
                self._count_held_back(path)
                return CommitStatus.HELD_BACK
            refusal = self._refusal()
            if refusal is not CommitStatus.ACCEPTED:
                self._cache.in_flight.end(path)
                self._arena_cache.release(resident)
                return refusal
        # Replicas find it from now on: lookups know it before the client does.
        self._arena_cache.add_held_back(resident, claim, held_back_record(header), is_due=True)
        is_begun = self._begin(resident, header)
        return CommitStatus.ACCEPTED if is_begun else CommitStatus.NO_ROOM

    def _differs(self, claim: Claim, resident: CachedPayload) -> CommitStatus | None:
        """Return what to answer if a payload that is resident already is not this one."""
        if resident.state is not CellState.READY:  # it is being fetched, so it is stored
            return CommitStatus.REPEATED
        if resident.origin == (claim.parent_hash, claim.token_start, claim.token_end):
            return None
        logger.warning("payload of a client refused reason=it claims other tokens")
        return CommitStatus.REFUSED

    def _drop(self, path: str) -> None:
        self._cache.in_flight.end(path)
        self._recorder.count("save_drops")

    def wake(self) -> None:
        """Look soon for due payloads, new sightings, and totals to send. Never waits."""
        if not self._sighting.waiting:  # a waiting job looks at everything
            self._sighting.put((None,))

    def drain(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for all that is due. Returns whether all has ended."""
        end = monotonic() + seconds
        while True:
            self._has_ended.clear()
            was_idle = not self._held.has_due
            for pool in (self._sighting, self._pool):
                if not pool.drain(max(0.0, end - monotonic())):
                    return False
            is_idle = not self._held.has_due  # one may have become due meanwhile
            left_s = end - monotonic()
            if (was_idle and is_idle) or self._pool.is_closed or left_s <= 0:
                return is_idle
            if not is_idle:
                self._has_ended.wait(min(left_s, _LOOK_S))

    def close(self, drain_s: float) -> None:
        """Drain within the bound, then stop, except for threads in calls that hang. Idempotent."""
        end = monotonic() + drain_s
        self.drain(drain_s)
        self._sighting.close(JOIN_S)
        if not self._pool.drain(max(0.0, end - monotonic())):
            count = self._pool.waiting + self._pool.busy
            logger.warning("saves dropped at shutdown count=%d", count)
        stuck = self._pool.close(max(end - monotonic(), JOIN_S), give_up=self._drop_queued)
        if stuck:
            logger.warning("threads still saving at shutdown names=%s", ",".join(stuck))

    @property
    def is_shedding(self) -> bool:
        """Whether saves pause because the store has just refused one."""
        return monotonic() < self._shed_until

    @property
    def _has_turns(self) -> bool:
        has_room = self._leased_bytes < self._leased_bytes_max
        return has_room and self._pool.waiting < self._limits.queue_max

    def _refusal(self) -> CommitStatus:
        """Return why nothing can be saved now, REPEATED if it never can, or ACCEPTED."""
        if not self._limits.may_save:
            return CommitStatus.REPEATED
        if not self._cache.has_room():
            self._recorder.count("save_over_quota")
            return CommitStatus.OVER_QUOTA
        if self.is_shedding:
            self._recorder.count("saves_shed")
            return CommitStatus.SHED
        return CommitStatus.ACCEPTED if self._has_turns else CommitStatus.NO_ROOM

    def _count_held_back(self, path: str) -> None:
        self._recorder.count("agent_held_back")
        if not self._limits.may_save:
            return
        if len(self._made) >= _SIGHTINGS_MAX:
            self._recorder.count("agent_sighting_drops")
            return
        self._made.append(path)
        self.wake()

    def _catch_up(self, _: None) -> None:
        """Save what is due while there is room, and record what was made, as many in a round trip
        as have come during the last one. If the index fails, payloads count as not seen."""
        while True:
            while self._has_turns and (claim := self._held.pop_due()) is not None:
                self._save_due(claim)
            paths = [self._made.popleft() for _ in range(min(len(self._made), _BATCH))]
            if not paths:
                self._cache.flush_totals()
                return
            for path, was_seen in zip(paths, self._cache.record_sightings(paths), strict=True):
                if was_seen:
                    self._recorder.count("agent_sighted_before")
                    self._held.seen_again(path)

    def _save_due(self, claim: Claim) -> None:
        path = claim.key.path()
        if self._refusal() is CommitStatus.ACCEPTED:
            resident = self._arena_cache.lease_ready(path)
            if resident is None:  # evicted meanwhile, or being read from disk
                self._held.not_saved(path, is_absent=True)
                if self._arena_cache.contains_ready([path])[0]:  # since then; it was due already
                    self._held.seen_again(path)
                return
            if self._cache.in_flight.begin(path):
                self._begin(resident, self._read_header(self._arena_cache.view(resident)))
                return
            self._arena_cache.release(resident)
        self._held.not_saved(path)

    def _read_header(self, payload: Buffer) -> Header:
        """Return a header, probably of its shard's last layout. Raises ``PayloadError``."""
        if (claim := claim_in(payload)) is None:
            return read_header(payload)
        last = self._core.layouts.last(claim.key.namespace, claim.key.field)
        return parse_known(memoryview(payload), claim, last.layers)

    def _begin(self, resident: CachedPayload, header: Header) -> bool:
        """Queue a save, whose lease and turn were taken. Gives them back if it cannot."""
        save = _Save(resident, header, monotonic() + self._limits.deadline_s)
        with self._lock:
            self._leased_bytes += resident.nbytes
        if self._pool.put((save,)):
            return True
        self._drop_queued((save,))
        return False

    def _save(self, save: _Save) -> None:
        is_leased = False
        try:
            is_leased = not self._store(save)
        finally:
            self._end(save, is_leased=is_leased)
        self._failure_log.worked()

    def _store(self, save: _Save) -> bool:
        """Save a payload, if it is in time. Returns False if another process is saving it."""
        path = save.resident.key
        if monotonic() >= save.deadline:
            self._recorder.count("save_drops")
            return True
        if self.is_shedding:
            raise LeftAlone("saves pause after the store refused one")
        if not self._cache.take_lease(path):
            self._recorder.count("save_leased_elsewhere")
            return False
        began = monotonic()
        try:
            payload, header = self._encode(save)
            is_new = self._cache.save(path, payload, header)
        except BaseException:
            self._cache.release_lease(path)
            raise
        seconds = monotonic() - began
        self._recorder.observe("save_seconds", seconds)
        self._recorder.count(f"save_codec_{header.codec.partition('+')[0]}")
        if is_new:
            self._recorder.count("saves")
            self._recorder.count("save_bytes", header.nbytes)
        else:
            self._recorder.count("save_existed")
        if self._cache.in_flight.is_saved(path):  # its record is published, too
            self._held.saved(path)
        if self._limits.codec == "auto":
            self._chooser.saved(seconds)
        return True

    def _encode(self, save: _Save) -> tuple[memoryview, Header]:
        payload, header = self._arena_cache.view(save.resident), save.header
        codec, seal = self._limits.codec, self._cache.seal
        if codec == "auto":
            key, frames = header.claim.key, header.frames
            pages = payload[frames.starts[0] : frames.ends[-1]]
            codec = self._chooser.choose((key.namespace, key.group), frames.layers, pages)
        if codec != "none" or seal is not None:
            payload, header = recode(payload, codec=codec, seal=seal)
        return payload, header

    def _failed(self, save: _Save, error: Exception) -> None:
        if isinstance(error, LeftAlone | StoreBusy):  # logged by the circuit breaker
            self._recorder.count("saves_shed")
            if not self.is_shedding:
                self._shed_until = monotonic() + _SHED_S
            return
        self._recorder.count("save_errors")
        if isinstance(error, ObjkvError):
            self._failure_log.failed(error)
        else:
            logger.error("save failed unexpectedly key=%s", save.resident.key, exc_info=error)

    def _end(self, save: _Save, *, is_leased: bool = False) -> None:
        """A save has ended, whatever its outcome. ``is_leased``: another process makes it."""
        self._held.not_saved(save.resident.key, is_leased=is_leased)
        with self._lock:
            self._leased_bytes -= save.resident.nbytes
        self._arena_cache.release(save.resident)
        self._cache.in_flight.end(save.resident.key)
        if self._held.has_due:
            self.wake()
        self._has_ended.set()

    def _drop_queued(self, saves: Sequence[_Save]) -> None:
        for save in saves:
            self._end(save)
            self._recorder.count("save_drops")
