"""``objkv.ops.top.rates``: what happened between two scrapes."""

import pytest

from objkv.ops.top.rates import Flow, ReplicaRow, row_of, total_of
from objkv.ops.top.scrape import Scrape


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
    return row_of("a:8000", before, now)


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
