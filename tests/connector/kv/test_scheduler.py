"""The scheduler's side: loads, hit counters, matches, and saves that are planned."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from objkv.cache.admission import LoadTime
from objkv.connector.counters import COUNTERS
from objkv.connector.kv import scheduler as module
from objkv.connector.kv.loads import PromisedLoads
from objkv.connector.kv.metadata import FailedLoad, StepReport
from objkv.connector.kv.scheduler import SchedulerSide, count_load
from objkv.connector.model.groups import DraftGroups
from objkv.connector.pacing import EMPTY_STEP_S
from objkv.index.base import ShardRecord, ShardRecords
from objkv.telemetry import MemoryRecorder
from objkv.transfer.plan import BlocksToZero, ChunkMove, LoadPlan
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.support.plans import LoadMove, packed, unpacked
from tests.support.sides import (
    GEOMETRY,
    ONE_LAYER,
    PATIENCE_MS,
    SIZE,
    ask,
    breaks,
    publish_prompt,
    request,
    scheduler_side,
    step,
)
from tests.support.waiting import wait_until

BOUND_S = 5.0
WITHIN = LoadPlan("w", "0" * 32, packed([]), sync=True)
BETWEEN = LoadPlan("b", "0" * 32, packed([]), sync=False)


def planned(loads: PromisedLoads, *plans: LoadPlan) -> None:
    """A step is planned with these loads."""
    for plan in plans:
        loads.plan(plan, 64, [])
    loads.send()


IN_VAIN, GOOD = (0, StepReport(failed={"w", "b"}), {"b"}), StepReport()


@pytest.mark.parametrize(
    ("reports", "may_wait"),
    [
        ([IN_VAIN], False),
        ([IN_VAIN, (BOUND_S / 2, GOOD, {"b"})], True),
        ([IN_VAIN, (BOUND_S, GOOD, {"b"})], False),
        ([IN_VAIN, (0, StepReport(failed={"b"}), {"b"})], False),
        ([(0, StepReport(failed={"w"}, rejected={("0" * 32, b"h" * 20)}), ())], True),  # refused
        # Only its own request waited.
        ([(0, StepReport(failed={"b"}), ()), (0, StepReport(failed={"w"}), ())], True),
    ],
)
def test_after_a_step_that_waited_in_vain_none_waits_until_it_would_have_been_in_time(
    reports: list[tuple[float, StepReport, set[str]]], may_wait: bool
) -> None:
    loads = PromisedLoads(SIZE, BOUND_S, clock=(clock := ManualClock()))
    planned(loads, WITHIN, BETWEEN)
    for seconds, report, received in reports:
        clock.advance(seconds)
        loads.ended(report, received)
        planned(loads, BETWEEN)
    assert loads.may_sync is may_wait


def loads_between_steps(side: SchedulerSide, name: str) -> bool:
    """Whether the prompt of a request of that name is loaded between steps."""
    one = request(70, name)
    tokens, between = ask(side, one)
    assert tokens == 64
    side.plan_load(one, [[1, 2]], 64)
    side.plan_step(step({}, (), sync_loads=not between))
    return between


@pytest.mark.parametrize(("mode", "tokens"), [("layerwise", 32), ("async", 64)])
def test_a_load_within_a_step_leaves_a_token_to_compute(mode: str, tokens: int) -> None:
    publish_prompt(index := MemoryIndex(), [7] * 64)
    side = scheduler_side(index, load_mode=mode)
    assert ask(side, request(64)) == (tokens, mode == "async")


def test_a_request_that_was_preempted_loads_what_vllm_has_no_more() -> None:
    publish_prompt(index := MemoryIndex(), [7] * 4 * 32)
    side = scheduler_side(index, load_mode="async", admission="always")
    ask(side, one := request(4 * 32 + 3))
    assert [side.match(one, kept * 32)[0] for kept in range(5)] == [128, 96, 64, 32, 0]
    side.plan_load(one, [[1, 2, 3, 4, 5]], side.match(one, 0)[0] or 0)
    side.plan_step(step({}, ()))
    side.update(KVConnectorOutput(finished_recving={"r"}))
    assert side.match(one, 32) == (96, True)
    side.plan_load(one, [[11, 12, 13, 14, 15]], 96)
    (again,) = side.plan_step(step({}, ())).loads
    assert [load.move.block_ids for load in unpacked(again.moves)] == [(12,), (13,), (14,)]


def test_blocks_of_a_draft_that_is_not_stored_are_zeroed() -> None:
    drafted = replace(
        GEOMETRY,
        groups=(ONE_LAYER, replace(ONE_LAYER, layers=("d0",))),
        tables=(0, 0),
        table_count=1,
        drafted=DraftGroups(1, 1000, lags=False),
    )
    publish_prompt(index := MemoryIndex(), [7] * 70)
    side = scheduler_side(index, geometry=drafted)
    ask(side, one := request(70))
    side.plan_load(one, [[1, 2, 3]], 64)
    assert side.plan_step(step({}, ())).loads[0].blocks_to_zero == (BlocksToZero(1000, (1, 2)),)


def test_a_load_within_a_step_counts_if_the_next_step_is_planned_before_its_report() -> None:
    """As vLLM does that schedules asynchronously."""
    touched: list[int] = []

    class Index(MemoryIndex):
        def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> None:
            touched.append(len(prefix_hashes))

    publish_prompt(index := Index(), [7] * 70)
    side = scheduler_side(index, roles={"steps_in_flight": 2}, load_mode="layerwise")
    assert not loads_between_steps(side, "r")
    side.plan_step(step({"r": 1}, ()))
    report = StepReport(loaded={"r": LoadTime(0.5, 0.1)})
    side.update(KVConnectorOutput(kv_connector_worker_meta=report))
    wait_until(lambda: bool(index.savings()))
    wait_until(lambda: touched == [2])
    assert not loads_between_steps(side, "in vain")
    side.plan_step(step({"r": 1}, ()))
    failed = StepReport(failed={"in vain"})
    side.update(KVConnectorOutput(kv_connector_worker_meta=failed))
    assert loads_between_steps(side, "between")


@pytest.mark.parametrize(
    ("named", "images", "shared"), [(True, 1, True), (False, 1, False), (False, 0, True)]
)
def test_a_prompt_with_an_image_that_only_has_a_number_is_neither_loaded_nor_saved(
    named: bool, images: int, shared: bool
) -> None:
    """The first image of every process has the same one: its KV would be another image's."""
    side = scheduler_side(index := HangingIndex(), roles={"media_named": named})
    place = SimpleNamespace(offset=2, length=40)
    image = SimpleNamespace(identifier="renderer0-mm-1-image-0", mm_position=place)
    side.track(one := request(mm_features=[image] * images))
    assert side.match(one, 0)[0] == (None if shared else 0), "it is looked up or not"
    index.gate.set()
    wait_until(lambda: side.match(one, 0)[0] is not None)
    side.plan_load(one, (), 0)
    assert bool(side.plan_step(whole([3, 4])).saves) is shared


