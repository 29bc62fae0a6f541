"""How steps and loads are timed, and where an admitted load ends."""

from typing import cast

import pytest

from objkv.cache.admission import AdmissionPolicy, ChunkSize, LoadTime, Tier
from objkv.connector.kv.metadata import StepReport
from objkv.connector.kv.timing import Timing
from objkv.connector.model.groups import Geometry
from objkv.index.base import Savings, ShardRecord
from objkv.keys.identity import GroupIdentity
from objkv.transfer.plan import ChunkMove, LoadMove, LoadPlan
from tests.contracts.clock import ManualClock

GROUP = GroupIdentity("full", None, ("a",), heads=2, content=16, block_size=16)
COLD = ShardRecord(100, 100, "none", False, "0" * 32, 1)
HOT = ShardRecord(100, 100, "none", True, "0" * 32, 1)


class Notes:
    """An admission that notes what it is told, and admits ``limit`` chunks."""

    def __init__(self, limit: int = 10**6) -> None:
        self.limit = limit
        self.decided: bool | None = None
        self.steps: list[tuple[int, float]] = []
        self.loads: list[tuple[Tier, LoadTime]] = []
        self.asked: list[ChunkSize] = []
        self.waiting = 0
        self.seconds_per_token: float | None = None

    def computed(self, tokens: int, seconds: float) -> None:
        self.steps.append((tokens, seconds))

    def loaded(self, tier: Tier, load: LoadTime) -> None:
        self.loads.append((tier, load))

    def admit(self, chunks: list[ChunkSize], *, waiting: int) -> int:
        self.asked, self.waiting = list(chunks), waiting
        return min(self.limit, len(chunks))


def timing_of(notes: Notes, clock: ManualClock, *, tp_size: int = 1, in_flight: int = 2) -> Timing:
    geometry = Geometry((GROUP,), chunk_tokens=64, block_tokens=16, tp_size=tp_size)
    return Timing(cast("AdmissionPolicy", notes), geometry, steps_in_flight=in_flight, clock=clock)


def plan(request_id: str, *records: ShardRecord, sync: bool = False) -> LoadPlan:
    name = bytes(20)
    move = ChunkMove(0, 0, name, name, 0, 64, 0, (1,))
    moves = [LoadMove(move, (("0.L0-1_H0-2", one),)) for one in records]
    return LoadPlan(request_id, "n" * 32, moves, sync)


def told(timing: Timing, loaded: dict[str, LoadTime]) -> None:
    timing.reported(StepReport(loaded=loaded))
    for request_id in loaded:
        timing.received(request_id)


def test_a_step_takes_from_its_plan_to_its_result() -> None:
    notes, clock = Notes(), ManualClock()
    timing = timing_of(notes, clock)
    timing.step_planned([512], ())
    clock.advance(0.5)
    timing.step_ended()
    clock.advance(60)  # idle: nobody's
    timing.step_planned([100], ())
    clock.advance(0.25)
    timing.step_ended()
    assert notes.steps == [(512, pytest.approx(0.5)), (100, pytest.approx(0.25))]


def test_a_step_planned_while_another_ran_counts_from_that_ones_end() -> None:
    notes, clock = Notes(), ManualClock()
    timing = timing_of(notes, clock)
    timing.step_planned([512], ())
    clock.advance(0.1)
    timing.step_planned([256], ())
    clock.advance(0.4)
    timing.step_ended()
    clock.advance(0.2)
    timing.step_ended()
    assert notes.steps == [(512, pytest.approx(0.5)), (256, pytest.approx(0.2))]


def test_a_load_is_told_for_the_tier_that_all_of_it_came_from() -> None:
    notes = Notes()
    timing = timing_of(notes, ManualClock())
    timing.step_planned([0], [plan("hot", HOT, HOT), plan("cold", COLD)])
    load = LoadTime(100, 1.0, 0.5)
    told(timing, dict.fromkeys(("hot", "cold", "nobody"), load))
    told(timing, {"hot": load})
    assert notes.loads == [("hot", load), ("bulk", load)]


def test_a_load_from_both_tiers_tells_of_bulk_with_the_bytes_that_came_from_there() -> None:
    """Where every prompt begins with the same hot chunks, nothing else ever would."""
    notes = Notes()
    timing = timing_of(notes, ManualClock())
    timing.step_planned([0], [plan("both", HOT, COLD, HOT, HOT)])
    told(timing, {"both": LoadTime(400, 1.0, 0.5)})
    assert notes.loads == [("bulk", LoadTime(100, 1.0, 0.5))]


def test_a_load_is_credited_with_the_computing_that_it_replaced() -> None:
    notes = Notes()
    geometry = Geometry((GROUP,), chunk_tokens=64, block_tokens=16, tp_size=2)
    admission = cast("AdmissionPolicy", notes)
    timing = Timing(admission, geometry, steps_in_flight=2, wall=lambda: 1_795_300_000.0)

    def load(request_id: str, *, planned: int, sync: bool = False) -> None:
        timing.load_planned(request_id, planned)
        timing.step_planned([0], [plan(request_id, COLD, sync=sync)])
        told(timing, {request_id: LoadTime(100, 0.25, 0.1)})

    load("unmeasured", planned=48)
    notes.seconds_per_token = 0.01
    load("between", planned=64)
    load("within", planned=32, sync=True)
    timing.load_planned("failed", 64)
    timing.step_planned([0], [plan("failed", COLD)])
    timing.reported(StepReport(failed={"failed"}))
    timing.received("failed")
    name, month = "n" * 32, "2026-11"
    assert timing.take_savings() == [
        Savings(name, month, loads=1, tokens=48),
        Savings(name, month, 1, 64, 64, compute_gpu_us=1_280_000, load_gpu_us=500_000),
        Savings(name, month, 1, 32, 32, compute_gpu_us=640_000, load_gpu_us=500_000),
    ]
    assert timing.take_savings() == []


