"""Payloads that are fetched, verified and decoded into the arena."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Event
from time import monotonic
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.agent import core, fill
from objkv.agent.arena_cache import CachedPayload
from objkv.agent.core import FoundRecords
from objkv.agent.fill import PartPolicy, PayloadRequest
from objkv.agent.memory.arena import ALL_FRAMES, CellState, Progress
from objkv.agent.messages import CommitStatus, MissReason, Urgency
from objkv.cache.bulk_index import BulkIndex
from objkv.cache.chunks import shard_record
from objkv.cache.lookup import LOOKUP_TTL_S
from objkv.codec.payload import encode, frame_pages, read_header
from objkv.codec.seal import Seal
from objkv.errors import StoreUnavailable, TransferError
from objkv.index.base import ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.net.deadline import ends_s
from objkv.stores.base import Arrived
from tests.agent import world
from tests.agent.consistency import threads_of
from tests.agent.world import PATIENCE_S, RIGHT, Make, Node, Sleeper, down, gated, payloads, raising
from tests.codec.seals import SEALS
from tests.contracts.clock import ManualClock
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import NAMESPACE, TOKENS
from tests.support.steps import complete
from tests.support.waiting import wait_until


def settled(one: CachedPayload | MissReason) -> CachedPayload:
    assert isinstance(one, CachedPayload)
    wait_until(lambda: one.state is not CellState.FILLING)
    return one


def fetch(
    node: Node, *wanted: PayloadRequest, deadline_s: float = PATIENCE_S
) -> list[CachedPayload]:
    return [settled(one) for one in node.open(*wanted, deadline_s=deadline_s)]


def right(node: Node, one: CachedPayload) -> bool:
    progress = Progress(one.state, ALL_FRAMES, one.offset, one.nbytes, one.reason)
    if one.cell >= 0:  # the board is written after the payload's own state
        wait_until(lambda: node.arena.board.read(one.cell).state is not CellState.FILLING)
        progress = node.arena.board.read(one.cell)
    assert progress.state is CellState.READY
    return world.pages_at(node.arena.view, progress) == RIGHT


@pytest.mark.parametrize("seal", [None, *SEALS.values()])
def test_payloads_of_a_folder_that_is_its_index_are_as_long_as_their_files(
    seal: Seal | None, make: Make
) -> None:
    store = MemoryStore()
    node = make(store=store, index=BulkIndex(store), seal=seal)
    for payload, claim in zip(payloads(), world.claims_in(payloads()), strict=True):
        assert node.commit_one(payload) is CommitStatus.ACCEPTED
        key = claim.key
        assert node.saves.drain(PATIENCE_S)
        node.arena_cache.forget(key.path())
        (found,) = node.index.find(NAMESPACE, [key.prefix_hash], [key.field])
        assert found is not None
        (one,) = fetch(node, PayloadRequest(claim, found[key.field]))
        assert right(node, one)
        assert store.head(key.path()) is not None


@pytest.mark.parametrize("codec", ["none", "blosc"])
def test_payloads_need_not_be_of_the_shape_of_the_last_one(codec: str, make: Make) -> None:
    """One has a longer header. One whose record promises other pages than it has is refused."""
    node = make(threads=1)
    first, second, third = node.save(codec=codec)
    found = read_header(node.store.get(second.claim.key.path()) or b"")
    provenance = replace(found.provenance, tokens=tuple(range(1000, 3000)))
    longer = encode(first.claim, found.frames.layers, RIGHT, codec=codec, provenance=provenance)  # type: ignore[arg-type]
    node.store.put(first.claim.key.path(), longer)
    first = PayloadRequest(first.claim, shard_record(read_header(longer)))
    lie = replace(third.record, raw_bytes=third.record.raw_bytes + 8192)
    for wanted in (second, first, PayloadRequest(third.claim, lie), second):
        (one,) = fetch(node, wanted)
        assert right(node, one) if wanted.record is not lie else one.reason is MissReason.CORRUPT
        node.arena_cache.release(one)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["none", "blosc"]))
def test_no_changed_byte_is_served(data: st.DataObject, codec: str) -> None:
    node = Node()
    try:
        wanted = node.save(codec=codec)[0]
        key = wanted.claim.key
        stored = bytearray(node.store.get(key.path()) or b"")
        change = data.draw(st.sampled_from(["flip", "cut", "grow"]))
        # Most of a small payload is its header.
        end = len(stored) - 1
        at = data.draw(st.one_of(st.integers(0, end), st.integers(end - 16, end)))
        if change == "flip":
            stored[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "cut":
            del stored[at:]
        else:
            stored += b"x" * (at + 1)
        node.store.put(key.path(), bytes(stored))
        (one,) = fetch(node, wanted)
        assert (one.state, one.reason) == (CellState.FAILED, MissReason.CORRUPT)
        assert node.index.find(NAMESPACE, [key.prefix_hash], (key.field,)) == [None]
        node.arena_cache.release(one)
        wait_until(lambda: not node.arena_cache.leased())
    finally:
        node.close()


@pytest.mark.parametrize("codec", ["none", "blosc"])
@pytest.mark.parametrize("wrong", ["missing", "of another chunk", "longer, as its record says"])
def test_a_payload_that_is_not_the_one_is_a_miss_and_its_record_goes(
    wrong: str, codec: str, make: Make
) -> None:
    node = make()
    one, other, _ = node.save(codec=codec)
    path, record = one.claim.key.path(), one.record
    if wrong == "missing":
        node.store.delete(path)
    elif wrong == "of another chunk":
        node.store.put(path, node.store.get(other.claim.key.path()) or b"")
    else:
        node.store.put(path, (node.store.get(path) or b"") + b"more")
        record = replace(record, nbytes=record.nbytes + 4)
    (found,) = fetch(node, PayloadRequest(one.claim, record))
    assert found.reason is (MissReason.MISSING if wrong == "missing" else MissReason.CORRUPT)
    key = one.claim.key
    is_forgotten = node.index.find(NAMESPACE, [key.prefix_hash], (key.field,)) == [None]
    assert is_forgotten == (record == one.record), "not one that was written since"


class Trickle(MemoryStore):
    """Delivers a payload in pieces, each only after the last was reported."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        value = self.get(key)
        assert value is not None
        buffer[:] = b"\xee" * len(buffer)
        for end in (*range(self._step, len(value), self._step), len(value)):
            buffer[:end] = value[:end]
            if arrived is not None:
                arrived(end)
        return len(value)