# Where tokens come from.


def load(chunk: int, *, hot: bool, group: int = 0) -> tuple[LoadMove, ShardRecord]:
    names = bytes([chunk]) * 20, bytes([chunk]) * 20
    move = ChunkMove(chunk, group, *names, chunk * 64, chunk * 64 + 64, 0, (chunk + 1,))
    record = ShardRecord(100, 80, True, hot, "0" * 32, 1)
    return LoadMove(move, None), record


HIT = {"queries": 1, "query_tokens": 70, "hits": 1, "hit_tokens": 64, "hit_bulk_tokens": 64}
MISS = {"queries": 1, "query_tokens": 70}


@pytest.mark.parametrize(
    ("asked", "settings", "expected"),
    [
        ({}, {}, HIT),
        ({"tokens": [8] * 70}, {}, MISS),
        ({"skip_reading_prefix_cache": True}, {}, {}),
        ({"resumable": True}, {}, {}),
        ({}, {"roles": {"loads": False}}, {}),
        ({}, {"admission": "never"}, MISS),
    ],
    ids=["hit", "miss", "computes all", "session", "producer", "admission"],
)
def test_queries_are_the_requests_that_may_load(
    asked: dict[str, Any], settings: dict[str, Any], expected: dict[str, float]
) -> None:
    publish_prompt(index := MemoryIndex(), [7] * 70)
    recorder = MemoryRecorder()
    side = scheduler_side(index, recorder=recorder, load_mode="async", **settings)
    one = request(**({"tokens": [7] * 70} | asked))
    tokens, _ = ask(side, one)
    side.plan_load(one, ([1, 2, 3],), tokens or 0)
    side.plan_load(one, ([1, 2, 3],), 0)  # as after a load between steps
    found = recorder.drain()
    names = {name for name in COUNTERS if name.startswith(("quer", "hit", "local_hit"))}
    assert {name: found[name] for name in names if found.get(name)} == expected


