"""An agent's core within the test's process: what a loader reaches without a socket."""

import os
import socket
from collections.abc import Sequence
from threading import Lock
from typing import ClassVar, cast

from objkv import background
from objkv.agent.client import AgentConnection, ArenaLease, lease_of
from objkv.agent.core import Core, CoreLimits
from objkv.agent.memory.arena import Arena
from objkv.agent.messages import Claims, Commit, CommitStatus, Drop, SavedPart, Urgency
from objkv.agent.outbox import ClientOutbox, OutboxPayload
from objkv.agent.server import AgentSession
from objkv.background import Alarm
from objkv.cache.chunks import ChunkCache
from objkv.codec.join import Join, PartPosition
from objkv.codec.payload import Claim, Header, read_header, recode
from objkv.errors import ObjkvError, StoreBusy, TransferError
from objkv.stores.base import Buffer
from objkv.telemetry import Recorder
from tests.agent.consistency import threads_of

_OF_READERS = frozenset(("load_bytes", "load_corrupt", "load_ghosts", "load_errors"))
"""An agent counts them too, in numbers of its own."""


class InsideAgent:
    opened: ClassVar[list["InsideAgent"]] = []

    def __init__(
        self,
        cache: ChunkCache,
        nbytes: int,
        limits: CoreLimits,
        recorder: Recorder,
        codec: str = "none",
        joins: dict[str, "InsideJoin"] | None = None,
    ) -> None:
        """``joins``: of the agent that the ranks of a replica share."""
        self.arena = Arena.create(nbytes)
        self.core = Core(cache, self.arena, limits, _OfAgent(recorder))
        self.saves = InsideSaves(cache, recorder, codec, joins)
        self._open = 0
        self._closed = False
        self.opened.append(self)

    def connect(self, *, wants_arena: bool = False, outbox: int = -1) -> AgentConnection:
        if self._closed:
            raise TransferError("the agent has ended")
        return cast("AgentConnection", InsideConnection(self, outbox))

    def close(self, seconds: float) -> bool:
        """Whether its threads have ended. Its arena goes with the last of its connections."""
        self._closed = True
        if self in self.opened:
            self.opened.remove(self)
        ended = self.core.close(seconds)
        self.count(0)
        return ended

    def count(self, more: int) -> None:
        self._open += more
        if self._closed and not self._open and not threads_of(self.core):
            self.arena.close()


class InsideConnection:
    """What a loader and a saver use of an ``AgentConnection``."""

    def __init__(self, agent: InsideAgent, outbox: int = -1) -> None:
        self.arena, self.core, self._agent = agent.arena, agent.core, agent
        with socket.socket(socket.AF_UNIX) as unused:  # a broken life would leave it open
            self._holder = AgentSession(agent.core, unused, 0)
        self._outbox = ClientOutbox(os.dup(outbox)) if outbox >= 0 else None
        agent.count(1)
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    def has_ended(self) -> bool:
        return not self.is_open

    def commit(self, commits: Sequence[Commit]) -> list[CommitStatus]:
        assert self._outbox is not None
        handed = list[OutboxPayload]()
        for one in commits:
            try:
                payload = self._outbox.read(one.offset, one.nbytes)
            except OSError as exc:  # closed by another thread, which ends a real one's call as well
                raise TransferError("the connection is closed") from exc
            key = read_header(payload).claim.key
            handed.append(OutboxPayload(key, key.path(), payload, one.part))
        return self._agent.saves.save(handed)

    def drop(self, drop: Drop) -> None:
        """Such a part never comes."""

    def open(self, wanted: Claims, *, deadline_s: float, urgency: Urgency) -> list[ArenaLease]:
        answers = self._holder.lease(wanted, deadline_s=deadline_s, urgency=urgency)
        return [lease_of(one, self.arena) for one in answers]

    def release(self, leases: Sequence[int]) -> None:
        self._holder.end(leases)

    def reject(self, claim: Claim) -> None:
        self.core.reject(claim)

    def wait(self, seconds: float, also: Alarm) -> bool:
        return background.wait_for([self._holder.alarm, also], seconds)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.drop_outbox()
            self._holder.end_all()
            self._agent.count(-1)

    def drop_outbox(self) -> None:
        if self._outbox is not None:
            self._outbox.close()


class _OfAgent:
    """Leaves out what the reader counts, and what only an agent reports."""

    def __init__(self, recorder: Recorder) -> None:
        self._count = recorder.count
        self.observe, self.level = recorder.observe, recorder.level

    def count(self, name: str, amount: float = 1) -> None:
        if name not in _OF_READERS and not name.startswith("agent_"):
            self._count(name, amount)


class InsideSaves:
    """Takes a saver's payloads, and stores them at once as an agent does later."""

    def __init__(
        self,
        cache: ChunkCache,
        recorder: Recorder,
        codec: str = "none",
        joins: dict[str, "InsideJoin"] | None = None,
    ) -> None:
        self._cache, self._recorder, self._codec = cache, recorder, codec
        self._joins = {} if joins is None else joins
        self.has_room = cache.has_room

    def drop(self, path: str, part: SavedPart) -> None:
        """Such a part never comes."""

    def send_drops(self) -> None:
        """None is kept."""

    def begin_save(self, path: str, *, puts: bool = False, again: bool = False) -> bool:
        return self._cache.in_flight.begin(path)

    def end_save(self, path: str) -> None:
        self._cache.in_flight.end(path)

    def save(self, handed: Sequence[OutboxPayload]) -> list[CommitStatus]:
        return [self._save(one.payload, one.part) for one in handed]

    def _save(self, payload: Buffer, part: SavedPart | None) -> CommitStatus:
        header = read_header(payload)
        if part is not None:
            whole = self._join(payload, header, part)
            if whole is None:
                return CommitStatus.PART
            payload, header = whole, read_header(whole)
        seal = self._cache.seal
        if self._codec != "none" or seal is not None:
            payload, header = recode(memoryview(payload), codec=self._codec, seal=seal)
        try:
            is_new = self._cache.save(header.claim.key.path(), payload, header)
        except StoreBusy:
            return CommitStatus.SHED
        except ObjkvError:
            return CommitStatus.NO_ROOM
        if not is_new:
            return CommitStatus.REPEATED
        self._recorder.count("saves")
        self._recorder.count("save_bytes", header.nbytes)
        self._recorder.count(f"save_codec_{self._codec}")
        return CommitStatus.ACCEPTED

    def _join(self, payload: Buffer, header: Header, part: SavedPart) -> bytearray | None:
        with _JOINING:
            path = header.claim.key.path()
            join = self._joins.get(path)
            if join is None:
                join = self._joins[path] = InsideJoin(header, part.position)
            for move in join.add(header, part.position):
                end = move.source + move.nbytes
                join.memory[move.target : move.target + move.nbytes] = payload[move.source : end]
            if not join.is_complete:
                return None
            join.finish(memoryview(join.memory))
            return self._joins.pop(path).memory


_JOINING = Lock()


class InsideJoin(Join):
    def __init__(self, header: Header, place: PartPosition) -> None:
        super().__init__(header, place)
        self.memory = bytearray(self.nbytes)
