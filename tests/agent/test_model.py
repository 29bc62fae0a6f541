"""An agent against a model: several clients on its socket, faults of its store, a full arena.

Memory that is given back is overwritten, so whoever reads it too late sees that. A byte under a
lease never changes, every payload that was opened ends, and nothing is leased once all have gone.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from objkv.agent.arena_cache import CachedPayload
from objkv.agent.client import AgentConnection, ArenaLease, leases_of
from objkv.agent.memory.arena import CELLS, PAGE, CellState, Progress
from objkv.agent.messages import Commit, CommitStatus, MissReason, PrefetchOrder, Urgency
from objkv.agent.prefetch import Prefetches
from objkv.codec.payload import digest, frame_pages, read_header
from objkv.errors import StoreUnavailable, TransferError
from tests.agent.consistency import is_consistent, threads_of
from tests.agent.world import PATIENCE_S, RIGHT, Desk, Node, claims_of, ended, pages_at
from tests.support.samples import NAMESPACE
from tests.support.waiting import wait_until

CHUNKS = 7
ROOM = 4
"""Payloads that the arena has room for."""
CLIENTS = 3
POISON = 0xEE
clients = st.integers(0, CLIENTS - 1)
chunks = st.integers(0, CHUNKS - 1)
urgencies = st.sampled_from([Urgency.IN_STEP, Urgency.BETWEEN_STEPS, Urgency.PREFETCH])


@dataclass(eq=False)
class Lease:
    number: int
    cell: int
    chunk: int
    progress: Progress
    seen: str = ""
    """Checksum of the payload when it became ready."""


@dataclass(eq=False)
class Peer:
    agent: AgentConnection
    desk: Desk
    leases: list[Lease] = field(default_factory=list)

    def close(self) -> None:
        self.agent.close()
        self.desk.close()
        self.leases.clear()


class AgentMachine(RuleBasedStateMachine):
    """Its rules are what clients, the store and a router do."""

    @initialize(codec=st.sampled_from(["none", "blosc"]))
    def begin(self, codec: str) -> None:
        self.node = Node(memory=ROOM * 2 * PAGE, threads=2)
        self.store = self.node.store
        tokens = list(range(900, 900 + 16 * CHUNKS))
        self.wanted = self.node.save(tokens, codec=codec)
        self.stored = [self.store.get(self.path(n)) or b"" for n in range(CHUNKS)]
        plain = Node()
        self.plain = [plain.store.get(one.claim.key.path()) or b"" for one in plain.save(tokens)]
        plain.close()
        self.gate = threading.Event()
        self.gate.set()
        self.broken: set[str] = set()
        self.store.on_get = self.on_get
        self._poison()
        self.node.listen()
        self.prefetches = Prefetches(self.node.core, self.node.index, self.store)
        self.peers: list[Peer | None] = [None] * CLIENTS

    def path(self, chunk: int) -> str:
        return self.wanted[chunk].claim.key.path()

    def spoiled(self, chunk: int) -> bytes:
        payload = self.stored[chunk]
        return payload[:-1] + bytes([payload[-1] ^ 1])

    def on_get(self, key: str) -> None:
        assert self.gate.wait(PATIENCE_S)
        if key in self.broken:
            raise StoreUnavailable("down")

    def _poison(self) -> None:
        arena_cache = self.node.arena_cache
        free = arena_cache._free

        def poisoned(one: CachedPayload) -> None:
            if one.offset >= 0:
                view = arena_cache.view(one)
                view[:] = bytes([POISON]) * len(view)
            free(one)

        arena_cache._free = poisoned  # type: ignore[method-assign]

    def peer(self, number: int) -> Peer:
        peer = self.peers[number]
        if peer is None:
            desk = Desk(self.node)
            agent = AgentConnection(
                self.node.path, wants_arena=True, outbox=desk.outbox.fd, call_s=PATIENCE_S
            )
            peer = self.peers[number] = Peer(agent, desk)
        return peer

    def look(self, peer: Peer, lease: Lease) -> None:
        """Read a lease as far as it is verified. What was seen once stays."""
        progress = lease.progress
        if progress.state is CellState.FILLING:
            progress = peer.agent.arena.board.read(lease.cell)
        lease.progress = progress
        if progress.state is not CellState.READY:
            return
        payload = peer.agent.arena.view[progress.offset : progress.offset + progress.nbytes]
        if not lease.seen:
            assert pages_at(peer.agent.arena.view, progress) == RIGHT
            assert read_header(payload).claim == self.wanted[lease.chunk].claim
            lease.seen = digest(payload)
        assert digest(payload) == lease.seen

    @rule(number=clients, some=st.lists(chunks, min_size=1, max_size=4), urgency=urgencies)
    def open(self, number: int, some: list[int], urgency: Urgency) -> None:
        peer = self.peer(number)
        wanted = claims_of([self.wanted[n] for n in some])
        answer = peer.agent.open(wanted, deadline_s=PATIENCE_S, urgency=urgency)
        leases = leases_of(answer, peer.agent.arena.board)
        for chunk, one in zip(some, leases, strict=True):
            if one.number:
                assert one.cell < CELLS
                peer.leases.append(Lease(one.number, one.cell, chunk, one.progress))
            else:
                assert one.progress.state is CellState.FAILED
                assert one.progress.reason == MissReason.NO_ROOM

    @rule(number=clients)
    def settle(self, number: int) -> None:
        self.gate.set()
        peer = self.peer(number)
        for lease in peer.leases:
            if lease.progress.state is CellState.FILLING:
                one = ArenaLease(lease.number, lease.cell, lease.progress)
                lease.progress = ended(peer.agent, one)
                assert lease.progress.state in (CellState.READY, CellState.FAILED)
            self.look(peer, lease)

    @rule(number=clients, data=st.data())
    def release(self, number: int, data: Any) -> None:
        peer = self.peer(number)
        count = data.draw(st.integers(0, len(peer.leases)))
        leaving, peer.leases = peer.leases[:count], peer.leases[count:]
        for lease in leaving:
            self.look(peer, lease)
        peer.agent.release([lease.number for lease in leaving])

    @rule(number=clients, chunk=chunks)
    def reject(self, number: int, chunk: int) -> None:
        self.peer(number).agent.reject(self.wanted[chunk].claim)

    @rule(number=clients)
    def go(self, number: int) -> None:
        peer = self.peers[number]
        if peer is not None:
            peer.close()
            self.peers[number] = None

    @rule(number=clients, message=st.sampled_from([b"\xff", b"\x06\0\0\0\x7f", b"", b"\x04xx"]))
    def talk_nonsense(self, number: int, message: bytes) -> None:
        """The agent ends the conversation. What is leased stays until the client goes."""
        peer = self.peer(number)
        peer.agent._sock.send(message)
        wait_until(peer.agent.has_ended)
        for lease in peer.leases:
            self.look(peer, lease)
        peer.close()
        self.peers[number] = None

    @rule(number=clients, chunk=chunks, at=st.integers(-1, 4000))
    def commit(self, number: int, chunk: int, at: int) -> None:
        """Hand a payload over; from ``at`` on it is wrong, unless that is -1."""
        peer, payload = self.peer(number), bytearray(self.plain[chunk])
        is_right = at < 0
        if not is_right:
            payload[at % len(payload)] ^= 1
        memory = peer.desk.memory
        memory[: len(payload)] = payload
        try:
            (status,) = peer.agent.commit([Commit(0, len(payload))])
        except TransferError:
            assert not is_right
            peer.close()
            self.peers[number] = None
            return
        finally:
            memory[:] = POISON
        if not is_right:
            assert status is not CommitStatus.ACCEPTED or self.node.arena_cache.leased()

    @rule(some=st.lists(chunks, min_size=1, max_size=3))
    def prefetch(self, some: list[int]) -> None:
        hashes = [self.wanted[n].claim.key.prefix_hash for n in some]
        self.prefetches.start(NAMESPACE, hashes, PrefetchOrder(PATIENCE_S))

    @rule(chunk=chunks, fault=st.sampled_from(["missing", "corrupt", "down", "none"]))
    def spoil(self, chunk: int, fault: str) -> None:
        path = self.path(chunk)
        self.broken.discard(path)
        if fault == "missing":
            self.store.delete(path)
        elif fault == "corrupt":
            self.store.put(path, self.spoiled(chunk))
        else:
            self.store.put(path, self.stored[chunk])
            self.broken.update([path] if fault == "down" else [])

    @precondition(lambda self: self.gate.is_set())
    @rule()
    def stall(self) -> None:
        """The store answers nothing until a client waits, or this is undone."""
        self.gate.clear()

    @rule()
    def answer(self) -> None:
        self.gate.set()

    @invariant()
    def bytes_under_a_lease_are_those_that_were_opened(self) -> None:
        for peer in self.peers:
            for lease in peer.leases if peer is not None else ():
                assert peer is not None
                self.look(peer, lease)
        assert is_consistent(self.node.arena_cache)

    def teardown(self) -> None:
        self.gate.set()
        for number, peer in enumerate(self.peers):
            if peer is not None:
                self.settle(number)
                peer.close()
        assert self.node.saves.drain(PATIENCE_S)
        wait_until(lambda: not self.node.arena_cache.leased())
        wait_until(lambda: self.node.server is not None and not self.node.server.clients)
        arena_cache = self.node.arena_cache
        assert arena_cache.leased() == 0
        assert is_consistent(arena_cache)
        assert threads_of(self.node.core) == 2
        for chunk, stored in enumerate(self.stored):
            found = self.store.get(self.path(chunk))
            if found not in (None, stored, self.spoiled(chunk)):  # a client's
                header = read_header(found)
                assert header.claim == self.wanted[chunk].claim
                pages = [bytes(frame_pages(header, n, found, None)) for n in range(2)]
                assert pages == RIGHT
        self.node.close()
        self.node.arena.close()


TestAgent = AgentMachine.TestCase
TestAgent.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