def test_a_request_that_was_preempted_is_a_query_again() -> None:
    side = scheduler_side(recorder=(recorder := MemoryRecorder()))
    ask(side, one := request(300))
    for computed in (0, 128):
        side.match(one, computed)
        for _ in range(2):  # the second time after a load
            side.plan_load(one, (), 0)
    expected = {"queries": 2, "query_tokens": 600, "local_hit_tokens": 128}
    assert recorder.drain().items() >= expected.items()


@pytest.mark.parametrize(
    ("moves", "span", "hot", "bulk"),
    [
        ((load(0, hot=True), load(1, hot=False), load(2, hot=True)), (32, 192), 32 + 64, 64),
        # A chunk is hot when all its groups are.
        ((load(0, hot=True), load(0, hot=False, group=1), load(1, hot=True)), (0, 128), 64, 64),
    ],
)
def test_tokens_to_load_are_hot_or_in_bulk_and_nothing_else(
    moves: Any, span: tuple[int, int], hot: int, bulk: int
) -> None:
    (some, records), recorder = zip(*moves, strict=True), MemoryRecorder()
    count_load(recorder, packed(some), records, span, span[1] - 5)
    assert recorder.drain() == {
        "hits": 1,
        "hit_tokens": hot + bulk,
        "hit_hot_tokens": hot,
        "hit_bulk_tokens": bulk,
        "hit_draftless_tokens": 5,
    }


# Saves: what is planned, what is held for it, and what may go wrong.


class HangingIndex(MemoryIndex):
    """Answers no reader before its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Event()

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[ShardRecords | None]:
        assert self.gate.wait(PATIENCE_MS / 1000)
        return super().find(namespace, prefix_hashes, fields)


def open_side(index: MemoryIndex, *, loads: bool = True) -> SchedulerSide:
    """Of a replica on a GPU: its copies are not over when a step is."""
    roles = {"loads": loads, "steps_in_flight": 2}
    return scheduler_side(index, roles=roles)


@pytest.fixture
def side() -> SchedulerSide:
    return open_side(MemoryIndex())


def admit(side: SchedulerSide, one: Any) -> None:
    ask(side, one)
    side.plan_load(one, (), 0)


def whole(blocks: list[int], *, sync_loads: bool = False) -> Any:
    """A step that computes the whole prompt of ``r`` in ``blocks``."""
    return step({"r": 64}, blocks, sync_loads=sync_loads)


def test_blocks_are_held_for_saves_from_them_and_for_no_others(side: SchedulerSide) -> None:
    """A preempted request's blocks are gone. vLLM is told to wait for held ones, or it preempts a
    request for lack of blocks, and computes it again."""
    one = request()
    admit(side, one)
    assert len(side.plan_step(whole([3, 4])).saves) == 1
    side.plan_load(one, (), 0)
    assert side.finish(one, ([3, 4],)) is False
    admit(side, one)
    side.plan_step(whole([5, 6]))
    assert not side.holds_blocks
    assert side.finish(one, ([5, 6],)) is True
    assert side.holds_blocks
    side.update(KVConnectorOutput(finished_sending={"r"}))
    assert not side.holds_blocks


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


def test_what_was_refused_is_looked_up_again() -> None:
    """And saved again by the request that computes it."""
    publish_prompt(index := MemoryIndex(), [7] * 70)
    side = open_side(index)
    one = request(70, "one")
    assert ask(side, one)[0] == 64
    (namespace,) = index.namespaces()
    rejected = {(namespace, record.prefix_hash) for record in index.scan(namespace)}
    for _, prefix_hash in rejected:
        index.drop(namespace, prefix_hash)
    report = StepReport(failed={"one"}, rejected=rejected)
    side.update(KVConnectorOutput(kv_connector_worker_meta=report))
    assert ask(side, request(70, "other"))[0] == 0
    side.plan_load(one, (), 0)
    plan = side.plan_step(step({"one": 70}, (1, 2, 3)))
    assert [save.move.chunk for of_one in plan.saves for save in of_one.moves] == [0, 1]


def test_a_replica_that_only_saves_waits_for_hashes_and_for_no_index() -> None:
    """A request may have ended after one step, and what could not be named then is lost."""
    index = HangingIndex()
    side = open_side(index, loads=False)
    admit(side, request())
    assert [save.move.chunk for save in side.plan_step(whole([3, 4])).saves[0].moves] == [0, 1]
    index.gate.set()


# A new request whose lookup is not back is awaited for a moment, while nobody else is delayed.


class Waits:
    """A replica whose lookups hang. Notes how long each wait for one may take, and lets the clock
    pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        publish_prompt(index := HangingIndex(), [7] * 70)
        self.side, self.gate, self._clock = open_side(index), index.gate, ManualClock()
        self.allowed_s: list[float] = []
        self.taken_s = 0.0
        self.then: Any = lambda: None
        monkeypatch.setattr(module, "monotonic", self._clock)
        monkeypatch.setattr(self.side.lookups, "wait_for", self._wait_for)

    def _wait_for(self, _name: str, seconds: float) -> bool:
        self.allowed_s.append(seconds)
        self._clock.advance(self.taken_s)
        self.then()
        return True

    def track(self, name: str = "r") -> Any:
        self.side.track(one := request(70, name))
        return one

    def run_another(self, *, in_flight: bool) -> None:
        """A request that generates. Its step may be over."""
        self.side.track(request(name="running", num_computed_tokens=64))
        self.side.plan_step(step({"running": 1}, [1]))
        if not in_flight:
            self.side.end_step()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    yield (made := Waits(monkeypatch))
    made.gate.set()


