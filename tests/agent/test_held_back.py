"""Payloads that are held back until they are seen a second time."""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from objkv.agent.answering import NodeCalls
from objkv.agent.client import AgentConnection
from objkv.agent.fill import PayloadRequest
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import CommitStatus, MissReason, PrefetchOrder, is_held_back
from objkv.agent.prefetch import Matched, Prefetches
from objkv.cache.worth import SETTLED_S, PutPolicy
from objkv.codec.payload import Claim
from objkv.errors import StoreUnavailable, TransferError
from objkv.index.base import ChunkEntry, Savings, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard
from tests.agent import world
from tests.agent.consistency import paths_of
from tests.agent.world import PATIENCE_S, Node, Paused, claims_in, down, hashes_in, paths, payloads
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.agents import AgentProcess
from tests.support.samples import NAMESPACE, TOKENS
from tests.support.steps import complete
from tests.support.waiting import wait_until


class Holder(Node):
    """A node that holds payloads back, one of its workers, and one of its readers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"holds_back": True} | options)
        self.listen()
        self._new_desk()
        self.reader = self.connect()

    def _new_desk(self) -> None:
        self.desk = world.Desk(self)

    def commit(self, made: Sequence[bytes], *, puts: bool = False) -> list[CommitStatus]:
        """Hand payloads over, as a worker does; waits until the fleet has counted them."""
        outcomes = [self.desk.hand_over(payload, puts=puts) for payload in made]
        assert self.saves.drain(PATIENCE_S)
        return outcomes

    def again(self, made: Sequence[bytes]) -> list[CommitStatus]:
        """Hand payloads over by another worker."""
        self.desk.close()
        self._new_desk()
        return self.commit(made)

    def find(self, made: Sequence[bytes]) -> list[PayloadRequest]:
        """What the node's lookups find, up to the first miss, as what to open."""
        return find(self.reader, made)

    def read(self, wanted: Sequence[PayloadRequest]) -> list[MissReason]:
        """Read payloads one after the other; why each was missed. Waits for saves of them."""
        outcomes = [read(self.reader, one) for one in wanted]
        assert self.saves.drain(PATIENCE_S)
        return outcomes

    @property
    def stored(self) -> set[str]:
        """Paths in the bulk store."""
        return {entry.key for entry in self.store.scan("")}

    @property
    def held(self) -> set[str]:
        """Paths of what is held back."""
        return paths_of(self.arena_cache.held_back)

    def count(self, name: str) -> float:
        """A counter."""
        return self.recorder.value(name)

    def close(self) -> None:
        self.desk.close()
        super().close()
        assert self.arena_cache.leased() == 0


Make = Callable[..., Holder]


def read(client: AgentConnection, wanted: PayloadRequest) -> MissReason:
    """Read a payload, and check its pages; why it was missed."""
    (lease,) = world.opened(client, [wanted])
    progress = world.ended(client, lease)
    if progress.state is CellState.READY:
        assert world.pages_at(client.arena.view, progress) == world.RIGHT
    client.release([lease.number] if lease.number else [])
    return MissReason(progress.reason)


def find(client: AgentConnection, made: Sequence[bytes]) -> list[PayloadRequest]:
    """What a client's lookup finds, up to the first miss."""
    claims = claims_in(made)
    fields = (claims[0].key.field,)
    found = complete(client.find(NAMESPACE, hashes_in(made), fields))
    both = takewhile(itemgetter(1), zip(claims, found, strict=True))
    return [PayloadRequest(claim, shards[fields[0]]) for claim, shards in both]


@pytest.fixture
def make() -> Iterator[Callable[..., Holder]]:
    with world.making(Holder) as make:
        yield make


def of_index(node: Node, made: Sequence[bytes]) -> list[ShardRecord | None]:
    """The index's own records."""
    field = claims_in(made)[0].key.field
    found = [node.index.find(NAMESPACE, [one], [field])[0] for one in hashes_in(made)]
    return [shards and shards[field] for shards in found]


