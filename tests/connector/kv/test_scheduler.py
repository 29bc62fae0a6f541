"""The scheduler's side: the sync gate, hit counters, matches, and saves that are planned."""

from collections.abc import Iterator, Sequence
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from objkv.connector.kv.metadata import StepReport
from objkv.connector.kv.scheduler import HitCounters, SchedulerSide, SyncGate
from objkv.index.base import ChunkEntry, ShardRecord, Shards
from objkv.index.memory import MemoryIndex
from objkv.telemetry import MemoryRecorder
from objkv.testing.clock import ManualClock
from objkv.transfer.plan import ChunkMove, LoadMove, LoadPlan
from tests.support.paged_cache import wait_until
from tests.support.sides import (
    FIELD,
    PATIENCE_MS,
    RECORD,
    publish_prompt,
    request,
    scheduler_side,
    step,
)

BOUND_S = 5.0
WITHIN = LoadPlan("w", "0" * 32, (), sync=True)
BETWEEN = LoadPlan("b", "0" * 32, (), sync=False)


def closed(clock: ManualClock) -> SyncGate:
    """Of a replica whose forward pass waited in vain."""
    gate = SyncGate(BOUND_S, clock=clock)
    gate.planned([WITHIN, BETWEEN])
    gate.reported(StepReport(failed={"w", "b"}))
    gate.received("b")
    assert not gate.open
    return gate


@pytest.mark.parametrize(("seconds", "opens"), [(BOUND_S / 2, True), (BOUND_S, False)])
def test_a_load_between_steps_opens_the_gate_if_a_step_would_have_waited_for_it(
    seconds: float, opens: bool
) -> None:
    gate = closed(clock := ManualClock())
    gate.planned([BETWEEN])
    clock.advance(seconds)
    gate.received("b")
    assert gate.open is opens


def test_a_load_between_steps_that_fails_does_not_open_the_gate() -> None:
    gate = closed(ManualClock())
    gate.planned([BETWEEN])
    gate.reported(StepReport(failed={"b"}))
    gate.received("b")
    assert not gate.open


def test_a_payload_that_was_refused_does_not_close_the_gate() -> None:
    gate = SyncGate(BOUND_S)
    gate.planned([WITHIN])
    gate.reported(StepReport(failed={"w"}, rejected={("0" * 32, b"h" * 20)}))
    assert gate.open


def test_a_load_between_steps_that_failed_does_not_close_the_gate() -> None:
    """It may have been aborted, and only its own request waited."""
    gate = SyncGate(BOUND_S)
    gate.planned([WITHIN, BETWEEN])
    gate.reported(StepReport(failed={"b"}))
    gate.planned([])
    gate.reported(StepReport(failed={"w"}))
    assert gate.open


def loads_between_steps(side: SchedulerSide, name: str) -> bool:
    """Whether the prompt of a request of that name is loaded between steps."""
    one = request(70, name)
    side.track(one)
    wait_until(lambda: side.match(one, 0)[0] is not None)
    tokens, between = side.match(one, 0)
    assert tokens == 64
    side.plan_load(one, [[1, 2]], 64)
    side.plan_step(step({}, (), sync_loads=not between))
    return between


def test_while_the_gate_is_closed_loads_are_planned_between_steps() -> None:
    publish_prompt(index := MemoryIndex(), [7] * 70)
    side = scheduler_side(index, load_mode="layerwise", step_load_deadline_ms=PATIENCE_MS)
    assert not loads_between_steps(side, "in vain")
    failed = StepReport(failed={"in vain"})
    side.update(KVConnectorOutput(kv_connector_worker_meta=failed))
    assert loads_between_steps(side, "between")
    side.update(KVConnectorOutput(finished_recving={"between"}))
    assert not loads_between_steps(side, "within again")
    side.close()


