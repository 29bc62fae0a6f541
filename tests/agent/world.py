"""An agent in this process, over stores that tests can slow down, count and break."""

import mmap
import os
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import numpy as np

from objkv.agent.answering import NodeCalls, NodeLookups
from objkv.agent.arena_cache import CachedPayload
from objkv.agent.client import AgentConnection, ArenaLease
from objkv.agent.core import Core, CoreLimits
from objkv.agent.disk import Disk
from objkv.agent.fill import PayloadRequest
from objkv.agent.http.api import AgentHttp
from objkv.agent.http.status import NodeStatus, RecentWarnings, StoreCheck
from objkv.agent.memory.answers import AnswerBoard
from objkv.agent.memory.arena import Arena, CellState, Progress
from objkv.agent.messages import Claims, Commit, CommitStatus, SavedPart, Urgency
from objkv.agent.outbox import AgentSaves, ClientOutbox, Outbox, OutboxPayload
from objkv.agent.prefetch import Prefetches
from objkv.agent.saves import NodeSaveLimits, NodeSaves
from objkv.agent.server import AgentServer
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.cache.worth import PutPolicy, PutRule
from objkv.codec.payload import Claim, Header, frame_pages, read_header
from objkv.codec.seal import Seal
from objkv.config.prices import LIST_PRICES
from objkv.errors import StoreBusy, StoreDenied, StoreUnavailable
from objkv.index.base import WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import Arrived
from objkv.telemetry import MemoryRecorder
from tests.agent.consistency import is_consistent, keeps_promises
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import NAMESPACE, TOKENS, save

PATIENCE_S = 60.0
FAR_S = 1e12
"""No time since the epoch is as late."""
MEMORY = 1 << 20


class WatchedStore(MemoryStore):
    """Counts gets, and calls ``on_get`` before each."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: Counter[str] = Counter()
        self.on_get: Callable[[str], None] = lambda key: None
        self._counting = Lock()

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        with self._counting:
            self.gets[key] += 1
        self.on_get(key)
        return super().get_into(key, buffer, arrived, start)


class Sleeper:
    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def put_policy(setting: Literal["auto", "all", "reused"] = "auto", **rule: Any) -> PutPolicy:
    """What an agent puts to a bucket at S3's list prices."""
    prices = replace(LIST_PRICES, gpu_hour=3.0)
    return PutPolicy(PutRule(setting, **{"prices": prices, "life_s": 16_200.0} | rule))


