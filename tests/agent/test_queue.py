"""What is fetched next."""

from dataclasses import replace
from threading import Event, Lock

import pytest

from objkv.agent import core as queue
from objkv.agent.arena_cache import CachedPayload
from objkv.agent.fill import Cuts
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import MissReason, Urgency
from tests.agent.consistency import fetches_of
from tests.agent.world import PATIENCE_S, Node, Sleeper, claims_of
from tests.support.samples import TOKENS
from tests.support.waiting import wait_until


class Gate:
    """Holds gets of a store until it opens, and counts them."""

    def __init__(self, node: Node) -> None:
        self.open, self.inside = Event(), 0
        self._lock = Lock()
        node.store.on_get = self  # type: ignore[attr-defined]

    def __call__(self, key: str) -> None:
        with self._lock:
            self.inside += 1
        assert self.open.wait(PATIENCE_S)
        with self._lock:
            self.inside -= 1


def test_when_all_threads_are_late_nothing_more_is_queued() -> None:
    node = Node(threads=1)
    wanted = node.save(TOKENS)
    gate = Gate(node)
    node.open(wanted[0], deadline_s=1.0)
    wait_until(lambda: gate.inside == 1)
    wait_until(lambda: node.core._is_stuck())
    for one in wanted[:2]:  # the one that hangs, and another
        (found,) = node.core.open(
            Sleeper(), claims_of([one]), deadline_s=PATIENCE_S, urgency=Urgency.BETWEEN_STEPS
        )
        failed = isinstance(found, CachedPayload) and found.state is CellState.FAILED
        assert failed or found is MissReason.NO_ROOM
    gate.open.set()
    wait_until(lambda: not node.core._is_stuck())
    node.close()


def test_loads_between_steps_do_not_starve_behind_endless_ones_within(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue, "_OVERDUE_SHARE", 0.0)  # they are overdue at once
    node = Node(threads=1)
    first, within, between = node.save(TOKENS)
    gate, order = Gate(node), list[str]()

    def on_get(key: str) -> None:
        order.append(key)
        gate(key)

    node.store.on_get = on_get  # type: ignore[attr-defined]
    node.open(first, urgency=Urgency.IN_STEP)
    wait_until(lambda: gate.inside == 1)
    node.open(within, urgency=Urgency.IN_STEP)
    node.open(between)
    gate.open.set()
    wait_until(lambda: len(order) == 3 and fetches_of(node.core) == 0)
    assert order == [one.claim.key.path() for one in (first, between, within)]
    node.close()


@pytest.mark.parametrize("codec", ["none", "blosc"])
def test_first_parts_of_all_come_before_the_second_of_any(codec: str) -> None:
    node = Node(threads=1)
    wanted = node.save(TOKENS, codec=codec)
    node.core._limits = replace(node.core._limits, cuts=Cuts(2, 1))
    starts: list[tuple[str, int]] = []
    gate = Gate(node)
    get = node.cache.get_into

    def watched(key: object, *args: object, start: int | None = None, **more: object) -> object:
        starts.append((key.path(), start or 0))  # type: ignore[attr-defined]
        return get(key, *args, start=start, **more)  # type: ignore[arg-type]

    node.cache.get_into = watched  # type: ignore[method-assign,assignment]
    node.open(*wanted, urgency=Urgency.IN_STEP)
    gate.open.set()
    wait_until(lambda: fetches_of(node.core) == 0)
    firsts = [n for n, (_, at) in enumerate(starts) if at == 0]
    assert firsts == list(range(len(wanted)))
    node.close()


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_are_the_payload_once(parts: int) -> None:
    nbytes = 10 << 20
    cuts = Cuts(parts, 1 << 20)
    assert cuts.count(nbytes) == parts
    assert cuts.count(100) == 1