def test_a_lookup_that_comes_in_time_is_used_in_the_same_pass(waits: Waits) -> None:
    """In the next one the request would have lost a whole step."""
    waits.run_another(in_flight=True)
    one = waits.track()

    def answer() -> None:
        waits.gate.set()
        wait_until(lambda: waits.side._match(one, 0)[0] is not None)

    waits.then = answer
    assert waits.side.match(one, 0) == (64, True)
    assert waits.allowed_s == [module._MATCH_WAIT_S]


@pytest.mark.parametrize(
    ("running", "in_flight", "awaited"),
    [(True, True, True), (True, False, False), (False, False, True)],
)
def test_a_lookup_is_awaited_only_while_nobody_else_waits(
    waits: Waits, *, running: bool, in_flight: bool, awaited: bool
) -> None:
    """While the device computes, or if no request runs at all."""
    if running:
        waits.run_another(in_flight=in_flight)
    assert waits.side.match(waits.track(), 0) == (None, False)
    assert bool(waits.allowed_s) is awaited


def test_a_request_is_awaited_once_and_all_of_a_pass_together_for_a_bounded_time(
    waits: Waits,
) -> None:
    waits.taken_s = 0.75 * module._MATCH_WAIT_S
    burst = [waits.track(name) for name in "abcd"]
    for one in burst[:3] * 2:
        waits.side.match(one, 0)
    assert waits.allowed_s == [pytest.approx(share * 1e-3, rel=0.01) for share in (1, 0.25)]
    waits.side.plan_step(step({}, ()))
    for one in burst:
        waits.side.match(one, 0)
    assert waits.allowed_s[2:] == [module._MATCH_WAIT_S]


# A bug in objkv costs a miss, and neither the engine nor a token.


def loaded(side: SchedulerSide, name: str = "r") -> Any:
    """A request whose 64 tokens vLLM has been promised."""
    one = request(70, name)
    assert ask(side, one)[0] == 64
    return one


@pytest.fixture(params=["async", "layerwise"])
def stored(request: pytest.FixtureRequest) -> SchedulerSide:
    publish_prompt(index := MemoryIndex(), [7] * 70)
    return scheduler_side(index, load_mode=request.param, admission="always")


