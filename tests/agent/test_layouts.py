"""The layouts of payloads: what a number promises, however a payload came to the arena."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from objkv.agent import fill as module
from objkv.agent.client import AgentConnection, ArenaLease
from objkv.agent.fill import UNKNOWN, KnownLayouts, PayloadRequest
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import Claims, Commit, CommitStatus, MissReason, SavedPart, Urgency
from objkv.codec.payload import Claim, LayerSpec, read_header
from tests.agent import world
from tests.agent.consistency import keeps_promises
from tests.agent.world import PATIENCE_S, Make, Paused, claims_of, ended, making, opened, payloads
from tests.codec.parts import Grid
from tests.support.samples import NAMESPACE

LAYERS = (LayerSpec("l.0", "BF16", (2, 2, 8, 8)), LayerSpec("l.1", "BF16", (2, 2, 8, 8)))


def note(layouts: KnownLayouts, layers: tuple[LayerSpec, ...] = LAYERS, size: int = 4096) -> int:
    return layouts.note(NAMESPACE, "0", layers, size)


def test_equal_layouts_have_one_number_and_others_another() -> None:
    layouts = KnownLayouts()
    first = note(layouts)
    assert first > 0
    assert layouts.note("another", "1", tuple(map(replace, LAYERS)), 4096) == first
    others = [
        (LAYERS, 8192),
        (LAYERS[:1], 4096),
        (LAYERS[::-1], 4096),
        ((replace(LAYERS[0], name="l.2"), LAYERS[1]), 4096),
        ((replace(LAYERS[0], dtype="F16"), LAYERS[1]), 4096),
        ((replace(LAYERS[0], shape=(2, 2, 8, 8)[::-1]), LAYERS[1]), 4096),
        ((replace(LAYERS[0], scales="1.0 1.0"), LAYERS[1]), 4096),
    ]
    numbers = [note(layouts, *other) for other in others]
    assert len({first, *numbers}) == 1 + len(others)
    assert [note(layouts, *other) for other in others] == numbers
    assert note(layouts) == first
    assert layouts.last("other", "0") is UNKNOWN
    note(layouts, tuple(map(replace, LAYERS)), 8192)
    assert layouts.last(NAMESPACE, "0").header_bytes == 8192
    assert layouts.last(NAMESPACE, "0").layers is LAYERS, "one object for equal layers"


def test_those_beyond_the_limit_have_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAYOUTS_MAX", 2)
    monkeypatch.setattr(module, "_SHARDS_MAX", 2)
    layouts = KnownLayouts()
    numbers = [layouts.note(NAMESPACE, str(n), LAYERS, 4096 * (1 + n)) for n in range(4)]
    assert numbers == [1, 2, 0, 0]
    assert [note(layouts, LAYERS, 4096 * (1 + n)) for n in range(4)] == numbers
    assert layouts.last(NAMESPACE, "1") is UNKNOWN
    assert layouts.last(NAMESPACE, "0").header_bytes == 4 * 4096


@pytest.fixture
def make() -> Iterator[Make]:
    with making(lambda **options: world.Node(**options).listen()) as make:
        yield make


def opened_as(client: AgentConnection, claim: Claim) -> ArenaLease:
    wanted = Claims.of([claim])
    (lease,) = client.open(wanted, deadline_s=PATIENCE_S, urgency=Urgency.IN_STEP)
    return lease


def layouts_of(client: AgentConnection, wanted: list[PayloadRequest]) -> list[int]:
    """The layouts of payloads, once from the board and once from the answer."""
    leases = opened(client, wanted)
    found = [ended(client, lease) for lease in leases]
    assert {one.state for one in found} == {CellState.READY}
    again = client.open(claims_of(wanted), deadline_s=PATIENCE_S, urgency=Urgency.IN_STEP)
    assert {lease.progress.state for lease in again} == {CellState.READY}
    assert [lease.progress.layout for lease in again] == [one.layout for one in found]
    for progress, one in zip(found, wanted, strict=True):
        view = client.arena.view[progress.offset : progress.offset + progress.nbytes]
        assert read_header(view).claim == one.claim
    client.release([lease.number for lease in (*leases, *again)])
    return [one.layout for one in found]


def test_payloads_that_were_handed_over_have_the_layout_of_those_that_are_fetched(
    make: Make,
) -> None:
    node = make(holds_back=True)
    first, *_ = node.save()
    client = node.connect()
    assert layouts_of(client, [first]) == [1]
    made = payloads()[1]
    assert node.commit_one(made) is CommitStatus.HELD_BACK
    answer = opened_as(client, read_header(made).claim)
    assert (answer.progress.state, answer.progress.layout) == (CellState.READY, 1)


def test_a_joined_payload_has_a_layout(make: Make) -> None:
    node = make()
    pieces = Grid((2, 1)).pieces(read_header(payloads()[0]).claim)
    for piece in pieces:
        with world.outbox_of(piece.payload) as outbox:
            commit = Commit(0, len(piece.payload), part=SavedPart(1, piece.position))
            status = node.saves.commit(outbox, commit, b"one")
    assert status is CommitStatus.ACCEPTED
    answer = opened_as(node.connect(), read_header(payloads()[0]).claim)
    assert (answer.progress.state, answer.progress.layout) == (CellState.READY, 1)
    assert keeps_promises(node.arena_cache)


OTHERS = [{"parent_hash": bytes(20)}, {"token_start": 1}, {"token_end": 10**6}]


def is_refused(client: AgentConnection, wanted: PayloadRequest, change: dict[str, Any]) -> None:
    answer = opened_as(client, replace(wanted.claim, **change))
    assert (answer.progress.state, answer.progress.reason) == (CellState.FAILED, MissReason.CORRUPT)
    assert (answer.number, answer.progress.offset) == (0, 0)


@pytest.mark.parametrize("change", OTHERS, ids=["parent", "start", "end"])
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_payload_that_is_not_as_opened_is_a_miss_and_is_rejected(
    make: Make, change: dict[str, Any], is_stored: bool
) -> None:
    node = make(holds_back=True)
    wanted, client = node.save()[1], node.connect()
    key = wanted.claim.key
    if is_stored:
        layouts_of(client, [wanted])
    else:
        node.index.forget(key.namespace, key.prefix_hash, key.field, wanted.record)
        assert node.commit_one(payloads()[1]) is CommitStatus.HELD_BACK
    is_refused(client, wanted, change)
    assert node.arena_cache.peek([key.path()]) == [None]
    assert not len(node.arena_cache.held_back)
    assert node.cache.record_of(key) is None


@pytest.mark.parametrize("change", OTHERS, ids=["parent", "start", "end"])
def test_who_opens_what_comes_as_another_claim_gets_nothing_of_it(
    make: Make, change: dict[str, Any]
) -> None:
    node = make()
    wanted, client, get = node.save()[1], node.connect(), Paused(node.store, "on_get")
    (before,) = opened(client, [wanted])
    assert get.begun.wait(PATIENCE_S)
    is_refused(client, wanted, change)
    assert node.arena_cache.leased() == 1
    get.go.set()
    assert ended(client, before).state is CellState.READY
