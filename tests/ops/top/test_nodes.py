"""``objkv.ops.top.nodes``: what a node's agent did between two looks."""

import math

from objkv.agent.http.metrics import metrics_page
from objkv.cache.worth import Decision
from objkv.cli.top import node_cells
from objkv.ops.top.nodes import node_of
from objkv.ops.top.scrape import Scrape, values_of

GIB = 1 << 30
STATE = {"arena_bytes": 16 * GIB, "arena_free_bytes": 4 * GIB, "leased_bytes": GIB, "clients": 6}


def told(at_s: float, **numbers: float) -> Scrape:
    """A look at an agent's page with these counters."""
    return Scrape(at_s, values_of(metrics_page(STATE, numbers)))


def test_rates_are_from_one_look_to_the_next_and_levels_as_they_are() -> None:
    before = told(10, agent_hits=100, agent_fills=50, agent_prefetches=7)
    now = told(12, agent_hits=106, agent_fills=52, load_bytes=4096, agent_prefetches=9)
    first = node_of("n", None, before)
    assert (first.state, first.hit_rate, first.hits) == ("new", None, 0)
    row = node_of("n", before, now)
    assert (row.state, row.hits, row.fills, row.load_bytes) == ("up", 3, 1, 2048)
    assert (row.hit_rate, row.used_share, row.clients) == (0.75, 0.75, 6)
    assert (row.prefetches, row.leased_bytes) == (9, GIB)


def test_what_is_put_of_each_namespace_is_shown_with_its_break_even() -> None:
    decisions = {
        "f" * 32: Decision("all", 0.2, ""),
        "e" * 32: Decision("reused", None, ""),
        "d" * 32: Decision("reused", math.inf, ""),
    }
    page = metrics_page(STATE, {}, decisions)
    row = node_of("n", None, Scrape(1, values_of(page)))
    shown = ["ffffffff puts all 0.20", "eeeeeeee puts reused", "dddddddd puts reused"]
    assert [str(one) for one in row.puts] == shown
    page = metrics_page(STATE, {}, {"": Decision("all", 0.0, "")})
    (one,) = node_of("n", None, Scrape(1, values_of(page))).puts
    assert str(one) == "puts all 0.00"


def test_open_circuits_are_shown() -> None:
    page = told(1, breaker_open_bulk_write=1, breaker_open_bulk_read=0)
    row = node_of("n", None, page)
    assert row.breakers_open == ("bulk_write",)
    assert node_cells(row)[-1] == "circuit open: bulk write"


def test_an_agent_that_was_restarted_is_rated_from_0() -> None:
    row = node_of("n", told(10, agent_hits=100), told(12, agent_hits=4))
    assert (row.state, row.hits) == ("restarted", 2)


def test_a_node_that_is_down_or_something_else_has_no_figures() -> None:
    down = node_of("n", told(1), Scrape(2, {}, "refused"))
    assert (down.state, down.problem, down.used_share) == ("down", "refused", None)
    assert node_of("n", None, Scrape(2, {"up": 1.0})).state == "no agent"
