"""How steps and loads are timed, and where an admitted load ends."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from objkv.cache.admission import AdmissionPolicy, ChunkSize, LoadTime, Tier
from objkv.connector.kv.loads import PromisedLoads, Timing
from objkv.connector.kv.metadata import StepReport
from objkv.connector.kv.planning import StoredPayloads
from objkv.connector.model.groups import Geometry
from objkv.index.base import Savings, ShardRecord
from objkv.keys.identity import GroupIdentity
from objkv.transfer.plan import ChunkMove, LoadPlan
from tests.contracts.clock import ManualClock
from tests.support.plans import LoadMove, packed

GROUP = GroupIdentity("full", None, ("a",), heads=2, content=16, block_size=16)
COLD = ShardRecord(100, 100, True, False, "0" * 32, 1)
HOT = ShardRecord(100, 100, True, True, "0" * 32, 1)


class Notes:
    """An admission that records its calls and admits ``limit`` chunks."""

    def __init__(self, limit: int = 10**6) -> None:
        self.limit = limit
        self.decided: bool | None = None
        self.steps: list[tuple[int, float]] = []
        self.loads: list[tuple[Tier, int, LoadTime]] = []
        self.asked: list[ChunkSize] = []
        self.waiting = 0
        self.seconds_per_token: float | None = None

    def computed(self, tokens: int, seconds: float) -> None:
        self.steps.append((tokens, seconds))

    def loaded(self, tier: Tier, nbytes: int, load: LoadTime) -> None:
        self.loads.append((tier, nbytes, load))

    def admit(self, chunks: list[ChunkSize], *, waiting: int) -> int:
        self.asked, self.waiting = list(chunks), waiting
        return min(self.limit, len(chunks))


class TimedLoads:
    """Loads and steps of a replica, and their times."""

    def __init__(
        self, limit: int = 10**6, *, tp_size: int = 1, nodes: int = 1, **clocks: Any
    ) -> None:
        geometry = Geometry((GROUP,), 64, block_tokens=16, tp_size=tp_size, nodes=nodes)
        self.notes, self.clock = Notes(limit), ManualClock()
        self.timing = Timing(
            cast("AdmissionPolicy", self.notes),
            StoredPayloads(geometry),
            steps_in_flight=2,
            clock=self.clock,
            **clocks,
        )
        self.loads = PromisedLoads(16, 1.0)

    def planned(self, *plans: tuple[LoadPlan, Sequence[ShardRecord]], tokens: int = 64) -> None:
        """A step has these loads."""
        for plan, records in plans:
            self.loads.plan(plan, tokens, records)
        self.loads.send()

    def told(self, *received: str, **report: Any) -> list[Savings]:
        """The workers report something, and some loads have ended on all of them."""
        ended = self.loads.ended(StepReport(**report), received)
        return [saved for load in ended if (saved := self.timing.loaded(load)) is not None]

    def run(self, scheduled: list[int], seconds: float, *, waits: bool = False) -> None:
        """One step with nothing before it."""
        self.timing.step_planned(scheduled, waits=waits)
        self.clock.advance(seconds)
        self.timing.step_ended()

    def assert_steps(self, *steps: tuple[int, float]) -> None:
        assert self.notes.steps == [(tokens, pytest.approx(seconds)) for tokens, seconds in steps]


@pytest.fixture
def world() -> TimedLoads:
    return TimedLoads()


def plan(
    request_id: str, *records: ShardRecord, sync: bool = False
) -> tuple[LoadPlan, Sequence[ShardRecord]]:
    name = bytes(20)
    move = ChunkMove(0, 0, name, name, 0, 64, 0, (1,))
    moves = packed([LoadMove(move, None)] * len(records))
    return LoadPlan(request_id, "n" * 32, moves, sync), records


def test_a_step_takes_from_its_plan_or_the_end_of_the_one_before_to_its_result(
    world: TimedLoads,
) -> None:
    world.run([512], 0.5)
    world.clock.advance(60)  # idle: of no request
    world.timing.step_planned([512], waits=False)
    world.clock.advance(0.1)
    world.timing.step_planned([256], waits=False)
    for seconds in (0.4, 0.2):
        world.clock.advance(seconds)
        world.timing.step_ended()
    world.assert_steps((512, 0.5), (512, 0.5), (256, 0.2))


def test_a_load_is_told_for_the_tier_that_all_of_it_came_from(world: TimedLoads) -> None:
    """One from both tells of bulk with the bytes from there: where every prompt begins with the
    same hot chunks, nothing else ever would."""
    load = LoadTime(1.0, 0.5)
    world.planned(plan("hot", HOT, HOT), plan("cold", COLD), plan("both", HOT, COLD, HOT, HOT))
    names = ("hot", "cold", "nobody")
    world.told(*names, loaded=dict.fromkeys(names, load))
    world.told("hot", "both", loaded=dict.fromkeys(["hot", "both"], load))
    assert world.notes.loads == [("hot", 200, load), ("bulk", 100, load), ("bulk", 100, load)]


def test_a_load_is_credited_with_the_computing_that_it_replaced() -> None:
    world = TimedLoads(tp_size=2, wall=lambda: 1_795_300_000.0)

    def saved(request_id: str, tokens: int, *, sync: bool = False) -> list[Savings]:
        world.planned(plan(request_id, COLD, sync=sync), tokens=tokens)
        found = world.told(loaded={request_id: LoadTime(0.25, 0.1)})
        assert bool(found) is sync  # it is over when it is reported
        return found + world.told(request_id)

    name, month = "n" * 32, "2026-11"
    assert saved("unmeasured", 48) == [Savings(name, month, loads=1, tokens=48)]
    world.notes.seconds_per_token = 0.01
    assert saved("between", 64) == [
        Savings(name, month, 1, 64, 64, compute_gpu_us=1_280_000, load_gpu_us=500_000)
    ]
    assert saved("within", 32, sync=True) == [
        Savings(name, month, 1, 32, 32, compute_gpu_us=640_000, load_gpu_us=500_000)
    ]
    world.planned(plan("failed", COLD))
    assert world.told(failed={"failed"}) + world.told("failed") == []


def test_a_step_that_mostly_generates_says_nothing_of_prompts(world: TimedLoads) -> None:
    """Each of its tokens takes as long as a hundred of a prompt."""
    for scheduled in ([1] * 256, [1] * 256 + [100], [1] * 256 + [2_000]):
        world.run(scheduled, 0.1)
    world.assert_steps((0, 0.1), (0, 0.1), (2_000, 0.1))


def test_a_step_that_waited_for_loads_says_nothing_of_computing(world: TimedLoads) -> None:
    """A slow store would make computing look slow, and so keep itself in use."""
    for seconds, waits in ((5, True), (0.1, False)):
        world.run([512], seconds, waits=waits)
    world.assert_steps((0, 5), (512, 0.1))


def test_a_load_that_failed_or_whose_request_ended_teaches_nothing(world: TimedLoads) -> None:
    load = LoadTime(1.0, 0.5)
    world.planned(plan("failed", COLD), plan("ended", COLD))
    world.loads.request_ended("ended")
    world.told(failed={"failed"})
    world.told("failed", "ended", loaded={"failed": load, "ended": load})
    assert world.notes.loads == []


def test_a_worker_that_ends_its_part_in_an_earlier_step_does_not_speak_for_the_slower() -> None:
    world = TimedLoads(tp_size=2)
    world.planned(plan("r", COLD))
    quick, slow = LoadTime(1.0, 0.5), LoadTime(2.0, 0.1)
    for time in (quick, slow, quick):
        world.told(loaded={"r": time})
    assert world.notes.loads == []
    world.told("r")
    world.told("r")
    assert world.notes.loads == [("bulk", 100, slow)]


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
    world = TimedLoads(limit)
    found = [{"0": COLD}] * 4 + [None]
    assert world.timing.admit(found, computed, end, waiting=3) == expected
    assert sum(chunk.tokens for chunk in world.notes.asked) == end - computed
    assert world.notes.waiting == 3


def test_all_payloads_of_a_chunk_count_and_one_that_is_cold_makes_it_bulk() -> None:
    world = TimedLoads(tp_size=2, nodes=2)
    for other, tier in ((HOT, "hot"), (COLD, "bulk")):
        world.timing.admit([{"0.L0-1_H0-1": HOT, "0.L0-1_H1-2": other}], 0, 64)
        assert world.notes.asked == [ChunkSize(200, 64, cast("Tier", tier))]
