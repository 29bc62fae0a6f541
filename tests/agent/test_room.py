"""Payloads that wait for memory: never inside a get, which would keep its connection."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Lock
from typing import Literal

import pytest

from objkv.agent.core import CoreLimits
from objkv.agent.fill import Cuts, Wanted
from objkv.agent.memory.arena import CellState
from objkv.agent.queue import Urgency
from objkv.agent.residents import Resident
from objkv.codec.payload import encode, read_header
from objkv.codec.seal import Seal
from objkv.stores.base import Arrived
from objkv.stores.memory import MemoryStore
from tests.agent.world import RIGHT, Node, pages_at
from tests.codec.seals import SEALS
from tests.support.samples import record_of
from tests.support.waiting import wait_until

PAGE = 4096
IN_PARTS = Cuts(parts_max=4, part_bytes_min=1)
Form = Literal["plain", "signed", "encrypted"]
FORMS = [
    pytest.param(form, codec, urgency, id=f"{form} {codec} {urgency.name.lower()}")
    for form in ("plain", "signed", "encrypted")
    for codec in ("none", "blosc")
    for urgency in (Urgency.IN_STEP, Urgency.BETWEEN_STEPS)
]


class CountedStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.under_way = 0
        self.gets: list[str] = []
        self._counting = Lock()

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        with self._counting:
            self.under_way += 1
            self.gets.append(key)
        try:
            return super().get_into(key, buffer, arrived, start)
        finally:
            with self._counting:
                self.under_way -= 1


class Scarce:
    """A core whose fetches wait for memory, as those inside a worker do."""

    def __init__(self, form: Form, codec: str, pages: int) -> None:
        self.store, self.codec = CountedStore(), codec
        seal = None if form == "plain" else SEALS[form]
        self.node = Node(store=self.store, memory=pages * PAGE, threads=1, seal=seal)
        self.node.core._limits = CoreLimits(1, 100, waits_for_room=True, cuts=IN_PARTS)
        self.waits: list[int] = []
        """How many gets were under way at each wait."""
        self.node.core._drop_abandoned = self._wait  # type: ignore[method-assign]
        self._seals: dict[str, Seal | None] = {}
        self.wanted = [self._stored(one) for one in self.node.save()]

    def _wait(self) -> None:
        self.waits.append(self.store.under_way)

    def _stored(self, one: Wanted, tokens: Sequence[int] | None = None) -> Wanted:
        path, seal = one.claim.key.path(), self.node.cache.seal
        header = read_header(self.node.store.get(path) or b"", seal=self._seals.get(path))
        self._seals[path] = seal
        ids = None if tokens is None else tuple(tokens)
        payload = encode(
            one.claim,
            header.frames.layers,
            RIGHT,
            codec=self.codec,  # type: ignore[arg-type]
            provenance=replace(header.provenance, tokens=ids),
            seal=seal,
        )
        self.node.store.put(path, payload)
        return Wanted(one.claim, record_of(read_header(payload, seal=seal)))

    def with_long_header(self, number: int) -> None:
        """Store a payload again, with so many token ids that its header takes another page."""
        self.wanted[number] = self._stored(self.wanted[number], range(1000, 1000 + PAGE // 4))

    def hold(self, pages: int) -> Resident:
        opened = self.node.residents.open("else", None)
        assert opened is not None
        self.node.residents.release(opened[0])
        assert self.node.residents.allot(opened[0], pages * PAGE) is not None
        return opened[0]

    def let_go(self, one: Resident) -> None:
        self.node.residents.give_up(one)

    def open(self, number: int, urgency: Urgency) -> Resident:
        (one,) = self.node.open(self.wanted[number], urgency=urgency)
        return one

    def is_right(self, one: Resident) -> bool:
        """Wait for a payload, release it, and return whether it has arrived as it should."""
        wait_until(lambda: one.state is not CellState.FILLING)
        progress = self.node.arena.board.read(one.cell)
        right = progress.state is CellState.READY and (
            pages_at(self.node.arena.view, progress) == RIGHT
        )
        self.node.residents.release(one)
        return right


@pytest.fixture
def make() -> Iterator[Callable[[Form, str, int], Scarce]]:
    made: list[Scarce] = []

    def one(form: Form, codec: str, pages: int) -> Scarce:
        made.append(Scarce(form, codec, pages))
        return made[-1]

    yield one
    for scarce in made:
        assert scarce.node.residents.leased() == 0
        scarce.node.close()
        assert scarce.node.residents.check()


Make = Callable[[Form, str, int], Scarce]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("form", "codec", "urgency"), FORMS)
def test_a_payload_waits_for_memory_without_a_get(
    form: Form, codec: str, urgency: Urgency, is_first: bool, make: Make
) -> None:
    """One of a known shape before its get, and the first of a shape is fetched again."""
    scarce = make(form, codec, 4)
    if not is_first:
        assert scarce.is_right(scarce.open(1, urgency))
    gets = len(scarce.store.gets)
    held = scarce.hold(3)
    one = scarce.open(0, urgency)
    wait_until(lambda: bool(scarce.waits))
    if not is_first:
        assert len(scarce.store.gets) == gets
    scarce.let_go(held)
    assert scarce.is_right(one)
    assert set(scarce.waits) == {0}
    if not is_first:
        assert len(scarce.store.gets) == 2 * gets
    assert not scarce.node.recorder.value("agent_no_room")


@pytest.mark.parametrize("urgency", [Urgency.IN_STEP, Urgency.BETWEEN_STEPS])
@pytest.mark.parametrize("form", ["plain", "signed"])
@pytest.mark.parametrize("pages", [4, 7])
def test_a_longer_header_than_that_of_the_last_payload_takes_more_memory(
    pages: int, form: Form, urgency: Urgency, make: Make
) -> None:
    scarce = make(form, "blosc", pages)
    scarce.with_long_header(1)
    assert scarce.is_right(scarce.open(0, urgency))
    held = scarce.hold(2)
    second = scarce.open(1, urgency)
    if pages == 4:
        wait_until(lambda: bool(scarce.waits))
    else:
        wait_until(lambda: second.state is not CellState.FILLING)
    scarce.let_go(held)
    assert scarce.is_right(second)
    assert not any(scarce.waits)
    assert scarce.is_right(scarce.open(0, urgency))


@pytest.mark.parametrize("codec", ["none", "blosc"])
def test_a_record_that_promises_too_much_costs_only_its_own_load(codec: str, make: Make) -> None:
    scarce = make("plain", codec, 4)
    assert scarce.is_right(scarce.open(0, Urgency.IN_STEP))
    second = scarce.wanted[1]
    lie = replace(second.record, raw_bytes=second.record.raw_bytes + 2 * PAGE)
    scarce.wanted[1] = Wanted(second.claim, lie)
    assert scarce.is_right(scarce.open(1, Urgency.IN_STEP))
    assert scarce.is_right(scarce.open(0, Urgency.IN_STEP))
