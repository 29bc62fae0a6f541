"""The states of payloads, against a model with several clients."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from objkv.agent import arena_cache as module
from objkv.agent.arena_cache import NO_ORIGIN, ArenaCache, CachedPayload
from objkv.agent.memory.arena import PAGE, Arena, CellState
from objkv.agent.messages import MissReason
from objkv.agent.ranking import Ranking
from objkv.codec.payload import Claim
from objkv.index.base import ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard
from objkv.telemetry import MemoryRecorder
from tests.agent.consistency import is_consistent
from tests.agent.world import Sleeper
from tests.support.waiting import wait_until

PAGES = 20
CLAIMS = {
    (key := ChunkKey("0" * 32, bytes([number]) * 20, 0, Shard(0, 2, 0, 2))).path(): Claim(
        key, bytes([number - 1]) * 20, 16 * number - 16, 16 * number
    )
    for number in range(1, 7)
}
KEYS = list(CLAIMS)
RECORD = ShardRecord(PAGE, PAGE, True, False, "unsaved:", 1)


@dataclass(eq=False)
class Fill:
    """A payload that the model knows of."""

    one: CachedPayload
    pattern: int
    holders: list[Sleeper] = field(default_factory=list)
    nbytes: int = 0
    is_filling: bool = True
    is_announced: bool = False
    is_reserved: bool = False


class ArenaCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena.create(PAGES * PAGE)
        self.arena_cache = ArenaCache(self.arena, MemoryRecorder())
        self.clients = [Sleeper(), Sleeper()]
        self.listed: dict[str, Fill] = {}
        self.all: list[Fill] = []
        self.patterns = 0

    def teardown(self) -> None:
        self.arena.close()

    @rule(key=st.sampled_from(KEYS), number=st.integers(0, 1), ahead=st.booleans())
    def open(self, key: str, number: int, ahead: bool) -> None:
        client = self.clients[number]
        opened = self.arena_cache.open(key, NO_ORIGIN, client, ahead=ahead)
        assert not isinstance(opened, MissReason)
        one, is_new = opened
        known = self.listed.get(key)
        if known is not None and known.is_filling:
            assert not is_new
        if is_new:  # never there, evicted, failed or forgotten
            assert known is None or not known.holders
            if known is not None:
                self.all.remove(known)
            known = self.listed[key] = Fill(one, self.next_pattern())
            self.all.append(known)
        assert known is not None
        assert known.one is one
        known.holders.append(client)

    def next_pattern(self) -> int:
        self.patterns = self.patterns % 250 + 1
        return self.patterns

    @rule(key=st.sampled_from(KEYS), pages=st.integers(1, PAGES // 4))
    def reserve(self, key: str, pages: int) -> None:
        one = self.arena_cache.reserve(key, nbytes := pages * PAGE - 5)
        if one is not None:
            fill = Fill(one, self.next_pattern(), [Sleeper()], nbytes, False, is_reserved=True)
            self.arena_cache.view(one)[:] = bytes([fill.pattern]) * nbytes
            self.all.append(fill)

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        reserved = [fill for fill in self.all if fill.is_reserved]
        if not reserved:
            return
        fill = data.draw(st.sampled_from(reserved))
        one, is_own = self.arena_cache.adopt(fill.one, NO_ORIGIN, 0)
        fill.is_reserved, known = False, self.listed.get(one.key)
        if is_own:  # never there, evicted, failed or forgotten
            assert one is fill.one
            if known is not None:
                assert not known.is_filling
                assert not known.holders
                self.all.remove(known)
            self.listed[one.key] = fill
        else:
            assert known is not None
            assert known.one is one
            known.holders.append(Sleeper())
            self.all.remove(fill)

    def some(self, data: st.DataObject, *, filling: bool, placed: bool | None) -> Fill | None:
        found = [
            fill
            for fill in self.all
            if fill.is_filling == filling and placed in (None, fill.nbytes > 0)
        ]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data(), pages=st.integers(1, PAGES // 4))
    def allot(self, data: st.DataObject, pages: int) -> None:
        fill = self.some(data, filling=True, placed=False)
        if fill is None:
            return
        nbytes = pages * PAGE - 5
        memory = self.arena_cache.allocate(fill.one, nbytes)
        if memory is not None:
            fill.nbytes = nbytes
            memory[:] = bytes([fill.pattern]) * nbytes
        else:
            held = sum(-(-one.nbytes // PAGE) for one in self.all if one.is_filling or one.holders)
            assert held > 0 or pages > PAGES

    @rule(data=st.data(), frames=st.integers(1, 3))
    def advance(self, data: st.DataObject, frames: int) -> None:
        if (fill := self.some(data, filling=True, placed=True)) is not None:
            before = [client.woken for client in self.clients]
            self.arena_cache.advance(fill.one, frames)
            fill.is_announced = True
            for client, woken in zip(self.clients, before, strict=True):
                if client in fill.holders:
                    assert client.woken > woken

    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        fill = self.some(data, filling=True, placed=None)
        if fill is not None and not fill.is_announced:
            self.arena_cache.deallocate(fill.one)
            fill.nbytes = 0

    @rule(key=st.sampled_from(KEYS))
    def hold(self, key: str) -> None:
        one, fill = self.arena_cache.lease_ready(key), self.listed.get(key)
        if one is None:  # filling, evicted, or never there
            assert fill is None or fill.is_filling or not fill.holders
        else:
            assert not isinstance(fill, MissReason)
            assert fill.one is one
            fill.holders.append(Sleeper())

    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        if (fill := self.some(data, filling=True, placed=True)) is not None:
            self.arena_cache.ready(fill.one, 3)
            fill.is_filling = False
            if fill not in self.listed.values():
                self.unlist(fill)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if (fill := self.some(data, filling=True, placed=None)) is not None:
            self.arena_cache.failed(fill.one, MissReason.STORE, 1)
            fill.is_filling = False
            self.unlist(fill)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [fill for fill in self.all if fill.holders]
        if held:
            fill = data.draw(st.sampled_from(held))
            client = fill.holders.pop(0)
            self.arena_cache.release(fill.one, None if client in fill.holders else client)
            if not fill.holders and not fill.is_filling and fill not in self.listed.values():
                self.all.remove(fill)

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key: str) -> None:
        self.arena_cache.forget(key)
        fill = self.listed.get(key)
        if fill is not None:
            self.unlist(fill)

    @rule(data=st.data(), is_due=st.booleans())
    def note_held(self, data: st.DataObject, is_due: bool) -> None:
        fill = self.some(data, filling=False, placed=True)
        if fill is not None and fill.holders and fill.one.state is CellState.READY:
            self.arena_cache.add_held_back(fill.one, CLAIMS[fill.one.key], RECORD, is_due=is_due)
            assert (fill.one.key in self.arena_cache.held_back) >= (fill in self.listed.values())

    @rule(saves=st.booleans())
    def save_due(self, saves: bool) -> None:
        held = self.arena_cache.held_back
        while (claim := held.pop_due()) is not None:
            one = self.arena_cache.lease_ready(claim.key.path())
            assert (one is not None) == (claim.key.path() in held)
            if one is not None:
                (held.saved if saves else held.not_saved)(one.key)
                self.arena_cache.release(one)

    def unlist(self, fill: Fill) -> None:
        for key in [key for key, one in self.listed.items() if one is fill]:
            del self.listed[key]
        if not fill.holders and not fill.is_filling and fill in self.all:
            self.all.remove(fill)

    @invariant()
    def adds_up(self) -> None:
        assert is_consistent(self.arena_cache)
        assert self.arena_cache.leased() == sum(f.is_filling or bool(f.holders) for f in self.all)

    @invariant()
    def memory_under_a_lease_is_nobody_elses(self) -> None:
        for fill in self.all:
            if fill.nbytes and (fill.is_filling or fill.holders):
                memory = bytes(self.arena_cache.view(fill.one))
                assert memory == bytes([fill.pattern]) * fill.nbytes

    @invariant()
    def the_board_says_what_became_of_it(self) -> None:
        for fill in self.all:
            if not fill.holders:
                continue
            if fill.one.cell < 0:
                assert not fill.is_filling
                continue
            progress = self.arena.board.read(fill.one.cell)
            if fill.is_filling:
                assert progress.state is CellState.FILLING
            elif fill in self.listed.values():
                assert progress.state is CellState.READY
                assert (progress.offset, progress.nbytes) == (fill.one.offset, fill.nbytes)


TestResidents = ArenaCacheMachine.TestCase
TestResidents.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena.create(12 * PAGE)) as arena:
        yield arena


def opened(arena_cache: ArenaCache, key: str) -> tuple[CachedPayload, bool]:
    found = arena_cache.open(key, NO_ORIGIN, Sleeper())
    assert not isinstance(found, MissReason)
    return found


def filled(arena_cache: ArenaCache, key: str, pages: int = 1) -> CachedPayload:
    one, is_new = opened(arena_cache, key)
    assert is_new
    assert arena_cache.allocate(one, pages * PAGE) is not None
    arena_cache.ready(one, 1)
    return one


def test_neighbours_make_room_where_single_gaps_do_not(arena: Arena) -> None:
    arena_cache = ArenaCache(arena, MemoryRecorder())
    for number in range(12):
        one = filled(arena_cache, str(number))
        if number not in (3, 6, 9):
            arena_cache.release(one)
    large = opened(arena_cache, "large")
    assert arena_cache.allocate(large[0], 3 * PAGE) is not None
    assert arena_cache.contains_ready("369") == [True] * 3
    small = opened(arena_cache, "small")
    assert arena_cache.allocate(small[0], 3 * PAGE) is None, "the pages between are leased"
    assert arena_cache.allocate(small[0], 2 * PAGE) is not None
    assert is_consistent(arena_cache)


def test_only_payloads_that_somebody_may_wait_for_need_a_cell(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CELLS", 2)
    arena_cache = ArenaCache(arena, MemoryRecorder())
    assert not arena_cache.leased()
    for key in "abcd":
        arena_cache.release(filled(arena_cache, key))
    assert arena_cache.contains_ready("abcd") == [True] * 4
    again = opened(arena_cache, "b")
    assert (again[0].cell, again[1]) == (-1, False)
    leased, filling = filled(arena_cache, "e"), opened(arena_cache, "f")
    more = arena_cache.open("g", NO_ORIGIN, Sleeper())
    assert more is MissReason.NO_ROOM, "e has been leased since it was filled"
    assert opened(arena_cache, "f") == (filling[0], False)
    arena_cache.release(leased)
    opened(arena_cache, "g")
    assert arena_cache.leased()
    assert is_consistent(arena_cache)


def test_a_full_arena_is_not_searched(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    arena_cache = ArenaCache(arena, MemoryRecorder())
    ones = [filled(arena_cache, str(number), pages=3) for number in range(4)]
    fill = opened(arena_cache, "more")
    searched: list[object] = []
    victim = arena_cache._ranking.victim
    monkeypatch.setattr(
        arena_cache._ranking, "victim", lambda is_free: searched.append(1) or victim(is_free)
    )
    assert arena_cache.allocate(fill[0], PAGE) is None
    assert not searched
    for one in ones[2:]:
        arena_cache.release(one)
    assert arena_cache.allocate(fill[0], 3 * PAGE + 1) is None, "a payload larger than a quarter"
    assert arena_cache.contains_ready("23") == [True, True]
    assert arena_cache.allocate(fill[0], 3 * PAGE) is not None
    assert is_consistent(arena_cache)


def test_pages_come_ahead_of_what_payloads_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("objkv.agent.memory.arena.AHEAD_BYTES", (2 * PAGE, 4 * PAGE))
    with closing(Arena.create(64 * PAGE)) as arena:
        arena_cache = ArenaCache(arena, MemoryRecorder())
        assert arena_cache.reserve("a", 8 * PAGE) is not None
        # Nothing was written: two of the first pages may exist, and four after the payload.
        wait_until(lambda: os.fstat(arena.fd).st_blocks * 512 // PAGE >= 4)
        arena_cache.close()


# The order in which payloads are evicted.


ROOM = 100


def full(*keys: str) -> Ranking:
    ranking = Ranking(ROOM)
    for key in keys:
        ranking.add(key, ROOM // len(keys))
    return ranking


def evicted(ranking: Ranking, is_free: Callable[[str], bool] = lambda _: True) -> str | None:
    key = ranking.victim(is_free)
    if key is not None:
        ranking.remove(key)
    return key


def test_unread_payloads_go_first_in_their_order() -> None:
    ranking = full("a", "b", "c", "d")
    ranking.use("a")
    assert [evicted(ranking) for _ in range(2)] == ["b", "c"]
    assert {evicted(ranking), evicted(ranking)} == {"a", "d"}
    assert evicted(ranking) is None


def read(ranking: Ranking) -> None:
    ranking.use("a")


def comes_back(ranking: Ranking, **more: bool) -> None:
    assert evicted(ranking) == "a"
    ranking.add("a", 25, **more)


def comes_back_prefetched(ranking: Ranking) -> None:
    comes_back(ranking, is_unread=True)  # it was evicted before, which alone is no merit


def comes_back_never_read(ranking: Ranking) -> None:
    ranking.remove("a", was_read=False)
    ranking.add("a", 25)


@pytest.mark.parametrize(
    ("happens", "stays"),
    [
        (read, True),
        (comes_back, True),
        (comes_back_prefetched, False),
        (comes_back_never_read, False),
    ],
)
def test_a_scan_leaves_what_has_proved_itself(
    happens: Callable[[Ranking], None], stays: bool
) -> None:
    ranking = full("a", "b", "c", "d")
    happens(ranking)
    for number in range(20):
        evicted(ranking)
        ranking.add(f"scan-{number}", 25)
    assert ("a" in ranking) == stays