def test_a_step_that_mostly_generates_says_nothing_of_prompts() -> None:
    """Each of its tokens takes as long as a hundred of a prompt."""
    notes, clock = Notes(), ManualClock()
    timing = timing_of(notes, clock)
    for scheduled in ([1] * 256, [1] * 256 + [100], [1] * 256 + [2_000]):
        timing.step_planned(scheduled, ())
        clock.advance(0.1)
        timing.step_ended()
    assert notes.steps == [(tokens, pytest.approx(0.1)) for tokens in (0, 0, 2_000)]


def test_a_step_that_waited_for_loads_says_nothing_of_computing() -> None:
    """A slow store would make computing look slow, and so keep itself in use."""
    notes, clock = Notes(), ManualClock()
    timing = timing_of(notes, clock)
    timing.step_planned([512], [plan("within", COLD, sync=True)])
    clock.advance(5)
    timing.step_ended()
    timing.step_planned([512], [plan("between", COLD)])
    clock.advance(0.1)
    timing.step_ended()
    assert notes.steps == [(0, pytest.approx(5)), (512, pytest.approx(0.1))]


def test_a_load_that_failed_or_whose_request_ended_teaches_nothing() -> None:
    notes = Notes()
    timing = timing_of(notes, ManualClock())
    timing.step_planned([0], [plan("failed", COLD), plan("ended", COLD)])
    timing.request_ended("ended")
    load = LoadTime(100, 1.0, 0.5)
    timing.reported(StepReport(failed={"failed"}))
    told(timing, {"failed": load, "ended": load})
    assert notes.loads == []


def test_a_worker_that_ends_its_part_in_an_earlier_step_does_not_speak_for_the_slower_ones() -> (
    None
):
    notes = Notes()
    timing = timing_of(notes, ManualClock(), tp_size=2)
    timing.step_planned([0], [plan("r", COLD)])
    quick, slow = LoadTime(100, 1.0, 0.5), LoadTime(90, 2.0, 0.1)
    for time in (quick, slow, quick):
        timing.reported(StepReport(loaded={"r": time}))
    assert notes.loads == []
    timing.received("r")
    timing.received("r")
    assert notes.loads == [("bulk", slow)]


def test_a_load_within_the_step_is_over_when_it_is_reported() -> None:
    notes = Notes()
    timing = timing_of(notes, ManualClock())
    timing.step_planned([512], [plan("r", COLD, sync=True)])
    timing.reported(StepReport(loaded={"r": LoadTime(100, 1.0, 0.5)}))
    assert notes.loads == [("bulk", LoadTime(100, 1.0, 0.5))]


@pytest.mark.parametrize(
    ("limit", "computed", "end", "expected"),
    [
        (9, 0, 256, 256),
        (0, 0, 256, 0),
        (2, 0, 256, 128),
        (0, 96, 256, 96),
        (1, 96, 256, 128),
        (2, 96, 256, 192),
        (9, 96, 250, 250),
    ],
)
def test_a_load_ends_at_the_end_of_a_chunk_or_of_the_match(
    limit: int, computed: int, end: int, expected: int
) -> None:
    notes = Notes(limit)
    timing = timing_of(notes, ManualClock())
    found = [{"0.L0-1_H0-2": COLD}] * 4 + [None]
    assert timing.admit(found, computed, end) == expected
    assert sum(chunk.tokens for chunk in notes.asked) == end - computed


def test_who_waits_is_told() -> None:
    notes = Notes()
    timing_of(notes, ManualClock()).admit([{"0.L0-1_H0-2": COLD}], 0, 64, waiting=3)
    assert notes.waiting == 3


def test_ranks_share_a_chunks_bytes_and_one_cold_shard_makes_it_bulk() -> None:
    notes = Notes()
    timing = timing_of(notes, ManualClock(), tp_size=2)
    timing.admit([{"0.L0-1_H0-1": HOT, "0.L0-1_H1-2": HOT}], 0, 64)
    assert notes.asked == [ChunkSize(100, 64, "hot")]
    timing.admit([{"0.L0-1_H0-1": HOT, "0.L0-1_H1-2": COLD}], 0, 64)
    assert notes.asked == [ChunkSize(100, 64, "bulk")]


@pytest.mark.parametrize(("heads", "tp_size", "expected"), [(1, 8, 800), (4, 8, 200), (8, 8, 100)])
def test_what_several_ranks_hold_alike_each_of_them_loads(
    heads: int, tp_size: int, expected: int
) -> None:
    group = GroupIdentity("full", None, ("a",), heads=heads, content=16, block_size=16)
    geometry = Geometry((group,), chunk_tokens=64, block_tokens=16, tp_size=tp_size)
    notes, fields = Notes(), sorted(geometry.all_fields())
    timing = Timing(cast("AdmissionPolicy", notes), geometry, steps_in_flight=1)
    shard = ShardRecord(800 // len(fields), 1, "none", False, "0" * 32, 1)
    timing.admit([dict.fromkeys(fields, shard)], 0, 64)
    assert notes.asked == [ChunkSize(expected, 64, "bulk")]