def test_waiting_requests_are_counted_once_a_step_and_without_the_request_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counting takes as long as matching, and all that wait may be matched in one step."""
    publish_prompt(index := MemoryIndex(), [7] * 70)
    side = scheduler_side(index)
    behind: list[int] = []
    counted: list[int] = []

    def admit(_records: Any, _computed: int, end: int, *, waiting: int) -> int:
        behind.append(waiting)
        return end

    def count() -> int:
        counted.append(3)
        return 3

    monkeypatch.setattr(side._timing, "admit", admit)
    monkeypatch.setattr(side._requests, "waiting", count)
    asked = [request(70, name) for name in "abc"]
    for one in asked:
        side.track(one)
        wait_until(lambda one=one: side.match(one, 0)[0] is not None)
    assert (len(counted), behind) == (1, [2, 2, 2])
    side.plan_step(step({}, ()))
    side._requests.end("a")
    side.track(asked[0])
    wait_until(lambda: side.match(asked[0], 0)[0] is not None)
    assert len(counted) == 2
    side.close()


@pytest.mark.parametrize(
    ("named", "images", "shared"), [(True, 1, True), (False, 1, False), (False, 0, True)]
)
def test_a_prompt_with_an_image_that_only_has_a_number_is_neither_loaded_nor_saved(
    named: bool, images: int, shared: bool
) -> None:
    """The first image of every process has the same one: its KV would be another image's."""
    side = scheduler_side(roles={"media_named": named})
    place = SimpleNamespace(offset=2, length=40)
    image = SimpleNamespace(identifier="renderer0-mm-1-image-0", mm_position=place)
    side.track(request(mm_features=[image] * images))
    tracked = side._requests.get("r")
    assert tracked is not None
    assert (tracked.may_load, tracked.may_save) == (shared, shared)
    side.close()


# Where tokens come from.


def load(chunk: int, *, hot: bool, group: int = 0) -> LoadMove:
    names = bytes([chunk]) * 20, bytes([chunk]) * 20
    move = ChunkMove(chunk, group, *names, chunk * 64, chunk * 64 + 64, 0, (chunk + 1,))
    record = ShardRecord(100, 80, "none", hot, "0" * 32, 1)
    return LoadMove(move, ((FIELD, record),))


@pytest.fixture
def recorder() -> MemoryRecorder:
    return MemoryRecorder()


def test_a_query_is_counted_once_however_often_vllm_matches(recorder: MemoryRecorder) -> None:
    hits = HitCounters(recorder)
    for _ in range(5):
        hits.queried("r", 64)
    hits.allocated(request(300))
    assert recorder.drain() == {"queries": 1, "query_tokens": 300, "local_hit_tokens": 64}


def test_blocks_given_again_after_a_load_are_no_new_query(recorder: MemoryRecorder) -> None:
    hits = HitCounters(recorder)
    hits.queried("r", 0)
    hits.allocated(request(300))
    hits.allocated(request(300))
    assert recorder.value("queries") == 1


def test_a_request_that_was_preempted_is_a_query_again(recorder: MemoryRecorder) -> None:
    hits = HitCounters(recorder)
    for computed in (0, 128):
        hits.queried("r", computed)
        hits.allocated(request(300))
    assert recorder.drain() == {"queries": 2, "query_tokens": 600, "local_hit_tokens": 128}


def test_a_request_that_ends_before_it_is_admitted_is_forgotten(recorder: MemoryRecorder) -> None:
    hits = HitCounters(recorder)
    hits.queried("r", 0)
    hits.ended("r")
    hits.allocated(request(300))
    assert recorder.drain() == {}
    assert hits._queried == {}


@pytest.mark.parametrize(
    ("moves", "span", "hot", "bulk"),
    [
        ((load(0, hot=True), load(1, hot=False), load(2, hot=True)), (32, 192), 32 + 64, 64),
        # A chunk is hot when all its groups are.
        ((load(0, hot=True), load(0, hot=False, group=1), load(1, hot=True)), (0, 128), 64, 64),
    ],
)
def test_tokens_to_load_are_hot_or_in_bulk_and_nothing_else(
    recorder: MemoryRecorder, moves: Any, span: tuple[int, int], hot: int, bulk: int
) -> None:
    HitCounters(recorder).planned(LoadPlan("r", "n" * 32, moves, sync=False), *span)
    assert recorder.drain() == {
        "hits": 1,
        "hit_tokens": hot + bulk,
        "hit_hot_tokens": hot,
        "hit_bulk_tokens": bulk,
    }


# Saves: what is planned, what is held for it, and what may go wrong.