def test_what_was_seen_once_is_found_on_its_node_alone_and_what_is_made_twice_is_stored(
    make: Make,
) -> None:
    node, made = make(), payloads()
    assert node.commit(made) == [CommitStatus.HELD_BACK] * 3
    assert not node.stored
    assert of_index(node, made) == [None] * 3
    assert node.desk.accepted == [], "no other node can load it: no event"
    wanted = node.find(made)
    assert [one.record.nbytes for one in wanted] == [len(payload) for payload in made]
    assert all(is_held_back(one.record) for one in wanted)
    assert node.arena_cache.leased() == 0
    assert node.count("agent_held_back") == 3
    assert node.arena_cache.held_back.nbytes == sum(map(len, made))
    node.again(made[:1])
    assert node.stored == set(paths(made[:1]))
    assert [key.path() for key in node.desk.accepted] == paths(made[:1])


def test_what_the_agent_took_is_found_from_then_on_although_it_was_missing_just_now(
    make: Make,
) -> None:
    node, made = make(holds_back=False), payloads()
    put = Paused(node.store, "put_if_absent")
    assert node.find(made) == []
    for payload in made:
        assert node.desk.hand_over(payload) is CommitStatus.ACCEPTED
    found = node.find(made)
    assert [is_held_back(one.record) for one in found] == [True] * 3, "none is stored yet"
    assert [read(node.reader, one) for one in found] == [MissReason.NONE] * 3
    put.go.set()
    assert node.saves.drain(PATIENCE_S)
    assert node.stored == set(paths(made))
    assert [one.record for one in node.find(made)] == of_index(node, made)
    assert not node.held
    assert node.count("agent_unsaved_due") == 0, "it was being saved when it was read"


def test_what_another_process_was_saving_is_looked_up_in_the_index_after_its_next_read(
    make: Make,
) -> None:
    store, index, made = world.WatchedStore(), MemoryIndex(), payloads()
    node = make(holds_back=False, store=store, index=index)
    for path in paths(made):
        assert index.lease(path, "another", ttl_ms=600_000)
    node.commit(made)
    assert node.count("save_leased_elsewhere") == 3
    assert all(is_held_back(one.record) for one in node.find(made)), "it may not be stored yet"
    for path in paths(made):
        index.release(path, "another")
    make(holds_back=False, store=store, index=index).commit(made)
    node.read(node.find(made))
    assert not node.held
    assert [one.record for one in node.find(made)] == of_index(node, made)
    assert node.count("save_existed") == 3


def test_what_is_read_is_stored_and_published(make: Make) -> None:
    node, made = make(codec="blosc", memory=4 * 8192), payloads()
    others = node.save(list(range(9000, 9000 + 16 * 8)))
    node.commit(made)
    wanted = node.find(made)
    assert node.read(wanted) == [MissReason.NONE] * 3
    assert node.stored >= set(paths(made))
    assert not node.held
    found = node.find(made)
    assert [one.record for one in found] == of_index(node, made)
    assert not any(is_held_back(one.record) for one in found)
    assert node.read(wanted) == [MissReason.NONE] * 3, "by records that were found before"
    assert not node.store.gets
    assert node.count("saves") == 3
    node.read(others)
    assert node.arena_cache.contains_ready(paths(made)) == [False] * 3
    assert node.read(wanted) == [MissReason.NONE] * 3, "from the store, by the same records"
    assert [node.store.gets[path] for path in paths(made)] == [1] * 3
    assert not node.count("load_corrupt")


