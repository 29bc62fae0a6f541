"""Payloads of which each rank hands over a part: whole or not at all, whatever ranks and replicas
do, and in memory that is bounded and given back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.agent import saves as joins
from objkv.agent.memory.arena import PAGE
from objkv.agent.messages import Commit, CommitStatus, Drop, SavedPart
from objkv.agent.outbox import ClientOutbox
from objkv.cache.chunks import shard_record
from objkv.codec.payload import Claim, Provenance, frame_pages, read_header
from objkv.codec.values import RAW_BYTES_MAX
from objkv.keys.chunk import ChunkKey
from tests.agent.consistency import is_consistent
from tests.agent.world import PATIENCE_S, Desk, Make, Node, making, outbox_of, payloads
from tests.codec.parts import WHOLE, Grid, Piece
from tests.contracts.clock import ManualClock
from tests.support.samples import NAMESPACE
from tests.support.waiting import wait_until

ACCEPTED, DROPPED, PART = CommitStatus.ACCEPTED, CommitStatus.DROPPED, CommitStatus.PART
REFUSED, REPEATED = CommitStatus.REFUSED, CommitStatus.REPEATED
ONE, OTHER = b"1" * 16, b"2" * 16
"""Two replicas."""
GRID = Grid((2, 1))
"""Two stages of two ranks."""


def claim_of(chunk: int) -> Claim:
    return replace(WHOLE, key=ChunkKey(NAMESPACE, bytes([chunk]) * 20, 0))


def pieces_of(chunk: int = 0, seed: int = 0, grid: Grid = GRID) -> list[Piece]:
    """What the ranks of a replica hand over of a chunk. ``seed``: of what they computed."""
    return grid.pieces(claim_of(chunk), seed=seed)


PIECES = pieces_of()
PATH = claim_of(0).key.path()


def hand_over(node: Node, piece: Piece, number: int = 1, replica: bytes = ONE) -> CommitStatus:
    with outbox_of(piece.payload) as outbox:
        part = SavedPart(number, piece.position)
        return node.saves.commit(outbox, Commit(0, len(piece.payload), part=part), replica)


def all_of(
    node: Node, pieces: Sequence[Piece], number: int = 1, replica: bytes = ONE
) -> list[CommitStatus]:
    return [hand_over(node, piece, number, replica) for piece in pieces]


def drop(node: Node, number: int = 1, replica: bytes = ONE, path: str = PATH) -> None:
    node.saves.joins.drop(replica, Drop(number, GRID.parts, path))


def stored(node: Node) -> dict[str, bytes]:
    assert node.saves.drain(PATIENCE_S)
    return {entry.key: bytes(node.store.get(entry.key)) for entry in node.store.scan("")}


def seed_of(payload: bytes, grid: Grid = GRID) -> int:
    """Whose computation a payload is. All of it is."""
    header = read_header(payload)
    assert header.nbytes == len(payload)
    assert header.frames.layers == tuple(grid.layers())
    pages = [bytes(frame_pages(header, n, payload, None)) for n in range(len(header.frames))]
    (seed,) = [
        seed for seed in range(16) if pages == [grid.pages(one, seed) for one in grid.layers()]
    ]
    return seed


def nothing_is_left(node: Node) -> bool:
    """Whether all memory and every save in flight was given back."""
    assert node.saves.drain(PATIENCE_S)
    assert is_consistent(node.arena_cache)
    cache, saves = node.arena_cache, node.saves
    return not (cache.leased() or saves.joins._reserved_bytes or len(node.cache.in_flight))


class JoiningNode(Node):
    """A node that gives everything back."""

    def close(self) -> None:
        assert nothing_is_left(self)
        super().close()


@pytest.fixture
def make() -> Iterator[Make]:
    with making(JoiningNode) as make:
        yield make


@pytest.fixture
def node(make: Make) -> Node:
    return make()


@pytest.fixture
def clock(node: Node) -> ManualClock:
    clock = node.saves.joins._clock = ManualClock(0.0)
    return clock


def is_late(node: Node, clock: ManualClock) -> None:
    clock.advance(PATIENCE_S)
    node.saves.joins.expire()


# Whole or not at all.


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_payload_is_saved_when_its_last_part_has_come(node: Node, order: Sequence[int]) -> None:
    pieces = [PIECES[number] for number in order]
    for piece in pieces[:-1]:
        assert hand_over(node, piece) is PART
        assert not stored(node)
        assert not node.arena_cache.contains_ready([PATH])[0]
        assert node.arena_cache.peek([PATH]) == [None]
    assert hand_over(node, pieces[-1]) is ACCEPTED
    assert stored(node).keys() == {PATH}
    assert seed_of(stored(node)[PATH]) == 0
    assert node.arena_cache.contains_ready([PATH])[0]
    assert not len(node.saves.joins)
    (record,) = node.index.find(NAMESPACE, [claim_of(0).key.prefix_hash], ("0",))
    assert record is not None
    assert record["0"] == shard_record(read_header(stored(node)[PATH]))


@pytest.mark.parametrize("before", range(4))
def test_a_part_that_a_rank_drops_ends_the_payload(node: Node, before: int) -> None:
    assert all_of(node, PIECES[:before]) == [PART] * before
    drop(node)
    assert nothing_is_left(node), "the other parts are not waited for"
    assert all_of(node, PIECES[before:3]) == [DROPPED] * (3 - before)
    assert not len(node.saves.joins), "all ranks have been heard of"
    assert not stored(node)
    assert all_of(node, PIECES, 2) == [PART] * 3 + [ACCEPTED]
    assert stored(node)


def test_a_newer_save_of_a_chunk_replaces_an_older_one(node: Node) -> None:
    newer = pieces_of(seed=7)
    assert all_of(node, PIECES[:3], 5) == [PART] * 3
    assert hand_over(node, newer[0], 6) is PART
    assert node.arena_cache.leased() == 1
    assert hand_over(node, PIECES[3], 5) is DROPPED
    drop(node, 5)
    assert all_of(node, newer[1:], 6) == [PART, PART, ACCEPTED]
    assert seed_of(stored(node)[PATH]) == 7


def other_place(**other: int) -> Piece:
    return Piece(PIECES[3].payload, PIECES[3].position._replace(**other))


WRONG = {
    "one that has come": PIECES[0],
    "an impossible place": other_place(first=GRID.rows * GRID.columns),
    "another grid": other_place(step=1),
    "another rank's place": other_place(first=PIECES[2].position.first),
    "an overlap": other_place(skipped=PIECES[0].position.skipped),
    "another chunk's parent": GRID.pieces(replace(claim_of(0), parent_hash=bytes(20)))[3],
    "other tokens": GRID.pieces(claim_of(0), Provenance("0" * 64, "w", 1))[3],
    "compressed": Grid((2, 1), contents=(512,)).pieces(claim_of(0), codec="lz4")[3],
    "no payload": Piece(b"x" * 5000, PIECES[3].position),
}


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_part_that_does_not_fit_is_never_part_of_a_payload(
    node: Node, clock: ManualClock, wrong: Piece, *, is_first: bool
) -> None:
    found = all_of(node, [wrong, *PIECES[:3]] if is_first else [*PIECES[:3], wrong])
    assert REFUSED in found
    assert ACCEPTED not in found
    assert not stored(node)
    is_late(node, clock)


def torn(places: Sequence[memoryview]) -> None:
    places[-1][-1] ^= 1


def broken(places: Sequence[memoryview]) -> None:
    raise OSError("broken")


@pytest.mark.parametrize("fault", [torn, broken])
def test_a_part_that_does_not_come_whole_ends_the_payload(
    node: Node, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Sequence[memoryview]], None]
) -> None:
    read = ClientOutbox.read_pieces

    def faulty(outbox: ClientOutbox, places: Sequence[memoryview], offset: int) -> None:
        read(outbox, places, offset)
        fault(places)

    assert all_of(node, PIECES[:2]) == [PART] * 2
    with monkeypatch.context() as patch:
        patch.setattr(ClientOutbox, "read_pieces", faulty)
        if fault is torn:
            assert hand_over(node, PIECES[2]) is REFUSED
        else:
            with pytest.raises(OSError, match="broken"):
                hand_over(node, PIECES[2])
    assert nothing_is_left(node)
    assert hand_over(node, PIECES[3]) is DROPPED
    assert not stored(node)


def test_a_part_that_comes_after_the_deadline_makes_no_payload(
    node: Node, clock: ManualClock
) -> None:
    assert all_of(node, PIECES[:3]) == [PART] * 3
    clock.advance(PATIENCE_S / 2)
    assert hand_over(node, pieces_of(1)[0]) is PART
    clock.advance(PATIENCE_S / 2)
    node.saves.joins.expire()
    assert node.arena_cache.leased() == 1, "the chunk that began later still waits"
    assert hand_over(node, PIECES[3]) is not ACCEPTED
    assert not stored(node)
    is_late(node, clock)
    assert nothing_is_left(node)
    assert not len(node.saves.joins)


ENDS = {
    "a rank drops its part": lambda node, clock: drop(node),
    "it is late": is_late,
    "the replica has gone": lambda node, clock: node.saves.joins.client_left(ONE),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_memory_is_not_given_back_while_a_part_is_copied_there(
    node: Node, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, end: Callable[..., None]
) -> None:
    node.saves.joins.client_connected(ONE)
    read, leased = ClientOutbox.read_pieces, list[int]()

    def meanwhile(outbox: ClientOutbox, places: Sequence[memoryview], offset: int) -> None:
        end(node, clock)
        leased.append(node.arena_cache.leased())
        read(outbox, places, offset)

    assert hand_over(node, PIECES[0]) is PART
    monkeypatch.setattr(ClientOutbox, "read_pieces", meanwhile)
    assert hand_over(node, PIECES[1]) is DROPPED
    assert leased == [1]
    assert nothing_is_left(node)
    assert not stored(node)


# Replicas.


def test_two_replicas_with_the_same_chunk_store_it_once_and_mix_nothing(
    node: Node, clock: ManualClock
) -> None:
    theirs = pieces_of(seed=7)
    assert all_of(node, PIECES[:3]) == [PART] * 3
    assert all_of(node, theirs, replica=OTHER) == [REPEATED] * 4
    assert hand_over(node, PIECES[3]) is ACCEPTED
    assert all_of(node, theirs, 2, OTHER) == [REPEATED] * 4
    assert seed_of(stored(node)[PATH]) == 0
    assert node.recorder.value("saves") == 1


def test_what_one_replica_gives_up_another_saves(node: Node) -> None:
    theirs = pieces_of(seed=7)
    assert all_of(node, PIECES[:2]) == [PART] * 2
    drop(node)
    assert all_of(node, theirs[:2], replica=OTHER) == [PART] * 2
    assert hand_over(node, PIECES[2]) is DROPPED
    drop(node, 2)
    assert all_of(node, theirs[2:], replica=OTHER) == [PART, ACCEPTED]
    assert seed_of(stored(node)[PATH]) == 7


EVENTS = st.tuples(
    st.sampled_from(["part"] * 12 + ["drop", "late", "left"]),
    st.sampled_from([ONE, OTHER]),
    st.integers(1, 2),
    st.integers(0, 1),
    st.integers(0, GRID.parts - 1),
)
"""What happens: of which replica, its save of which number, which chunk and which part."""


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_a_stored_payload_is_one_save_of_one_replica(events: list[Any]) -> None:
    node = Node()
    clock = node.saves.joins._clock = ManualClock(0.0)
    seeds = {(ONE, 1): 1, (ONE, 2): 2, (OTHER, 1): 3, (OTHER, 2): 4}
    given_of: dict[Any, set[int]] = {}
    for kind, replica, number, chunk, part in events:
        if kind == "drop":
            drop(node, number, replica, claim_of(chunk).key.path())
        elif kind == "late":
            is_late(node, clock)
        elif kind == "left":
            node.saves.joins.client_left(replica)
        else:
            piece = pieces_of(chunk, seeds[replica, number])[part]
            status = hand_over(node, piece, number, replica)
            parts = given_of.setdefault((replica, number, chunk), set())
            parts.add(part)
            assert status is not ACCEPTED or len(parts) == GRID.parts
        assert node.saves.joins._reserved_bytes * 4 <= node.arena_cache.total_bytes
    whole = {
        (claim_of(chunk).key.path(), seeds[replica, number])
        for (replica, number, chunk), parts in given_of.items()
        if len(parts) == GRID.parts
    }
    assert {(path, seed_of(payload)) for path, payload in stored(node).items()} <= whole
    is_late(node, clock)
    assert nothing_is_left(node)
    assert not len(node.saves.joins)
    node.close()


def test_the_first_part_decides_whether_the_payload_is_saved_at_once(make: Make) -> None:
    node = make(holds_back=True)
    assert all_of(node, PIECES) == [PART] * 3 + [CommitStatus.HELD_BACK]
    assert not stored(node)
    assert node.arena_cache.contains_ready([PATH])[0]
    assert all_of(node, PIECES, 2) == [ACCEPTED] * 4, "it is there, and due now"
    assert seed_of(stored(node)[PATH]) == 0


# Bounded memory.


def test_open_joins_take_at_most_a_quarter_of_the_arena(make: Make, clock: ManualClock) -> None:
    node = make(memory=64 * PAGE)
    begun = 0
    while hand_over(node, pieces_of(begun)[0]) is PART:
        begun += 1
        assert node.arena_cache.leased_bytes() * 4 <= node.arena_cache.total_bytes
    assert begun > 1
    assert all_of(node, pieces_of(begun)[1:]) == [CommitStatus.NO_ROOM] * 3
    assert node.commit_one(payloads()[0]) is ACCEPTED, "others have room"
    for chunk in range(begun):
        assert all_of(node, pieces_of(chunk)[1:]) == [PART, PART, ACCEPTED]
        assert node.saves.drain(PATIENCE_S)
    assert all_of(node, pieces_of(begun), 2) == [PART] * 3 + [ACCEPTED]
    assert len(stored(node)) == begun + 2


def test_a_payload_that_is_too_large_for_the_arena_has_no_room(node: Node) -> None:
    for nbytes in (1 << 20, RAW_BYTES_MAX):
        payload, place = PIECES[0]
        piece = Piece(payload, place._replace(nbytes=nbytes))
        assert hand_over(node, piece, nbytes) is CommitStatus.NO_ROOM
        assert nothing_is_left(node)


def test_an_agent_knows_a_bounded_number_of_joins(
    node: Node, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joins, "JOINS_MAX", 8)
    for number in range(100):
        drop(node, path=ChunkKey(NAMESPACE, bytes(20), 1 + number).path())
        assert len(node.saves.joins) <= 8
    assert all_of(node, PIECES) == [DROPPED] * 4
    assert node.recorder.value("joins_dropped_full") == 96
    is_late(node, clock)
    assert all_of(node, PIECES, 2) == [PART] * 3 + [ACCEPTED]


# By the socket.


class Rank(Desk):
    """A worker that is connected, and hands over parts."""

    def __init__(self, node: Node, replica: str = "engine-1") -> None:
        super().__init__(node, replica=replica)
        self.saves._reach()

    def commit(self, piece: Piece, number: int = 1) -> CommitStatus:
        return self.hand_over(piece.payload, part=SavedPart(number, piece.position))


def test_with_the_last_connection_of_a_replica_its_parts_go(node: Node) -> None:
    node.listen()
    a, b, stranger = Rank(node), Rank(node), Rank(node, "engine-2")
    assert a.commit(PIECES[0]) is PART
    assert stranger.commit(pieces_of(1)[0]) is PART
    a.close()
    wait_until(lambda: node.server.clients == 2)
    assert node.arena_cache.leased() == 2, "another rank of it may still come"
    assert b.commit(PIECES[1]) is PART
    b.close()
    wait_until(lambda: node.arena_cache.leased() == 1)
    assert len(node.cache.in_flight) == 1
    again = Rank(node)
    assert [again.commit(piece) for piece in PIECES[2:]] == [PART] * 2
    again.close()
    stranger.close()
    wait_until(lambda: nothing_is_left(node))
    assert not stored(node)


def test_a_worker_that_drops_its_part_tells_the_agent(node: Node) -> None:
    node.listen()
    a, b = Rank(node), Rank(node)
    for number, (piece, other) in enumerate([(PIECES[0], PIECES[1]), (PIECES[1], PIECES[0])]):
        assert a.commit(piece, number) is PART
        b.saves.drop(PATH, SavedPart(number, other.position))
        assert node.arena_cache.leased() == 1
        b.saves.send_drops()
        wait_until(lambda: nothing_is_left(node))
        assert b.commit(PIECES[2], number) is DROPPED
    outcomes = [rank.commit(one, 2) for rank, one in zip([a, b] * 2, PIECES, strict=True)]
    assert outcomes == [PART] * 3 + [ACCEPTED]
    assert stored(node)
    for rank in (a, b):
        rank.close()
