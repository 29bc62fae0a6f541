"""Two OpenAI-compatible servers, one Valkey, one folder: sharing, a trace, an orderly end."""

import itertools
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from objkv.index.redis.index import RedisIndex
from objkv.keys.prefix import PromptExtras, prefix_hashes
from tests.engine.collector import Collector, collecting
from tests.engine.endings import DRAIN_S, objkv_errors
from tests.engine.harness import run_replica
from tests.engine.job import Generate, Job, Prompt
from tests.engine.prompts import prompt_of
from tests.engine.scenario import Values, scenario
from tests.engine.servers import PATIENT, Answer, Server
from tests.support.agents import AgentProcess
from tests.support.servers.redis import RedisServer, valkey_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
SHARED, LAST = (prompt_of(600, seed=seed) for seed in range(2))
CHUNK, LOADED = 256, 512
"""Tokens of a chunk, and of the whole chunks of 600."""
PAUSE_MS = 1_200_000
"""Until it is ended: longer than all that is waited for meanwhile."""
TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACES_S = 300.0
SETTINGS = PATIENT | {
    "OBJKV_HOT_SAVE_BYTES_MAX": str(8 << 20),
    "OBJKV_DRAIN_DEADLINE_MS": str(1000 * DRAIN_S),
}
HASTY = {"objkv.assembly.backends.BreakerLimits": {"failures": 2, "reset_s": 0.5}}
AGENT = {"lookup_deadline_ms": "1500", "agent_memory_bytes": "256MiB"}


class Replica(Server):
    """A server, and the agent of it alone: ``log`` is what both printed."""

    def __init__(
        self, folder: Path, settings: dict[str, str], arguments: tuple[str, ...] = ()
    ) -> None:
        ours = {n.removeprefix("OBJKV_").lower(): v for n, v in settings.items() if "OBJKV_" in n}
        self.agent = AgentProcess(ours | AGENT, constants=HASTY)
        url = {"OBJKV_AGENT": self.agent.url}
        super().__init__(folder, settings=settings | url, arguments=arguments)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.agent.__exit__(*error)

    @property
    def log(self) -> str:
        return super().log + self.agent.log()


def probe(number: int) -> Prompt:
    """One chunk that nobody asked for before, so that the index is asked."""
    return prompt_of(257, seed=1000 + number, max_tokens=1)


def chunks_indexed(valkey: RedisServer, server: Server, prompt: Prompt) -> int:
    found = re.search(r"objkv ready .*namespace=(\w+)", server.log)
    assert found is not None
    hashes = prefix_hashes(found[1], prompt.tokens, CHUNK, PromptExtras())
    with closing(RedisIndex(valkey.client())) as index:
        return sum(record is not None for record in index.lookup(found[1], hashes))


def wait_until_indexed(valkey: RedisServer, server: Server, prompt: Prompt) -> None:
    all_chunks = LOADED // CHUNK
    wait_until(lambda: chunks_indexed(valkey, server, prompt) == all_chunks, "the prompt's records")


@scenario
def a_load_and_an_end(folder: Path) -> Values:
    alone = run_replica(Job(steps=tuple(Generate(prompts=(p,)) for p in (SHARED, LAST))), folder)
    answers: dict[str, Answer] = {}
    numbers = itertools.count()
    with valkey_server(folder / "valkey") as valkey, collecting() as collector:
        places = {
            "OBJKV_BULK_URL": f"file://{folder}/chunks",
            "OBJKV_INDEX_URL": f"{valkey.url}/0",
        }
        traced = (
            SETTINGS | places | traced_at(collector),
            ("--otlp-traces-endpoint", collector.url),
        )
        with (
            Replica(folder / "one", SETTINGS | places) as one,
            Replica(folder / "two", *traced) as two,
        ):
            for server in (one, two):
                server.wait_until_ready()

            answers["one shared"] = one.complete(SHARED)
            wait_until_indexed(valkey, one, SHARED)
            answers["two shared"] = two.complete(SHARED, traceparent=f"00-{TRACE}-{ABOVE}-01")
            for server in (one, two):  # numbers of threads are told with the next step
                server.complete(probe(next(numbers)))
            metrics = two.metrics()
            spans = spans_of_the_load(collector)

            with valkey.client() as client:
                client.client_pause(PAUSE_MS, all=False)  # writing waits, so no save is through
                answers["one last"] = one.complete(LAST)
                early = chunks_indexed(valkey, one, LAST)
                one.tell_to_end()
                client.client_unpause()
            ends = [one.wait_for_end()]
            wait_until_indexed(valkey, one, LAST)
            answers["two last"] = two.complete(LAST)
            two.tell_to_end()
            ends.append(two.wait_for_end())
            logs = [one.log, two.log]
            left = {"processes": one.processes() + two.processes()}
            with valkey.client() as client:
                left["leases"] = [key.decode() for key in client.keys("objkv:l:*")]
    return {
        "alone": alone,
        "tokens": {name: list(answer.tokens) for name, answer in answers.items()},
        "cached": {name: answer.cached_tokens for name, answer in answers.items()},
        "metrics": metrics,
        "spans": spans,
        "early": early,
        "ends": ends,
        "left": left,
        "logs": logs,
    }