@pytest.mark.parametrize("codec", ["none", "blosc"])
@pytest.mark.parametrize("step", [1, 7, 600, 4096, 100_000])
def test_a_frame_is_announced_when_its_bytes_are_final(
    step: int, codec: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(store=Trickle(step))
    announced, advance = list[int](), node.arena_cache.advance

    def watched(one: CachedPayload, frames: int) -> None:
        payload = node.arena_cache.view(one)
        header = read_header(payload)
        for number in range(frames):
            assert frame_pages(header, number, payload, None) == RIGHT[number]
        announced.append(frames)
        advance(one, frames)

    monkeypatch.setattr(node.arena_cache, "advance", watched)
    (one,) = fetch(node, node.save(codec=codec)[0])
    assert right(node, one)
    assert announced[-1] == 2


def test_all_who_ask_at_the_same_moment_share_one_fetch(make: Make) -> None:
    node = make(threads=4)
    wanted, gate = node.save(), gated(node)
    every = [node.open(*wanted) for _ in range(8)]
    gate.set()
    assert all(some == every[0] for some in every)
    found = [settled(one) for some in every for one in some]
    assert len(found) == 24
    assert all(right(node, one) for one in found)
    assert set(node.store.gets.values()) == {1}
    assert len(node.store.gets) == 3
    assert node.recorder.value("load_bytes") == sum(one.record.nbytes for one in wanted)
    assert (node.recorder.value("agent_fills"), node.recorder.value("agent_hits")) == (3, 21)
    for one in found:
        node.arena_cache.release(one)
    assert node.arena_cache.leased() == 0


class Slow:
    """A node with a long prompt, whose store answers nothing until ``gate`` is set."""

    def __init__(self, node: Node) -> None:
        self.node, self.gate = node, Event()
        self.wanted = node.save(list(range(1000, 1000 + 16 * 12)))
        self._names = {one.claim.key.path(): n for n, one in enumerate(self.wanted)}
        self.order: list[int] = []
        node.store.on_get = self._on_get

    def _on_get(self, key: str) -> None:
        self.order.append(self._names[key])
        assert self.gate.wait(PATIENCE_S)

    def open(
        self,
        numbers: range,
        urgency: Urgency,
        priority: int = 0,
        *,
        client: Sleeper | None = None,
        deadline_s: float = PATIENCE_S,
    ) -> Sequence[CachedPayload | MissReason]:
        self.node.found(*self.wanted)
        return self.node.core.open(
            client or Sleeper(),
            world.claims_of([self.wanted[number] for number in numbers]),
            deadline_s=deadline_s,
            urgency=urgency,
            priority=priority,
        )

    def end(self, count: int) -> list[int]:
        """Let the store answer. The order of all payloads, which are so many."""
        self.gate.set()
        wait_until(lambda: len(self.order) == count)
        return self.order


def test_urgent_payloads_go_first_and_clients_take_turns(make: Make) -> None:
    slow, modest = Slow(make(threads=1)), Sleeper()
    slow.open(range(6), Urgency.BETWEEN_STEPS)
    wait_until(lambda: len(slow.order) == 1)
    slow.open(range(6, 8), Urgency.BETWEEN_STEPS, client=modest)
    slow.open(range(8, 9), Urgency.PREFETCH, client=modest)
    slow.open(range(9, 10), Urgency.IN_STEP, client=modest)
    order = slow.end(10)
    assert order[:2] == [0, 9]
    assert order[-1] == 8
    assert max(order.index(6), order.index(7)) < order.index(4)


def test_a_request_hastens_what_is_being_prefetched_for_it(make: Make) -> None:
    slow = Slow(make(threads=1))
    slow.open(range(4), Urgency.PREFETCH)
    ahead = slow.open(range(4, 6), Urgency.PREFETCH, deadline_s=0.001)
    wait_until(lambda: len(slow.order) == 1)
    slow.open(range(6, 8), Urgency.BETWEEN_STEPS)
    slow.open(range(4, 6), Urgency.IN_STEP)
    slow.open(range(5, 6), Urgency.PREFETCH, -5)  # it stays where it is
    assert slow.end(8) == [0, 4, 5, 6, 7, 1, 2, 3]
    for one in ahead:
        assert right(slow.node, settled(one)), "the later deadline counts"


def test_prefetches_have_priorities(make: Make) -> None:
    slow = Slow(make(threads=1))
    slow.open(range(3), Urgency.PREFETCH, 5)
    wait_until(lambda: len(slow.order) == 1)
    slow.open(range(3, 5), Urgency.PREFETCH)
    slow.open(range(5, 7), Urgency.PREFETCH, -1)
    slow.open(range(2, 3), Urgency.PREFETCH, -2)
    assert slow.end(7) == [0, 2, 5, 6, 3, 4, 1]


def test_a_load_finds_a_thread_while_much_is_being_prefetched(make: Make) -> None:
    slow = Slow(make(threads=4))
    slow.open(range(8), Urgency.PREFETCH)
    wait_until(lambda: len(slow.order) == 3)
    slow.open(range(8, 9), Urgency.BETWEEN_STEPS)
    wait_until(lambda: 8 in slow.order)
    assert sorted(slow.order) == [0, 1, 2, 8]
    slow.end(9)


def test_a_long_prefetch_lets_other_clients_go_on_meanwhile(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make()
    wanted, counts = node.save() * 20, list[int]()
    enter, begin = threading.Condition.__enter__, node.arena_cache.open

    def entered(lock: threading.Condition) -> bool:
        if threading.current_thread() is threading.main_thread():
            counts.append(0)
        return enter(lock)

    def opened(*given: Any, **named: Any) -> Any:
        counts[-1] += 1
        return begin(*given, **named)

    monkeypatch.setattr(threading.Condition, "__enter__", entered)
    monkeypatch.setattr(node.arena_cache, "open", opened)
    taken = node.open(*wanted, urgency=Urgency.PREFETCH)
    monkeypatch.undo()
    assert sum(counts) == len(wanted) == len(taken)
    assert max(counts) <= 8, "payloads under one hold of the lock"


@pytest.mark.parametrize("error", [StoreUnavailable("down"), KeyError("a bug")])
def test_a_late_payload_is_late_and_a_broken_store_is_a_miss(error: Exception, make: Make) -> None:
    node = make(threads=1)
    first, second, _ = node.save()
    (late,) = fetch(node, first, deadline_s=0.0)
    assert late.reason is MissReason.LATE

    node.store.on_get = raising(error)
    (failed,) = node.open(second)
    wait_until(lambda: failed.state is not CellState.FILLING or not threads_of(node.core))
    assert threads_of(node.core)
    assert failed.reason is MissReason.STORE
    until = list[float]()
    node.store.on_get = lambda key: until.append(ends_s())
    (again,) = fetch(node, second)
    assert right(node, again)
    assert until[0] <= again.deadline  # the store knows how long it may take


def test_a_full_queue_and_a_full_arena_are_misses(make: Make) -> None:
    node = make(memory=4 * 8192, queue_max=1000)
    ones = fetch(node, *node.save(range(16 * 5)))
    assert [one.reason for one in ones].count(MissReason.NO_ROOM) == 1
    for one in ones:
        node.arena_cache.release(one)
    (again,) = fetch(node, node.save()[0])
    assert right(node, again)
    none = make(queue_max=0)
    (refused,) = fetch(none, none.save()[0])
    assert refused.reason is MissReason.NO_ROOM


def test_closing_fails_what_waits(make: Make) -> None:
    node = make(threads=1)
    gate = gated(node)
    opened = node.open(*node.save())
    wait_until(lambda: bool(node.store.gets))  # type: ignore[attr-defined]
    assert not node.core.close(0.0)
    gate.set()
    assert node.core.close(PATIENCE_S)
    reasons = [settled(one).reason for one in opened]
    assert sorted(reasons) == [MissReason.NONE, MissReason.CLOSED, MissReason.CLOSED]


def test_a_load_tells_how_fast_bulk_is_but_not_if_it_may_have_come_from_hot(make: Make) -> None:
    node = make()
    bulk, hot, _ = node.save()
    fetch(node, bulk, replace(hot, record=replace(hot.record, hot=True)))
    assert node.cache.link.gets.count == 1


def test_when_all_threads_are_late_nothing_more_is_queued(make: Make) -> None:
    node = make(threads=1)
    wanted = node.save(TOKENS)
    gate = gated(node)
    node.open(wanted[0], deadline_s=1.0)
    wait_until(lambda: node.core._is_stuck())
    claims = world.claims_of(wanted[:2])  # the one that hangs, and another
    for found in node.core.open(
        Sleeper(), claims, deadline_s=PATIENCE_S, urgency=Urgency.BETWEEN_STEPS
    ):
        failed = isinstance(found, CachedPayload) and found.state is CellState.FAILED
        assert failed or found is MissReason.NO_ROOM
    gate.set()
    wait_until(lambda: not node.core._is_stuck())


def test_loads_between_steps_do_not_starve_behind_endless_ones_within(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_OVERDUE_SHARE", 0.0)  # they are overdue at once
    slow = Slow(make(threads=1))
    slow.open(range(1), Urgency.IN_STEP)
    wait_until(lambda: len(slow.order) == 1)
    slow.open(range(1, 2), Urgency.IN_STEP)
    slow.open(range(2, 3), Urgency.BETWEEN_STEPS)
    assert slow.end(3) == [0, 2, 1]


@pytest.mark.parametrize("codec", ["none", "blosc"])
def test_first_parts_of_all_come_before_the_second_of_any(
    codec: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill, "_HEADER_BYTES", 2048)  # these payloads are small
    node = make(threads=1)
    wanted = node.save(TOKENS, codec=codec)
    node.core._limits = replace(node.core._limits, part_policy=PartPolicy(2, 1))
    starts = list[int]()
    gate, get = gated(node), node.cache.get_into

    def watched(key: ChunkKey, buffer: memoryview, arrived: Arrived, start: int | None) -> Any:
        starts.append(start or 0)
        return get(key, buffer, arrived, start)

    monkeypatch.setattr(node.cache, "get_into", watched)
    ones = node.open(*wanted, urgency=Urgency.IN_STEP)
    gate.set()
    assert all(right(node, settled(one)) for one in ones)
    assert [start > 0 for start in starts] == [False] * 3 + [True] * 3


RECORD = ShardRecord(1, 2, True, False, "", 3)


def key(number: int, field: str = "0") -> ChunkKey:
    return ChunkKey.of(NAMESPACE, bytes([number]) * 20, field)


def test_answers_for_several_replicas_are_kept_each_for_a_while() -> None:
    clock = ManualClock()
    found, chunk, later = FoundRecords(clock=clock), key(1).prefix_hash, replace(RECORD, nbytes=5)
    found.add(NAMESPACE, [(chunk, {"0": RECORD})])
    clock.advance(LOOKUP_TTL_S / 2)
    found.add(NAMESPACE, [(chunk, {"1": RECORD})])  # another group of the chunk
    found.add("b" * 32, [(chunk, {"0": later})])  # a tier's chunk has the same hash for all models
    assert (found.of(key(1)), found.of(key(1, "1"))) == (RECORD, RECORD)
    assert found.of(ChunkKey.of("b" * 32, chunk, "0")) == later
    clock.advance(LOOKUP_TTL_S / 2)
    assert (found.of(key(1)), found.of(key(1, "1"))) == (None, RECORD)
    for number in range(20):
        found.add(f"{number:032x}", [(chunk, {"0": RECORD})])
    assert found.of(key(1, "1")) is None
    assert found.of(ChunkKey.of(f"{19:032x}", chunk, "0")) == RECORD


def test_a_load_needs_no_index_after_a_lookup_and_else_looks_its_record_up(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second, third), client = node.save(), node.connect()
    assert [one.state for one in world.loaded(client, [first])] == [CellState.READY]
    complete(client.find(NAMESPACE, [second.claim.key.prefix_hash], ("0",)))
    monkeypatch.setattr(node.index, "find", down)
    assert [one.state for one in world.loaded(client, [second])] == [CellState.READY]
    assert [one.reason for one in world.loaded(client, [third])] == [MissReason.STORE]


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_record_that_has_changed_is_not_used_again(node: Node, is_asked: bool) -> None:
    """Whether it was looked up, or is being looked up."""
    one, client, find = node.save()[0], node.connect(), node.index.find
    hashes = [one.claim.key.prefix_hash]

    def changing(*asked: Any) -> Any:
        found = find(*asked)
        node.core.record_changed(hashes[0])
        return found

    if is_asked:
        node.index.find = changing  # type: ignore[method-assign]
    assert complete(client.find(NAMESPACE, hashes, ("0",))) != [None]
    if not is_asked:
        assert node.core.found.of(one.claim.key) == one.record
        client.reject(one.claim)
        assert complete(client.find(NAMESPACE, hashes, ("0",))) == [None]
    assert node.core.found.of(one.claim.key) is None


# Payloads without a client, and those that another client still waits for.


class SlowStore(MemoryStore):
    """Gives the first bytes of a payload, and the rest when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = Event(), Event()
        self.gets = 0

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        self.gets += 1
        assert arrived is not None
        arrived(0)
        self.begun.set()
        while not self.go.wait(0.005):
            arrived(0)
        return super().get_into(key, buffer, arrived, start)


@pytest.fixture
def slow(make: Make) -> Iterator[Node]:
    """A node whose store is slow."""
    node = make(store=SlowStore(), threads=1)
    yield node
    node.store.go.set()
    assert node.core.close(PATIENCE_S)
    assert node.arena_cache.leased() == 0


def test_a_fetch_that_nobody_wants_any_more_leaves_its_thread(slow: Node) -> None:
    first, second, third = slow.save(TOKENS)
    (one,) = slow.open(first)
    assert slow.store.begun.wait(PATIENCE_S)
    (queued,) = slow.open(second)
    for gone in (one, queued):
        slow.arena_cache.release(gone)
    assert settled(one).state is CellState.FAILED
    slow.store.go.set()
    (other,) = slow.open(third)
    assert settled(other).state is CellState.READY
    assert slow.store.gets == 2, "the queued one is not fetched"
    slow.arena_cache.release(other)
    assert slow.recorder.value("load_errors") == 0


def test_queued_payloads_that_nobody_wants_make_room_for_others(slow: Node) -> None:
    slow.core._limits = replace(slow.core._limits, queue_max=2)
    busy, *abandoned, fourth, fifth = slow.save(list(range(100, 100 + 16 * 5)))
    (one,) = slow.open(busy)
    assert slow.store.begun.wait(PATIENCE_S)
    for gone in slow.open(*abandoned):
        slow.arena_cache.release(gone)
    others = slow.open(fourth, fifth)
    slow.store.go.set()
    assert {settled(each).state for each in (one, *others)} == {CellState.READY}
    assert slow.store.gets == 3, "they are not fetched"
    for lease in (one, *others):
        slow.arena_cache.release(lease)


def test_who_came_later_is_not_bound_by_the_first_deadline(
    slow: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load between steps that joins one within a step."""
    wanted = slow.save(TOKENS)[:1]
    slow.store.go.set()
    with monkeypatch.context() as failing:
        failing.setattr(slow.cache, "get_into", raising(TransferError("late")))
        get, ends = world.Paused(slow.cache, "get_into"), monotonic() + 2.0
        first = slow.open(*wanted, deadline_s=2.0)
        assert get.begun.wait(PATIENCE_S)
    second = slow.open(*wanted)
    wait_until(lambda: monotonic() > ends)
    get.go.set()
    assert settled(second[0]).state is CellState.READY
    for lease in (*first, *second):
        slow.arena_cache.release(lease)


# Saves: what becomes of a payload, of its lease and of its memory.


PAYLOAD = payloads()[0]
PATH = read_header(PAYLOAD).claim.key.path()


def save(node: Node) -> None:
    """Have the payload saved, or not; what it had is free again."""
    assert node.commit_one(PAYLOAD) is CommitStatus.ACCEPTED
    assert node.saves.drain(PATIENCE_S)
    assert node.arena_cache.leased() == 0
    is_saved = node.cache.in_flight.is_saved(PATH)
    assert node.index.lease(PATH, "another", ttl_ms=60_000)
    node.index.release(PATH, "another")
    assert is_saved or node.cache.in_flight.begin(PATH)
    node.cache.in_flight.end(PATH)


@pytest.mark.parametrize("publishes", [True, False])
def test_a_save_is_made_under_its_lease_which_its_record_gives_back(
    publishes: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make()
    put, was_leased = node.store.put_if_absent, list[bool]()
    if publishes:
        monkeypatch.setattr(node.cache, "release_lease", lambda key: pytest.fail("a third call"))
    else:
        monkeypatch.setattr(node.index, "publish", down)

    def seen(key: str, value: Any) -> bool:
        was_leased.append(not node.index.lease(key, "another", ttl_ms=60_000))
        return bool(put(key, value))

    node.store.put_if_absent = seen
    save(node)
    assert was_leased == [True]
    assert node.recorder.value("saves") == 1


def test_a_late_save_is_dropped(make: Make) -> None:
    node = make(save_deadline_s=0.0)
    save(node)
    assert node.store.get(PATH) is None
    assert node.recorder.value("save_drops") == 1


@pytest.mark.parametrize("error", [StoreUnavailable("down"), RuntimeError("a bug")])
def test_a_save_that_fails_gives_back_all_that_it_had(error: Exception, make: Make) -> None:
    node = make()
    node.store.put_if_absent = raising(error)
    save(node)
    assert node.recorder.value("save_errors") == 1
