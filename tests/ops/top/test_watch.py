"""``objkv.ops.top.fleet``: a whole fleet."""

from collections.abc import Callable

import httpx

from objkv.index.base import Usage
from objkv.ops.top.fleet import FleetWatch, StoredTotals, hit_rate
from objkv.ops.top.scrape import MetricsSource
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex


def source(name: str, clock: ManualClock, text: Callable[[], str]) -> MetricsSource:
    def handler(request: httpx.Request) -> httpx.Response:
        told = text()
        if not told:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, text=told)

    return MetricsSource(name, deadline_s=60, clock=clock, transport=httpx.MockTransport(handler))


def counters(queries: float, hits: float) -> str:
    return (
        "# TYPE vllm:objkv_query_tokens_total counter\n"
        f"vllm:objkv_query_tokens_total {queries}\n"
        "# TYPE vllm:objkv_hit_bulk_tokens_total counter\n"
        f"vllm:objkv_hit_bulk_tokens_total {hits}\n"
    )


def test_rates_are_from_one_look_to_the_next() -> None:
    clock, told = ManualClock(0.0), {"a": counters(0, 0), "b": counters(0, 0)}
    sources = [source(name, clock, lambda name=name: told[name]) for name in told]
    with FleetWatch(sources) as watch:
        assert [row.state for row in watch.tick().rows] == ["new", "new"]
        clock.now_s, told["a"], told["b"] = 2.0, counters(100, 50), counters(100, 0)
        view = watch.tick()
    assert [hit_rate(row.values) for row in view.rows] == [0.5, 0.0]
    assert (view.total["tokens"], view.hit_rate) == (100, 0.25)


def test_totals_are_since_each_process_started() -> None:
    clock = ManualClock(0.0)
    with FleetWatch([source("a", clock, lambda: counters(100, 50))]) as watch:
        [row] = watch.totals().rows
    assert (row.state, row.values["tokens"], hit_rate(row.values)) == ("up", 100, 0.5)


def test_the_index_is_asked_once_and_0_is_never_said_to_be_stored() -> None:
    clock, index = ManualClock(0.0), MemoryIndex()
    with FleetWatch([source("a", clock, lambda: counters(0, 0))], index=index) as watch:
        assert watch.totals().stored is None, "totals may follow saves by seconds"
    usages = [[Usage("a", 7, 1, 0)], []]
    index.usage = lambda: usages.pop(0)  # type: ignore[method-assign]
    with FleetWatch([source("a", clock, lambda: counters(0, 0))], index=index) as watch:
        stored = watch.totals().stored
        assert stored == StoredTotals(7, 1, 1)
        assert watch.tick().stored == stored
