"""A few rounds in each place; ``python -m tests.crash.run --rounds 1000`` is the long form."""

import time

import pytest

from tests.crash.agents import run_rounds
from tests.crash.places import folder_place, quick_place
from tests.crash.run import Open, run_place

pytestmark = pytest.mark.slow
FOREVER_S = 10_000.0


@pytest.mark.parametrize(
    ("open_place", "rounds"),
    [(folder_place, 12), (lambda: folder_place(own_index=True), 4), (quick_place, 4)],
    ids=("folder", "own-index", "servers"),
)
def test_what_was_killed_leaves_only_whole_payloads_and_sweepable_rest(
    open_place: Open, rounds: int
) -> None:
    _, seen = run_place(open_place, rounds, 7, time.monotonic() + FOREVER_S, quiet=True)
    assert seen.rounds.total() == rounds
    assert seen.kills > 0
    assert seen.indexed > 0


def test_killed_agents_and_workers_cost_loads_and_leak_no_memory() -> None:
    seen = run_rounds(14, 3, quiet=True)
    kinds = ("agent", "worker", "agent that saves", "worker that saves")
    joins = ("rank", "replica", "agent that joins")
    assert [seen[kind] for kind in kinds + joins] == [2] * 7
    assert seen["joins"] > 0
