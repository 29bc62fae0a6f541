"""A few rounds in each place; ``python -m tests.crash.run --rounds 1000`` is the long form."""

import pytest

from tests.crash.agents import run_rounds
from tests.crash.run import run_place

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("place", "rounds"), [("folder", 12), ("own-index", 4), ("servers", 4)])
def test_what_was_killed_leaves_only_whole_payloads_and_sweepable_rest(
    place: str, rounds: int
) -> None:
    seen = run_place(place, rounds, 7)
    assert seen.rounds.total() == rounds
    assert seen.kills > 0
    assert seen.indexed > 0


def test_killed_agents_and_workers_cost_loads_and_leak_no_memory() -> None:
    seen = run_rounds(14, 3)
    kinds = ("agent", "worker", "agent that saves", "worker that saves")
    joins = ("rank", "replica", "agent that joins")
    assert [seen[kind] for kind in kinds + joins] == [2] * 7
    assert seen["joins"] > 0
