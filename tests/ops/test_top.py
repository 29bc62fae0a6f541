"""``objkv.ops.top``: one look at one endpoint, what two looks come to, and a whole fleet."""

from collections.abc import Callable, Iterator
from contextlib import closing

import httpx
import pytest

from objkv.agent.http.metrics import PREFIX, metrics_page
from objkv.cli.top import agent_cells, replica_cells
from objkv.connector.counters import COUNTERS
from objkv.index.base import Usage
from objkv.ops import top
from objkv.ops.top import (
    AGENT,
    REPLICA,
    FleetWatch,
    MetricsSource,
    Scrape,
    StoredTotals,
    TopRow,
    hit_rate,
    row_of,
    total_of,
    values_of,
)
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex

TEXT = """\
# TYPE vllm:objkv_hit_tokens_total counter
vllm:objkv_hit_tokens_total{engine="0",model_name="m"} 3.0
vllm:objkv_hit_tokens_total{engine="1",model_name="m"} 4.0
# TYPE vllm:objkv_lookup_seconds histogram
vllm:objkv_lookup_seconds_bucket{le="+Inf"} 5.0
vllm:objkv_lookup_seconds_sum 0.25
vllm:objkv_lookup_seconds_count 5.0
# TYPE objkv_up gauge
objkv_up{end="bulk"} 1.0
objkv_up{end="index"} 0.0
# TYPE odd gauge
odd NaN
odder +Inf
"""


def source_that(answer: httpx.Response | Exception, **settings: float) -> MetricsSource:
    def handler(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return MetricsSource(
        "http://user:hidden@replica:8000",
        deadline_s=settings.get("deadline_s", 1.0),
        clock=lambda: 7.0,
        transport=httpx.MockTransport(handler),
    )


def test_values_are_summed_over_engines() -> None:
    values = values_of(TEXT)
    assert not {"odd", "odder"} & values.keys(), "what is no number is left out"
    assert values["vllm_objkv_hit_tokens_total"] == 7
    assert (values["vllm_objkv_lookup_seconds_sum"], values["vllm_objkv_lookup_seconds_count"]) == (
        0.25,
        5,
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(404, text="no"), "HTTP 404"),
        (httpx.Response(302, headers={"location": "http://elsewhere"}), "HTTP 302"),
        (httpx.Response(200, text="<html> }{"), "no metrics"),
        (httpx.Response(200, content=b"\xff\xfe"), "no metrics"),
        (httpx.Response(200, text="# TYPE \u2028 counter\n"), "no metrics"),
        (httpx.ConnectError("refused"), "refused"),
        (httpx.ConnectError("[Errno -2] Name or service not known"), "Name or service"),
        (httpx.ReadTimeout(""), "ReadTimeout"),
        (httpx.RemoteProtocolError("http://user:hidden@x broke"), "broke"),
    ],
)
def test_what_goes_wrong_is_a_sentence_and_no_values(
    answer: httpx.Response | Exception, words: str
) -> None:
    found = source_that(answer).scrape()
    assert not found.values
    assert found.problem is not None
    assert words in found.problem
    assert "hidden" not in found.problem
    assert "Errno" not in found.problem


def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "ANSWER_BYTES_MAX", 1 << 20)

    def endless() -> Iterator[bytes]:
        while True:
            yield b"# " + b"x" * 65_536 + b"\n"

    found = source_that(httpx.Response(200, content=endless())).scrape()
    assert found.problem == "no metrics: more than 1 MiB"


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


def row(before: Scrape | None, now: Scrape) -> TopRow:
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
        "faster to compute 1, late lookups 4, failed lookups 5, failed loads 2, "
        "queue or memory full 1"
    )
    assert replica_cells(row(FIRST, scrape(12, query_tokens=3000)))[2] == ""


def test_the_hit_rate_is_of_what_the_replica_did_not_have_itself() -> None:
    assert hit_rate(row(FIRST, SECOND).values) == pytest.approx(200 / 400)
    assert hit_rate(total_of([])) is None
    assert hit_rate(row(FIRST, scrape(12, query_tokens=1005, local_hit_tokens=5)).values) is None


def test_a_replica_that_began_again_did_what_it_tells_now() -> None:
    found = row(SECOND, scrape(14, query_tokens=100, hit_bulk_tokens=40))
    assert found.state == "restarted"
    assert (found.values["bulk_tokens"], found.values["tokens"]) == (20, 50)


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
    assert cells[1:] == ["up", "", "16.0 GiB", "75 %", "4.0 KiB", "75 %", "2.0 KiB", "0", "0", "6"]
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
    with closing(FleetWatch(sources)) as watch:
        rows = watch.look(since_start=False).rows
        assert [(row.state, set(row.values.values())) for row in rows] == [("new", {0.0})] * 2
        clock.now_s, told["a"], told["b"] = 2.0, counters(100, 50), counters(100, 0)
        view = watch.look(since_start=False)
    assert [hit_rate(row.values) for row in view.rows] == [0.5, 0.0]
    assert (view.total["tokens"], view.hit_rate) == (100, 0.25)


def test_the_index_is_asked_once_and_0_is_never_said_to_be_stored() -> None:
    clock, index = ManualClock(0.0), MemoryIndex()
    with closing(FleetWatch([source("a", clock, lambda: counters(0, 0))], index=index)) as watch:
        assert watch.look(since_start=True).stored is None, "totals may follow saves by seconds"
    usages = [[Usage("a", 7, 1, 0)], []]
    index.usage = lambda: usages.pop(0)  # type: ignore[method-assign]
    with closing(FleetWatch([source("a", clock, lambda: counters(0, 0))], index=index)) as watch:
        stored = watch.look(since_start=True).stored
        assert stored == StoredTotals(7, 1, 1)
        assert watch.look(since_start=False).stored == stored