def traced_at(collector: Collector) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }


def spans_of_the_load(collector: Collector) -> list[dict[str, object]]:
    """All of the request whose trace is known, once its load's are there."""

    def are_there() -> bool:
        names = {span["name"] for span in collector.spans() if span["trace"] == TRACE}
        return names >= {"llm_request", "objkv.lookup", "objkv.load"}

    wait_until(are_there, "the spans of the load", bound_s=TRACES_S)
    return [span for span in collector.spans() if span["trace"] == TRACE]


def test_every_answer_has_the_tokens_of_vllm_alone() -> None:
    run = a_load_and_an_end()
    for name, tokens in zip(("shared", "last"), run["alone"].tokens, strict=True):
        assert run["tokens"][f"one {name}"] == list(tokens), name
        assert run["tokens"][f"two {name}"] == list(tokens), name


def test_the_second_server_answers_a_shared_prompt_from_objkv() -> None:
    run = a_load_and_an_end()
    assert run["cached"]["one shared"] == 0
    assert run["cached"]["two shared"] == LOADED
    metrics = run["metrics"]
    assert metrics["vllm:external_prefix_cache_hits_total"] == LOADED
    assert metrics["vllm:objkv_loads_total"] == 1
    assert metrics["vllm:objkv_hit_hot_tokens_total"] == LOADED
    assert metrics["vllm:objkv_hit_bulk_tokens_total"] == 0
    asked = len(SHARED.tokens) + len(probe(0).tokens)
    assert metrics["vllm:objkv_query_tokens_total"] == asked
    assert metrics["vllm:objkv_queries_total"] == 2
    assert metrics["vllm:objkv_hits_total"] == 1
    assert metrics["vllm:objkv_load_bytes_total"] > 0


def test_the_trace_that_came_with_a_request_has_its_lookup_and_its_load() -> None:
    spans = a_load_and_an_end()["spans"]
    by_name = {name: [s for s in spans if s["name"] == name] for name in {s["name"] for s in spans}}
    (lookup,), (load,) = by_name["objkv.lookup"], by_name["objkv.load"]
    assert lookup["parent"] == load["parent"] == ABOVE
    assert lookup["attributes"]["objkv.chunks_found"] == LOADED // CHUNK
    assert load["attributes"]["objkv.chunks"] == LOADED // CHUNK
    assert load["attributes"]["objkv.bytes"] > 0
    assert not [span for span in spans if span["failed"]]
    # vLLM calls the request the same in its own span.
    ids = {s["attributes"]["gen_ai.request.id"] for s in (lookup, load)}
    assert len(ids) == 1
    (vllm,) = by_name["llm_request"]
    assert ids.pop().startswith(vllm["attributes"]["gen_ai.request.id"])


def test_servers_that_are_told_to_end_save_what_they_have_and_leave_nothing() -> None:
    run = a_load_and_an_end()
    assert run["early"] == 0
    assert (run["cached"]["one last"], run["cached"]["two last"]) == (0, LOADED)
    assert not any(run["ends"])  # 0, or None where vLLM hung
    assert run["left"] == {"processes": [], "leases": []}


def test_nothing_that_objkv_logged_is_an_error() -> None:
    for log in a_load_and_an_end()["logs"]:
        assert objkv_errors(log) == []