class HangingIndex(MemoryIndex):
    """Answers no reader before its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Event()

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        assert self.gate.wait(PATIENCE_MS / 1000)
        return super().find(namespace, prefix_hashes, fields)


def open_side(index: MemoryIndex, *, loads: bool = True) -> SchedulerSide:
    """Of a replica on a GPU: its copies are not over when a step is."""
    roles = {"loads": loads, "copies_are_synchronous": False, "steps_in_flight": 2}
    return scheduler_side(index, roles=roles)


@pytest.fixture
def side() -> Iterator[SchedulerSide]:
    side = open_side(MemoryIndex())
    yield side
    side.close()


def admit(side: SchedulerSide, one: Any) -> None:
    """As vLLM does: it matches until there is an answer."""
    side.track(one)
    wait_until(lambda: side.match(one, 0)[0] is not None)
    side.plan_load(one, (), 0)


def whole(blocks: list[int], *, sync_loads: bool = False) -> Any:
    """A step that computes the whole prompt of ``r`` in ``blocks``."""
    return step({"r": 64}, blocks, sync_loads=sync_loads)


def test_blocks_are_held_for_saves_from_them_and_for_no_others(side: SchedulerSide) -> None:
    """A preempted request's blocks are gone; a load into new ones reports its own end."""
    one = request()
    admit(side, one)
    assert len(side.plan_step(whole([3, 4])).saves) == 1
    side.plan_load(one, (), 0)
    assert side.finish(one, ([3, 4],)) is False
    admit(side, one)
    side.plan_step(whole([5, 6]))
    assert side.finish(one, ([5, 6],)) is True


def test_blocks_of_a_request_that_ends_while_a_load_within_the_step_may_fail_are_remembered(
    side: SchedulerSide,
) -> None:
    """Until the next step: by then it is known what failed, and the blocks may be another's."""
    one, unknown = request(), request(name="u")
    side.track(one)
    side.plan_step(whole([3, 4], sync_loads=True))
    side.finish(one, ([3, 4],))
    side.finish(unknown, ([5],))
    assert side.tables_ended == [[3, 4], [5]]
    side.plan_step(whole([3, 4]))
    side.finish(unknown, ([6],))
    assert side.tables_ended == []


def test_a_request_that_cannot_be_saved_does_not_stop_the_step(side: SchedulerSide) -> None:
    strange = request(mm_features=[SimpleNamespace(identifier=None)])
    side.track(strange)
    with pytest.raises(AttributeError):
        wait_until(lambda: side.match(strange, 0)[0] is not None)
    assert side.match(strange, 0) == (0, False)
    assert side.plan_step(whole([3, 4])).saves == ()


def test_what_was_missing_is_looked_up_again_once_its_save_is_planned() -> None:
    """Another request with the prompt must find it, although its absence was just remembered."""
    index = MemoryIndex()
    side = open_side(index)
    admit(side, one := request())
    (plan,) = side.plan_step(whole([3, 4])).saves
    for save in plan.moves:
        move = save.move
        entry = ChunkEntry(plan.namespace, move.prefix_hash, move.parent_hash, 0, 32)
        index.publish(entry, {FIELD: RECORD}, ttl_s=3600)
    side.finish(one, ([3, 4],))
    other = request(name="other")
    side.track(other)
    wait_until(lambda: side.match(other, 0)[0] is not None)
    assert side.match(other, 0)[0] == 64
    side.close()


def test_what_was_refused_is_looked_up_again() -> None:
    """The worker forgot its record, which other requests must not find in memory."""
    publish_prompt(index := MemoryIndex(), [7] * 70)
    side = open_side(index)
    side.track(one := request(70, "one"))
    wait_until(lambda: side.match(one, 0)[0] is not None)
    assert side.match(one, 0)[0] == 64
    (namespace,) = index.namespaces()
    rejected = {(namespace, record.prefix_hash) for record in index.scan(namespace)}
    for _, prefix_hash in rejected:
        index.drop(namespace, prefix_hash)
    report = StepReport(failed={"one"}, rejected=rejected)
    side.update(KVConnectorOutput(kv_connector_worker_meta=report))
    side.track(other := request(70, "other"))
    wait_until(lambda: side.match(other, 0)[0] is not None)
    assert side.match(other, 0)[0] == 0
    side.close()


def test_a_replica_that_only_saves_waits_for_hashes_and_for_no_index() -> None:
    """A request may have ended after one step, and what could not be named then is lost."""
    index = HangingIndex()
    side = open_side(index, loads=False)
    admit(side, request())
    assert [save.move.chunk for save in side.plan_step(whole([3, 4])).saves[0].moves] == [0, 1]
    index.gate.set()
    side.close()