def test_what_another_node_makes_again_is_stored_by_that_node(make: Make) -> None:
    store, index = world.WatchedStore(), MemoryIndex()
    first, second = (make(store=store, index=index) for _ in range(2))
    made = payloads()
    first.commit(made)
    assert second.find(made) == []
    second.commit(made[:2])
    assert second.stored == set(paths(made[:2]))
    assert second.count("saves") == 2
    assert second.count("agent_sighted_before") == 2
    assert first.held == set(paths(made)), "it does not know"
    assert first.read(first.find(made)) == [MissReason.NONE] * 3
    assert first.stored == set(paths(made))
    assert (first.count("saves"), first.count("save_existed")) == (1, 2)
    assert not first.held
    assert second.read(second.find(made)) == [MissReason.NONE] * 3


def test_a_commit_that_says_so_is_stored_at_once(make: Make) -> None:
    node, made = make(memory=3 * 8192), payloads()
    node.commit(made[:2])
    node.commit(made[1:], puts=True)
    assert node.stored == set(paths(made)), "a beginning that was held back is due with its end"
    assert [key.path() for key in node.desk.accepted] == paths(made[1:])
    assert not node.held
    assert node.count("save_repeats") == 0


def test_no_save_is_begun_later_because_an_agent_is_being_connected_to(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward pass begins it."""
    node, made = make(), payloads()
    monkeypatch.setattr(node, "connect", world.raising(TransferError("gone")))
    connect = Paused(node, "connect")
    with ThreadPoolExecutor(2) as pool:
        try:
            handed = pool.submit(node.desk.hand_over, made[0])
            assert connect.begun.wait(PATIENCE_S)
            forward = pool.submit(node.desk.saves.begin_save, paths(made)[1])
            assert forward.result(PATIENCE_S)
        finally:
            connect.go.set()
        assert isinstance(handed.exception(), TransferError)


def test_a_commit_that_says_so_is_stored_when_there_is_room(make: Make) -> None:
    node, made = make(memory=3 * 8192), payloads()
    put = Paused(node.store, "put_if_absent")
    outcomes = [node.desk.hand_over(one, puts=True) for one in made]
    assert outcomes == [CommitStatus.ACCEPTED] * 3
    put.go.set()
    assert node.saves.drain(PATIENCE_S)
    assert node.stored == set(paths(made))
    assert [key.path() for key in node.desk.accepted] == paths(made)


def test_the_beginning_of_a_prompt_is_stored_before_its_end(make: Make) -> None:
    node, made, puts = make(), payloads(list(range(16 * 8))), list[str]()
    put = node.store.put_if_absent

    def seen(key: str, value: Any) -> bool:
        puts.append(key)
        return put(key, value)

    node.store.put_if_absent = seen  # type: ignore[method-assign]
    node.commit(made)
    assert node.read(node.find(made)[5:6]) == [MissReason.NONE]
    assert set(puts) == set(paths(made)[:6]), "an engine has the beginning in its own memory"
    assert node.held == set(paths(made)[6:])
    assert len(node.find(made)) == 8


def test_a_held_back_payload_can_be_evicted_and_is_an_ordinary_miss_then(make: Make) -> None:
    node, made = make(memory=4 * 8192), payloads()
    others = node.save(list(range(9000, 9000 + 16 * 8)))
    node.commit(made[:1])
    (wanted,) = node.find(made)
    before = len(list(node.index.scan(NAMESPACE)))
    assert node.read(others) == [MissReason.NONE] * 8
    assert not node.held
    assert node.count("agent_unsaved_dropped") == 1
    assert node.count("agent_unsaved_dropped_bytes") == len(made[0])
    assert node.find(made) == []
    gets = sum(node.store.gets.values())
    for error in (StoreUnavailable("down"), RuntimeError("a bug")):
        node.index.find = world.raising(error)  # type: ignore[method-assign]
        assert node.read([wanted]) == [MissReason.STORE]
        del node.index.find
    assert node.read([wanted]) == [MissReason.MISSING]
    assert sum(node.store.gets.values()) == gets, "the store is not asked for it"
    node.reader.reject(wanted.claim)
    assert len(list(node.index.scan(NAMESPACE))) == before
    assert node.read(others[-1:]) == [MissReason.NONE]


def test_without_an_index_a_payload_stays_in_memory(make: Make) -> None:
    node, made = make(), payloads()
    node.index.record_sightings = down  # type: ignore[method-assign]
    node.commit(made)
    assert node.count("agent_sighting_drops") >= 1
    assert node.held == set(paths(made))
    del node.index.record_sightings
    node.read(node.find(made))
    assert node.stored == set(paths(made))


def test_payloads_that_come_together_share_a_round_trip(make: Make) -> None:
    node, made = make(), payloads(list(range(16 * 9)))
    sight, sizes = node.index.record_sightings, list[int]()

    def seen(names: Sequence[str], *, ttl_s: int) -> list[bool]:
        sizes.append(len(names))
        return sight(names, ttl_s=ttl_s)

    node.index.record_sightings = seen  # type: ignore[method-assign]
    slow = Paused(node.index, "record_sightings")
    node.desk.hand_over(made[0])
    assert slow.begun.wait(PATIENCE_S)
    for payload in made[1:]:
        node.desk.hand_over(payload)
    slow.go.set()
    assert node.saves.drain(PATIENCE_S)
    assert sizes == [1, 8]


@pytest.mark.parametrize(
    ("place", "call", "fails", "is_put"),
    [("store", "put_if_absent", world.busy, False), ("index", "publish", down, True)],
    ids=["not put", "not published"],
)
def test_a_save_that_failed_is_tried_at_the_next_read(
    place: str,
    call: str,
    fails: Callable[..., Any],
    is_put: bool,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, made, now = make(), payloads(), [0.0]
    put = set(paths(made)) if is_put else set()
    node.arena_cache.held_back._clock = lambda: now[0]
    with monkeypatch.context() as broken:
        broken.setattr(getattr(node, place), call, fails)
        node.commit(made)
        node.read(node.find(made))
        assert node.held == set(paths(made))
        wait_until(lambda: node.arena_cache.leased() == 0)
    wait_until(lambda: not node.saves.is_shedding)
    assert len(node.find(made)) == 3
    node.read(node.find(made))
    assert of_index(node, made) == [None] * 3, "not at once"
    assert node.stored == put
    assert node.again(made) == [CommitStatus.HELD_BACK] * 3
    assert (node.desk.accepted, node.stored) == ([], put), "made again, and not saved: no event"
    now[0] = 100.0
    node.read(node.find(made))
    assert node.stored == set(paths(made))
    assert None not in of_index(node, made)
    assert not node.held
    assert node.count("publish_errors") == len(put)


@pytest.mark.parametrize("may_save", [True, False], ids=["over quota", "may only read"])
def test_what_may_not_be_saved_stays_in_memory(may_save: bool, make: Make) -> None:
    node, made = make(holds_back=may_save, may_save=may_save), payloads()
    node.cache.has_room = lambda: not may_save  # type: ignore[method-assign]
    assert node.commit(made[:2]) == [CommitStatus.HELD_BACK] * 2
    assert node.commit(made[2:], puts=True) == [CommitStatus.HELD_BACK]
    assert node.desk.saves.has_room()
    assert node.read(node.find(made)) == [MissReason.NONE] * 3
    assert node.count("save_over_quota") == 4 * may_save
    assert node.read(node.find(made)) == [MissReason.NONE] * 3
    assert node.held == set(paths(made))
    assert not node.stored
    assert not node.count("save_drops")


def test_an_agent_that_may_only_read_takes_again_what_it_has(make: Make) -> None:
    node, (first, other, _) = make(holds_back=False, may_save=False), payloads()
    node.read(node.save()[:1])
    assert node.commit_one(first) is CommitStatus.REPEATED
    for _ in range(2):
        assert node.commit_one(other) is CommitStatus.HELD_BACK


def test_a_payload_that_a_reader_refuses_is_held_back_no_longer(make: Make) -> None:
    node, made = make(), payloads()
    node.commit(made)
    node.reader.reject(node.find(made)[0].claim)
    wait_until(lambda: node.find(made) == [])
    assert node.held == set(paths(made)[1:])


def test_a_lookup_that_has_just_missed_a_payload_finds_it_and_what_follows(make: Make) -> None:
    node, made = make(), payloads()
    assert node.find(made) == []
    node.save(TOKENS)
    node.index.drop(NAMESPACE, hashes_in(made)[0])  # only held back; the others are stored
    node.store.delete(paths(made)[0])
    assert node.find(made) == []
    node.commit(made[:1])
    wanted = node.find(made)
    assert [is_held_back(one.record) for one in wanted] == [True, False, False]
    node.read(wanted)
    assert [one.record for one in node.find(made)] == of_index(node, made)


def test_a_chunk_with_some_of_its_shards_stored_is_found_with_all(make: Make) -> None:
    node, made = make(), payloads()
    node.commit(made)
    claim, hashes, other = claims_in(made)[1], hashes_in(made), "0.L0-2_H2-4"
    record, field = ShardRecord(5, 5, True, False, "00", 1), claim.key.field
    entry = ChunkEntry(NAMESPACE, hashes[1], claim.parent_hash, claim.token_start, claim.token_end)
    node.index.publish(entry, {other: record}, ttl_s=100)
    found = complete(node.reader.find(NAMESPACE, hashes, (field, other)))
    assert [set(shards or ()) for shards in found] == [{field}, {field, other}, {field}]
    assert (found[1] or {})[other] == record
    prefetches = Prefetches(node.core, node.index, node.store)
    assert counts(prefetches.match(NAMESPACE, hashes)) == (3, 3, 1, 48)


def counts(found: Matched) -> tuple[int, int, int, int]:
    return found.chunks, found.stored, found.resident, found.tokens


def test_a_router_sees_held_back_payloads(make: Make) -> None:
    node, made = make(memory=3 * 8192), payloads()
    prefetches, hashes = Prefetches(node.core, node.index, node.store), hashes_in(made)
    assert counts(prefetches.match(NAMESPACE, hashes)) == (3, 0, 0, 0)
    node.commit(made)
    assert counts(prefetches.match(NAMESPACE, hashes)) == (3, 3, 3, 48)
    assert prefetches.start(NAMESPACE, hashes, PrefetchOrder(PATIENCE_S)).resident == 3
    assert node.saves.drain(PATIENCE_S)
    assert not node.stored, "a prefetch is no read"


class Service:
    """An agent in a process of its own, and a worker that has handed payloads over and gone."""

    def __init__(
        self,
        folder: Path,
        made: Sequence[bytes],
        policy: str,
        more: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.settings = {
            "bulk_url": f"file://{folder}/c",
            "index_url": f"sqlite://{folder}/i",
            "save_to_bucket": policy,
            "agent_memory_bytes": str(1 << 20),
        } | dict(more or {})
        self.agent = AgentProcess(self.settings, options=options)
        desk = world.Desk(self)  # type: ignore[arg-type]  # it only connects
        for payload in made:
            desk.hand_over(payload)
        desk.close()

    def connect(self, *, wants_arena: bool = True, outbox: int = -1) -> AgentConnection:
        return AgentConnection(
            self.agent.path, wants_arena=wants_arena, outbox=outbox, call_s=PATIENCE_S
        )


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_engine_that_has_gone_loses_nothing_and_an_agent_what_it_held_back(
    is_killed: bool, tmp_path: Path
) -> None:
    made = payloads()
    service = Service(tmp_path, made, "reused")
    with service.agent as agent:
        with closing(service.connect()) as client:
            wanted = find(client, made)
            assert len(wanted) == 3
            assert read(client, wanted[0]) is MissReason.NONE
            if is_killed:
                wait_until(lambda: not is_held_back(find(client, made)[0].record))
        if is_killed:
            agent.kill()
        else:
            numbers = agent.end()
            (lost,) = [line for line in agent.log().splitlines() if "payloads lost" in line]
            assert (numbers["saves"], numbers["unsaved"]) == (1, 2)
            assert "count=2" in lost
            assert "set agent_disk_url to keep them" in lost
            assert numbers["unsaved_bytes"] == sum(map(len, made[1:]))
        with AgentProcess(service.settings, path=agent.path), closing(service.connect()) as client:
            assert len(find(client, made)) == 1
            reasons = [read(client, one) for one in wanted]
            assert reasons == [MissReason.NONE, MissReason.MISSING, MissReason.MISSING]


def test_saves_that_wait_lease_at_most_a_quarter_of_the_arena(make: Make) -> None:
    """The others wait without a lease, and are lost only if their memory is needed."""
    node, made = make(holds_back=False, memory=10 * 4096), payloads()
    put = Paused(node.store, "put_if_absent")
    accepted, held_back = CommitStatus.ACCEPTED, CommitStatus.HELD_BACK
    assert [node.commit_one(one) for one in made] == [accepted, accepted, held_back]
    assert node.commit_one(made[2]) is held_back
    assert node.arena_cache.leased() == 2, "each has 5 KiB, and a quarter is 10 KiB"
    assert node.held == set(paths(made))
    put.go.set()
    assert node.saves.drain(PATIENCE_S)
    assert node.stored == set(paths(made))
    assert not node.held
    assert not node.count("save_drops")
    assert not node.count("agent_held_back")


@pytest.mark.parametrize("is_in_time", [True, False])
def test_an_agent_that_ends_puts_what_is_due_within_its_deadline(
    is_in_time: bool, make: Make
) -> None:
    node, made = make(saves_max=1), payloads()
    put = Paused(node.store, "put_if_absent")
    node.commit(made)
    wanted = node.find(made)
    assert {read(node.reader, one) for one in wanted[:2]} == {MissReason.NONE}
    node.core.close(PATIENCE_S)  # as an agent that ends does before
    ending = threading.Thread(target=node.saves.close, args=(PATIENCE_S if is_in_time else 0.1,))
    ending.start()
    if is_in_time:
        put.go.set()
    ending.join(PATIENCE_S)
    lost, stored = node.held, node.stored
    put.go.set()
    assert stored == (set(paths(made[:2])) if is_in_time else set())
    assert lost == set(paths(made[2:] if is_in_time else made))
    assert read(node.reader, wanted[2]) is MissReason.NONE, "too late to be put, and harmless"
    assert paths(made)[2] not in node.stored


# Which payloads an agent puts, from what its replicas hand over and measure.


NBYTES = 15 << 20
"""A quarter of a chunk: of 4 ranks, each has a payload of this size."""
GPU_US = 70_000
"""Computing time of 256 tokens, on all GPUs."""
TWO = "f" * 32


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


def policy(clock: ManualClock, setting: Any = "auto", **rule: Any) -> PutPolicy:
    return PutPolicy(world.put_policy(setting, **rule).rule, clock=clock)


def claim_of(number: int, rank: int, namespace: str = NAMESPACE) -> Claim:
    key = ChunkKey(namespace, bytes([number] * 20), 0, Shard(0, 80, 2 * rank, 2 * rank + 2))
    return Claim(key, bytes(20), 256 * number, 256 * (number + 1))


def are_held_back(
    one: PutPolicy, ranks: int, number: int = 1, namespace: str = NAMESPACE
) -> set[bool]:
    """Whether the payloads of a chunk are held back."""
    return {
        one.holds_back(claim_of(number, rank, namespace), 4 * NBYTES // ranks)
        for rank in range(ranks)
    }


def measured(gpu_us: int = GPU_US, tokens: int = 256, namespace: str = NAMESPACE) -> Savings:
    return Savings(namespace, "2026-11", 1, tokens, tokens, gpu_us, 1000)


@pytest.mark.parametrize(("ranks", "holds_back"), [(4, True), (1, False)])
def test_each_put_that_a_chunk_takes_counts(
    clock: ManualClock, ranks: int, holds_back: bool
) -> None:
    one = policy(clock)
    one.credited(measured())
    assert are_held_back(one, ranks) == are_held_back(one, ranks, 2) == {True}, "others may follow"
    clock.advance(SETTLED_S)
    assert are_held_back(one, ranks) == {holds_back}
    (decision,) = one.decisions().values()
    assert decision.break_even == pytest.approx(0.50 if ranks == 4 else 0.24, abs=0.01)


def test_namespaces_are_decided_apart_and_each_change_is_logged(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = policy(clock)
    for namespace in (NAMESPACE, TWO):
        are_held_back(one, 1, namespace=namespace)
    clock.advance(SETTLED_S)
    assert are_held_back(one, 1) == are_held_back(one, 1, namespace=TWO) == {True}, (
        "no time is known"
    )
    assert [found.puts for found in one.decisions().values()] == ["reused"] * 2
    for _ in range(9):
        one.credited(measured(2 * GPU_US))
    assert are_held_back(one, 1) == {False}
    assert are_held_back(one, 1, namespace=TWO) == {True}
    for _ in range(9):
        one.credited(measured(4 * GPU_US // 5))
        are_held_back(one, 1)
    assert one.decisions()[NAMESPACE].puts == "all", "between the limits"
    for _ in range(9):
        one.credited(measured(GPU_US // 2))
    assert are_held_back(one, 1) == {True}
    assert len(caplog.messages) == 4
    assert "all: to pay, 0.12 of the chunks must be read again" in caplog.messages[2]
    assert "reused: to pay, 0.48" in caplog.messages[3]
    assert "S3 Standard" in caplog.messages[3]


def test_what_a_client_claims_to_have_measured_is_bounded(clock: ManualClock) -> None:
    one = policy(clock)
    for number in range(1000):
        one.credited(measured(namespace=f"{number:032x}"))
        are_held_back(one, 1, namespace=f"{number:032x}")
    for bad in (measured(-1), measured(0), measured(tokens=-1), measured(tokens=0)):
        one.credited(bad)
    clock.advance(SETTLED_S)
    for number in range(940, 1000):
        are_held_back(one, 1, namespace=f"{number:032x}")
    assert 0 < len(one.decisions()) <= 64


def test_a_call_of_a_replica_reaches_the_policy_and_the_index(clock: ManualClock) -> None:
    one, index = policy(clock), MemoryIndex()
    calls = NodeCalls(index, MemoryStore(), None, one, ttl_s=60)
    calls.run(json.dumps({"verb": "credit", "savings": asdict(measured(9 * GPU_US))}))
    are_held_back(one, 4)
    clock.advance(SETTLED_S)
    assert are_held_back(one, 4) == {False}
    assert index.savings() == [measured(9 * GPU_US)]


def test_a_node_puts_all_once_it_pays_and_holds_back_again_once_it_does_not(
    make: Make, clock: ManualClock
) -> None:
    node, made = make(policy=policy(clock)), payloads()
    assert node.commit(made[:1]) == [CommitStatus.HELD_BACK]
    assert node.held == set(paths(made[:1]))
    clock.advance(SETTLED_S)
    node.saves.policy.credited(measured(10**9))
    node.commit(made[1:2])
    assert node.stored == set(paths(made[1:2]))
    node.again(made[:1])
    assert node.stored == set(paths(made[:2])), "what was held back is put when it is made again"
    for _ in range(9):
        node.saves.policy.credited(measured(1))
    node.commit(made[2:])
    assert node.held == set(paths(made[2:]))
    assert node.saves.drain(PATIENCE_S)
