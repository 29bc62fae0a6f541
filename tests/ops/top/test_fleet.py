"""``objkv.ops.top.fleet``: replicas and agents from two scrapes."""

import pytest

from objkv.agent.http.metrics import PREFIX, metrics_page
from objkv.cli.top import agent_cells, replica_cells
from objkv.connector.counters import COUNTERS
from objkv.ops.top.fleet import AGENT, REPLICA, Row, hit_rate, row_of, total_of
from objkv.ops.top.scrape import Scrape, values_of


def scrape(at_s: float, **counters: float) -> Scrape:
    return Scrape(at_s, {f"vllm_objkv_{name}_total": value for name, value in counters.items()})


FIRST = scrape(10, query_tokens=1000, local_hit_tokens=0, hit_hot_tokens=0)
SECOND = scrape(
    12,
    query_tokens=2000,
    local_hit_tokens=200,
    hit_hot_tokens=100,
    hit_bulk_tokens=300,
    load_bytes=8192,
    save_accepted_bytes=1024,
    admission_refused=2,
    load_refused=2,
    load_failures=4,
    save_drops=6,
    saves_shed=2,
    lookup_deadlines=8,
    lookup_errors=10,
)


def row(before: Scrape | None, now: Scrape) -> Row:
    return row_of(REPLICA, "a:8000", before, now)


def test_every_counter_that_is_shown_exists() -> None:
    assert {name for names in REPLICA.counters.values() for name in names} <= COUNTERS.keys()
    assert AGENT.prefix == PREFIX


def test_counters_become_rates() -> None:
    found = row(FIRST, SECOND)
    assert (found.state, found.problem) == ("up", None)
    assert found.values == {
        "tokens": 500,
        "local_tokens": 100,
        "hot_tokens": 50,
        "bulk_tokens": 150,
        "load_bytes": 4096,
        "save_bytes": 512,
        "refused": 1,
        "late_lookups": 4,
        "failed_lookups": 5,
        "failed_loads": 2,
        "queue_full": 1,
        "drops": 4,
        "switched": 0,
    }


def test_reasons_for_computing_what_is_stored_are_shown() -> None:
    shown = replica_cells(row(FIRST, SECOND))[2]
    assert shown == (
        "faster to compute 1, late lookups 4, failed lookups 5, failed loads 2, queue full 1"
    )
    assert replica_cells(row(FIRST, scrape(12, query_tokens=3000)))[2] == ""


def test_the_hit_rate_is_of_what_the_replica_did_not_have_itself() -> None:
    assert hit_rate(row(FIRST, SECOND).values) == pytest.approx(200 / 400)
    assert hit_rate(total_of([])) is None
    assert hit_rate(row(FIRST, scrape(12, query_tokens=1005, local_hit_tokens=5)).values) is None


def test_the_first_scrape_tells_no_rates() -> None:
    found = row(None, SECOND)
    assert (found.state, set(found.values.values())) == ("new", {0.0})


def test_a_replica_that_began_again_did_what_it_tells_now() -> None:
    found = row(SECOND, scrape(14, query_tokens=100, hit_bulk_tokens=40))
    assert found.state == "restarted"
    assert (found.values["bulk_tokens"], found.values["tokens"]) == (20, 50)


def test_one_that_does_not_answer_is_down_with_the_reason() -> None:
    found = row(FIRST, Scrape(12, {}, "refused"))
    assert (found.state, found.problem, found.values) == ("down", "refused", {})


def test_a_fleet_is_the_sum() -> None:
    rows = [row(FIRST, SECOND), row(FIRST, SECOND), row(None, Scrape(1, {}, "down"))]
    total = total_of(rows)
    assert total["tokens"] == 2 * rows[0].values["tokens"]
    assert hit_rate(total) == hit_rate(rows[0].values)


GIB = 1 << 30
STATE = {"arena_bytes": 16 * GIB, "arena_free_bytes": 4 * GIB, "clients": 6, "unsaved_bytes": 4096}


def page_of(at_s: float, **numbers: float) -> Scrape:
    """A look at an agent's page with these counters."""
    return Scrape(at_s, values_of(metrics_page(STATE, numbers)))


def test_an_agents_rates_are_from_one_look_to_the_next_and_levels_as_they_are() -> None:
    before = page_of(10, agent_hits=100, agent_fills=50)
    now = page_of(12, agent_hits=106, agent_fills=52, load_bytes=4096)
    first = row_of(AGENT, "n", None, before)
    assert (first.state, first.values["hits"]) == ("new", 0)
    cells = agent_cells(row_of(AGENT, "n", before, now))
    assert cells[1:] == ["up", "", "16.0 GiB", "75%", "4.0 KiB", "75%", "2.0 KiB", "0", "0", "6"]
    restarted = row_of(AGENT, "n", now, page_of(14, agent_hits=4))
    assert (restarted.state, restarted.values["hits"]) == ("restarted", 2)


def test_open_circuits_are_shown() -> None:
    page = page_of(1, breaker_open_bulk_write=1, breaker_open_bulk_read=0)
    found = row_of(AGENT, "n", None, page)
    assert found.breakers_open == ("bulk_write",)
    assert agent_cells(found)[2] == "circuit open: bulk write"


def test_a_node_that_is_down_or_something_else_has_no_figures() -> None:
    down = row_of(AGENT, "n", page_of(1), Scrape(2, {}, "refused"))
    assert agent_cells(down) == ["n", "down", "refused", *[""] * 8]
    assert row_of(AGENT, "n", None, Scrape(2, {"up": 1.0})).state == "no agent"
