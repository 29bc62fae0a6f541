"""``objkv.ops.top.fleet``: replicas and agents from two scrapes."""

import math

import pytest

from objkv.agent.http.metrics import metrics_page
from objkv.cache.worth import Decision
from objkv.cli.top import agent_cells
from objkv.ops.top.fleet import Flow, ReplicaRow, agent_row, replica_row, total_of
from objkv.ops.top.scrape import Scrape, values_of


def scrape(at_s: float, **counters: float) -> Scrape:
    return Scrape(at_s, {f"vllm_objkv_{name}": value for name, value in counters.items()})


FIRST = scrape(10, query_tokens_total=1000, local_hit_tokens_total=0, hit_hot_tokens_total=0)
SECOND = scrape(
    12,
    query_tokens_total=2000,
    local_hit_tokens_total=200,
    hit_hot_tokens_total=100,
    hit_bulk_tokens_total=300,
    load_bytes_total=8192,
    save_accepted_bytes_total=1024,
    admission_refused_total=2,
    load_refused_total=2,
    load_failures_total=4,
    save_drops_total=6,
    saves_shed_total=2,
    lookup_seconds_count=10,
    lookup_seconds_sum=0.02,
)


def row(before: Scrape | None, now: Scrape) -> ReplicaRow:
    return replica_row("a:8000", before, now)


def test_counters_become_rates() -> None:
    found = row(FIRST, SECOND)
    assert (found.state, found.problem) == ("up", None)
    flow = found.flow
    assert (flow.local_tokens, flow.hot_tokens, flow.bulk_tokens) == (100, 50, 150)
    assert flow.computed_tokens == (1000 - 600) / 2
    assert (flow.load_bytes, flow.save_bytes) == (4096, 512)
    assert (flow.refusals, flow.misses, flow.drops) == (2, 2, 4)
    assert flow.lookup_ms == pytest.approx(2)
    assert flow.load_ms is None


def test_the_hit_rate_is_of_what_the_replica_did_not_have_itself() -> None:
    assert row(FIRST, SECOND).flow.hit_rate == pytest.approx(200 / 400)
    assert Flow().hit_rate is None
    assert Flow(local_tokens=5).hit_rate is None


def test_the_first_scrape_tells_no_rates() -> None:
    found = row(None, SECOND)
    assert (found.state, found.flow) == ("new", Flow())


def test_a_replica_that_began_again_did_what_it_tells_now() -> None:
    found = row(SECOND, scrape(14, query_tokens_total=100, hit_bulk_tokens_total=40))
    assert found.state == "restarted"
    assert (found.flow.bulk_tokens, found.flow.computed_tokens) == (20, 30)


def test_one_that_does_not_answer_is_down_with_the_reason() -> None:
    found = row(FIRST, Scrape(12, {}, "refused"))
    assert (found.state, found.problem, found.flow) == ("down", "refused", Flow())


def test_a_fleet_is_the_sum() -> None:
    rows = [row(FIRST, SECOND), row(FIRST, SECOND), row(None, Scrape(1, {}, "down"))]
    total = total_of(rows)
    assert total.tokens == 2 * rows[0].flow.tokens
    assert total.hit_rate == rows[0].flow.hit_rate
    assert total.lookup_ms == pytest.approx(2)


GIB = 1 << 30
STATE = {
    "arena_bytes": 16 * GIB,
    "arena_free_bytes": 4 * GIB,
    "leased_bytes": GIB,
    "clients": 6,
    "unsaved_bytes": 4096,
}


def page_of(at_s: float, **numbers: float) -> Scrape:
    """A look at an agent's page with these counters."""
    return Scrape(at_s, values_of(metrics_page(STATE, numbers)))


def test_rates_are_from_one_look_to_the_next_and_levels_as_they_are() -> None:
    before = page_of(10, agent_hits=100, agent_fills=50)
    now = page_of(12, agent_hits=106, agent_fills=52, load_bytes=4096)
    first = agent_row("n", None, before)
    assert (first.state, first.hit_rate, first.hits) == ("new", None, 0)
    row = agent_row("n", before, now)
    assert (row.state, row.hits, row.fills, row.load_bytes) == ("up", 3, 1, 2048)
    assert (row.hit_rate, row.used_share, row.clients) == (0.75, 0.75, 6)
    assert (row.leased_bytes, row.held_back_bytes) == (GIB, 4096)


def test_what_is_put_of_each_namespace_is_shown_with_its_break_even() -> None:
    decisions = {
        "f" * 32: Decision("all", 0.2, ""),
        "e" * 32: Decision("reused", None, ""),
        "d" * 32: Decision("reused", math.inf, ""),
    }
    page = metrics_page(STATE, {}, decisions)
    row = agent_row("n", None, Scrape(1, values_of(page)))
    shown = ["ffffffff saves all 0.20", "eeeeeeee saves reused", "dddddddd saves reused"]
    assert [str(one) for one in row.policies] == shown
    page = metrics_page(STATE, {}, {"": Decision("all", 0.0, "")})
    (one,) = agent_row("n", None, Scrape(1, values_of(page))).policies
    assert str(one) == "saves all 0.00"


def test_open_circuits_are_shown() -> None:
    page = page_of(1, breaker_open_bulk_write=1, breaker_open_bulk_read=0)
    row = agent_row("n", None, page)
    assert row.breakers_open == ("bulk_write",)
    assert agent_cells(row)[2] == "circuit open: bulk write"


def test_an_agent_that_was_restarted_is_rated_from_0() -> None:
    row = agent_row("n", page_of(10, agent_hits=100), page_of(12, agent_hits=4))
    assert (row.state, row.hits) == ("restarted", 2)


def test_a_node_that_is_down_or_something_else_has_no_figures() -> None:
    down = agent_row("n", page_of(1), Scrape(2, {}, "refused"))
    assert (down.state, down.problem, down.used_share) == ("down", "refused", None)
    assert agent_row("n", None, Scrape(2, {"up": 1.0})).state == "no agent"