class Node:
    """Stores, an arena and a core, and a socket once ``listen`` was called."""

    def __init__(
        self,
        *,
        memory: int = MEMORY,
        threads: int = 2,
        queue_max: int = 1000,
        seal: Seal | None = None,
        seals: Sequence[str] = (),
        store: MemoryStore | None = None,
        index: MemoryIndex | None = None,
        codec: str = "none",
        path: Path | None = None,
        disk: Disk | None = None,
        keeps_all: bool = False,
        holds_back: bool = False,
        policy: PutPolicy | None = None,
        saves_max: int = 100,
        save_deadline_s: float = PATIENCE_S,
        may_save: bool = True,
    ) -> None:
        self.seals = seals
        self.store: Any = store or WatchedStore()
        self.index, self.recorder = index or MemoryIndex(), MemoryRecorder()
        settings = CacheSettings("agent", ttl_s=3600, lease_ms=60_000, hot_save_bytes_max=0)
        self.cache = ChunkCache(self.store, None, self.index, settings, self.recorder, seal=seal)
        self.arena = Arena.create(memory)
        limits = CoreLimits(threads, queue_max, keeps_all)
        board = AnswerBoard.create()
        self.core = Core(
            self.cache,
            self.arena,
            limits,
            self.recorder,
            disk=disk,
            changed=board.discard,
            came_due=lambda: self.saves.wake(),
        )
        self.arena_cache = self.core.arena_cache
        save_limits = NodeSaveLimits(2, saves_max, save_deadline_s, codec, may_save=may_save)
        policy = policy or put_policy("reused" if holds_back else "all")
        self.saves = NodeSaves(self.cache, self.core, save_limits, policy, self.recorder)
        self.lookups = NodeLookups(self.index, self.arena_cache.held_back, self.core.found, board)
        board.vouch(FAR_S)
        self.folder = Path(tempfile.mkdtemp(prefix="objkv-", dir="/tmp"))
        self.path = path or self.folder / "s"
        self.http = Path(f"{self.path}.http")
        self.server: Any = None
        """None before ``listen``."""
        self.warnings = RecentWarnings()
        self.clients: list[AgentConnection] = []

    def listen(self) -> "Node":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self.path))
        listener.listen(64)
        prefetches = Prefetches(self.core, self.index, self.store)
        calls = NodeCalls(self.index, self.store, prefetches, self.saves.policy, ttl_s=3600)
        self.server = AgentServer(
            listener, self.core, self.saves, self.arena, self.lookups, calls, seals=self.seals
        )
        return self

    def connect(self, *, wants_arena: bool = True, **how: Any) -> AgentConnection:
        usual = {"wants_arena": wants_arena, "seals": self.seals, "call_s": PATIENCE_S}
        self.clients.append(AgentConnection(self.path, **usual, **how))
        return self.clients[-1]

    def save(self, tokens: Sequence[int] = TOKENS, *, codec: str = "none") -> list[PayloadRequest]:
        """Store payloads; what to open."""
        return self.wanted(save(self.store, self.index, tokens, codec=codec))

    def commit_one(self, payload: bytes) -> CommitStatus:
        """Hand over a payload, as a client of their own does."""
        with outbox_of(payload) as outbox:
            return self.saves.commit(outbox, Commit(0, len(payload)))

    def open(
        self,
        *wanted: PayloadRequest,
        deadline_s: float = PATIENCE_S,
        urgency: Urgency = Urgency.BETWEEN_STEPS,
    ) -> list[CachedPayload]:
        """Begin to load payloads, as a client of their own does; those that are taken."""
        self.found(*wanted)
        how = {"deadline_s": deadline_s, "urgency": urgency}
        found = self.core.open(Sleeper(), claims_of(wanted), **how)
        return [one for one in found if isinstance(one, CachedPayload)]

    def wanted(self, keys: Sequence[ChunkKey]) -> list[PayloadRequest]:
        return wanted_of(self.index, keys)

    def found(self, *wanted: PayloadRequest) -> None:
        """A lookup of this node has just found these records."""
        for one in wanted:
            key = one.claim.key
            self.core.found.add(key.namespace, [(key.prefix_hash, {key.field: one.record})])

    def close(self) -> None:
        self.core.close(PATIENCE_S)
        for client in self.clients:
            client.close()
        if self.server is not None:
            self.server.close()
        self.lookups.board.close()
        self.saves.close(PATIENCE_S)
        if self.arena.view:
            assert keeps_promises(self.arena_cache)
        self.arena.close()
        shutil.rmtree(self.folder, ignore_errors=True)


Made = TypeVar("Made", bound=Node)
Make = Callable[..., Node]


@contextmanager
def making(kind: Callable[..., Made]) -> Iterator[Callable[..., Made]]:
    """Makes nodes, closes them at the end, and looks whether they agree with themselves."""
    nodes: list[Made] = []

    def made(**options: Any) -> Made:
        nodes.append(kind(**options))
        return nodes[-1]

    yield made
    for node in nodes:
        node.close()
        assert is_consistent(node.arena_cache)


@contextmanager
def outbox_of(payload: bytes) -> Iterator[ClientOutbox]:
    with closing(Outbox(len(payload))) as box:
        os.pwrite(box.fd, payload, 0)
        outbox = ClientOutbox(os.dup(box.fd))
    with closing(outbox):
        yield outbox


def wanted_of(index: WriteIndex, keys: Sequence[ChunkKey]) -> list[PayloadRequest]:
    records = index.lookup(NAMESPACE, [key.prefix_hash for key in keys])
    return [
        PayloadRequest(
            Claim(key, record.parent_hash, record.token_start, record.token_end),
            record.shards[key.field],
        )
        for key, record in zip(keys, records, strict=True)
        if record is not None
    ]


def raising(error: Exception) -> Callable[..., Any]:
    """A call that fails in this way each time."""

    def call(*_: object, **__: object) -> Any:
        raise type(error)(*error.args)  # one that is kept keeps all that its frames had

    return call


down, denied = raising(StoreUnavailable("down")), raising(StoreDenied("no rights"))
busy = raising(StoreBusy("slow down"))


class Paused:
    """A method that is begun, and goes on when it may."""

    def __init__(self, owner: Any, name: str) -> None:
        self.begun, self.go, self.is_over = Event(), Event(), False
        self._call = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *given: Any, **how: Any) -> Any:
        self.begun.set()
        try:
            assert self.go.wait(PATIENCE_S)
        finally:
            self.is_over = True
        return self._call(*given, **how)


def gated(node: Node) -> Event:
    """From now on the store answers nothing until this is set."""
    gate = Event()
    node.store.on_get = lambda key: gate.wait(PATIENCE_S) and None  # type: ignore[func-returns-value]
    return gate