@pytest.mark.parametrize("broken", ["_plan_load", "_loads.plan", "_trust.add", "_saves.add"])
def test_a_load_that_cannot_be_planned_is_reported_as_lost(
    stored: SchedulerSide, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """vLLM has allocated its blocks and relies on them, or waits for their load for ever."""
    one = loaded(stored)
    between = stored.match(one, 0)[1]
    breaks(monkeypatch, stored.requests.payloads, "load_moves")
    breaks(monkeypatch, stored, broken)
    stored.plan_load(one, [[5, 6, 9]], 64)
    plan = stored.plan_step(step({}, (), sync_loads=not between))
    assert plan.loads == ()
    assert plan.failed_loads == (FailedLoad("r", sync=not between, blocks=frozenset({5, 6, 9})),)
    assert stored.plan_step(step({}, ())).failed_loads == ()
    assert stored.finish(one, ([5, 6, 9],)) is False


def test_only_blocks_that_nobody_computed_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in vLLM's prefix cache, and other requests use them."""
    publish_prompt(index := MemoryIndex(), [7] * 70)
    side = scheduler_side(index, admission="always")
    one = request(70)
    assert ask(side, one, 32)[0] == 32
    monkeypatch.setattr(side, "_plan_load", lambda *_: 1 / 0)
    side.plan_load(one, [[5, 6, 0]], 32)
    assert [load.blocks for load in side.plan_step(step({}, ())).failed_loads] == [{6}]


@pytest.mark.parametrize("broken", ["_timing.step_planned", "_saves.plan", "_may_reuse", "_events"])
def test_whatever_fails_a_plan_contains_the_loads_on_which_vllm_relies(
    stored: SchedulerSide, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    one = loaded(stored)
    stored.plan_load(one, [[5, 6]], 64)
    with monkeypatch.context() as fault:
        breaks(fault, stored, broken)
        plan = stored.plan_step(step({}, (), sync_loads=True))
    (load,) = plan.loads
    assert load.moves.blocks_from(0) == {5, 6}
    assert plan.may_reuse  # unknown
    assert stored.plan_step(step({}, ())).loads == ()


@pytest.mark.parametrize("broken", ["_loads.request_ended", "requests.end"])
def test_if_it_fails_the_blocks_of_an_ended_request_are_kept_for_its_saves(
    side: SchedulerSide, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    admit(side, one := request())
    assert side.plan_step(whole([3, 4])).saves
    breaks(monkeypatch, side, broken)
    assert side.finish(one, ([3, 4],)) is True
    assert side.plan_step(step({}, ())).held == {"r"}


def test_a_load_that_failed_is_not_tried_again_even_if_its_report_cannot_be_read(
    stored: SchedulerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks again after a failure, and so for ever."""
    stored.plan_load(one := loaded(stored), [[5, 6]], 64)
    stored.plan_step(step({}, (), sync_loads=True))
    breaks(monkeypatch, stored, "requests.save_again")
    report = StepReport(failed={"r"})
    output = KVConnectorOutput(
        kv_connector_worker_meta=report, failed_recving={"r"}, finished_recving={"r"}
    )
    assert stored.update(output) == [one]
    assert stored.match(one, 0)[0] == 0


@pytest.mark.parametrize("has_peers", [False, True])
def test_only_an_empty_step_in_which_a_request_waits_for_its_lookup_waits_too(
    monkeypatch: pytest.MonkeyPatch, *, has_peers: bool
) -> None:
    """And not for long where data-parallel ranks make every step together."""
    roles = {"steps_in_flight": 2, "has_peers": has_peers}
    side = scheduler_side(index := HangingIndex(), roles=roles)
    waited: list[float] = []
    monkeypatch.setattr(side.lookups, "wait", waited.append)
    side.track(one := request())
    side.plan_step(step({}, ()))
    assert waited == [], "no request was delayed"
    assert side.match(one, 0)[0] is None
    side.plan_step(step({"other": 1}, [3]))
    assert waited == [], "another request computes"
    for _ in range(3):
        assert side.match(one, 0)[0] is None
        side.plan_step(step({}, ()))
    beside, *alone = waited
    assert beside < EMPTY_STEP_S, "the step before it may not have ended"
    if has_peers:
        assert max(waited) < EMPTY_STEP_S / 10
    else:
        assert alone == [EMPTY_STEP_S] * 2
    index.gate.set()
    wait_until(lambda: side.match(one, 0)[0] is not None)
    side.plan_step(step({}, ()))
    side.plan_step(step({}, ()))
    assert len(waited) <= 4