REPLICAS: Any = SimpleNamespace(clients=7, is_accepting=True, seals=())


@contextmanager
def serving(node: Node, **places: Any) -> Iterator[AgentHttp]:
    """An agent's HTTP interface, next to its socket. It tells of ``REPLICAS``."""
    checks = [
        StoreCheck("bulk", "s3://kv", lambda: node.store.check()),
        StoreCheck("index", "rediss://***@index", lambda: node.index.check()),
    ]
    how = {"role": "writer", "stores": checks, "warnings": node.warnings}
    status = NodeStatus(node.core, node.saves, REPLICAS, node.recorder, **how)
    prefetches = Prefetches(node.core, node.index, node.store)
    with closing(AgentHttp(node.http, prefetches, status, **places)) as server:
        yield server


@contextmanager
def http_of(node: Node) -> Iterator[Path]:
    with serving(node):
        yield node.http


def ended(client: AgentConnection, lease: ArenaLease) -> Progress:
    """What a lease's payload became; waits for it."""
    progress = lease.progress
    while progress.state is CellState.FILLING:
        progress = client.arena.board.read(lease.cell)
        assert progress.state is not CellState.FILLING or client.wait(PATIENCE_S)
    return progress


def opened(client: AgentConnection, wanted: Sequence[PayloadRequest]) -> list[ArenaLease]:
    claims = claims_of(wanted)
    return client.open(claims, deadline_s=PATIENCE_S, urgency=Urgency.BETWEEN_STEPS)


def loaded(client: AgentConnection, wanted: Sequence[PayloadRequest]) -> list[Progress]:
    """What became of payloads that a client opens, waits for, and gives back."""
    leases = opened(client, wanted)
    found = [ended(client, lease) for lease in leases]
    client.release([lease.number for lease in leases if lease.number])
    return found


def claims_of(wanted: Sequence[PayloadRequest]) -> Claims:
    return Claims.of([one.claim for one in wanted])


def pages_at(view: memoryview, progress: Progress) -> list[bytes]:
    """The verified pages of a payload in the arena."""
    payload = view[progress.offset : progress.offset + progress.nbytes]
    header = read_header(payload)
    assert header.nbytes == progress.nbytes
    assert header.codec == "none"
    return [bytes(frame_pages(header, n, payload, None)) for n in range(len(header.frames))]


RIGHT = [bytes([number]) * 512 for number in range(2)]
"""The pages of every sample."""


class Desk:
    def __init__(self, node: Node, **connecting: Any) -> None:
        self.outbox = Outbox(8192)
        self.memory = np.frombuffer(mmap.mmap(self.outbox.fd, self.outbox.nbytes), np.uint8)
        self.now = 0.0
        self.accepted: list[ChunkKey] = []
        self.saves = AgentSaves(
            lambda fd: node.connect(wants_arena=False, outbox=fd, **connecting),
            self.outbox,
            self.memory,
            accepted=self.accepted.append,
            clock=lambda: self.now,
        )

    def hand_over(
        self,
        payload: bytes,
        header: Header | None = None,
        *,
        puts: bool = False,
        part: SavedPart | None = None,
    ) -> CommitStatus:
        """Have a payload, or a part of one, saved. ``header``: what the worker takes it for."""
        header = header or read_header(payload)
        path = header.claim.key.path()
        place = self.memory[100 : 100 + len(payload)]
        place[:] = np.frombuffer(payload, np.uint8)
        if puts:
            assert self.saves.begin_save(path, puts=True)
        try:
            (status,) = self.saves.save([OutboxPayload(header.claim.key, path, place.data, part)])
            return status
        finally:
            self.saves.end_save(path)
            self.memory[:] = 0xEE  # free from now on

    def close(self) -> None:
        """Go. What was handed over is saved nevertheless."""
        self.saves.close()
        assert self.outbox.fd < 0


def claims_in(made: Sequence[bytes]) -> list[Claim]:
    """What payloads claim to be."""
    return [read_header(payload).claim for payload in made]


def hashes_in(made: Sequence[bytes]) -> list[bytes]:
    """Their chunks."""
    return [claim.key.prefix_hash for claim in claims_in(made)]


def paths(made: Sequence[bytes]) -> list[str]:
    """Where a bucket has them."""
    return [claim.key.path() for claim in claims_in(made)]


def payloads(tokens: Sequence[int] = TOKENS) -> list[bytes]:
    store = MemoryStore()
    return [bytes(store.get(key.path()) or b"") for key in save(store, None, tokens)]
