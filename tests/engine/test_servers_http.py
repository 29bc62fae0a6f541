"""Two OpenAI-compatible servers, one Valkey, one folder: sharing, a trace, an orderly end."""

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
from tests.engine.job import Job, Prompt, generate, prompt_of
from tests.engine.servers import PATIENT, Answer, Server
from tests.support.agents import AgentProcess
from tests.support.servers.redis import RedisServer, valkey_server
from tests.support.waiting import wait_for_server

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
    wait_for_server(
        lambda: chunks_indexed(valkey, server, prompt) == all_chunks, "the prompt's records"
    )


def traced_at(collector: Collector) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }


def test_servers_share_answer_as_vllm_alone_trace_their_loads_and_save_as_they_end(
    folder: Path,
) -> None:
    job = Job(steps=(generate(SHARED), generate(LAST)))
    shared, last = run_replica(job, folder).tokens
    with valkey_server(folder / "valkey") as valkey, collecting() as collector:
        bulk = {"OBJKV_BULK_URL": f"file://{folder}/chunks", "OBJKV_INDEX_URL": f"{valkey.url}/0"}
        settings, to_collector = SETTINGS | bulk, ("--otlp-traces-endpoint", collector.url)
        with (
            Replica(folder / "one", settings) as one,
            Replica(folder / "two", settings | traced_at(collector), to_collector) as two,
        ):
            for server in (one, two):
                server.wait_until_ready()
            assert one.complete(SHARED) == Answer(shared, cached_tokens=0)
            wait_until_indexed(valkey, one, SHARED)
            trace = f"00-{TRACE}-{ABOVE}-01"
            assert two.complete(SHARED, traceparent=trace) == Answer(shared, cached_tokens=LOADED)
            for number, server in enumerate((one, two)):
                server.complete(probe(number))  # numbers of threads come with the next step
            check_metrics(two.metrics())
            check_spans(collector)

            with valkey.client() as client:
                client.client_pause(PAUSE_MS, all=False)  # writing waits, so no save is through
                assert one.complete(LAST) == Answer(last, cached_tokens=0)
                assert chunks_indexed(valkey, one, LAST) == 0
                one.tell_to_end()
                client.client_unpause()
            assert not one.wait_for_end()  # 0, or None where vLLM hung
            wait_until_indexed(valkey, one, LAST)
            assert two.complete(LAST) == Answer(last, cached_tokens=LOADED)
            two.tell_to_end()
            assert not two.wait_for_end()
            for server in (one, two):
                assert objkv_errors(server.log) == []
                assert server.processes() == []
            with valkey.client() as client:
                assert client.keys("objkv:l:*") == [], "no lease is left"


def check_metrics(metrics: dict[str, float]) -> None:
    """Of the server that loaded the shared prompt."""
    assert metrics["vllm:external_prefix_cache_hits_total"] == LOADED
    assert metrics["vllm:objkv_loads_total"] == 1
    assert metrics["vllm:objkv_hit_hot_tokens_total"] == LOADED
    assert metrics["vllm:objkv_hit_bulk_tokens_total"] == 0
    asked = len(SHARED.tokens) + len(probe(0).tokens)
    assert metrics["vllm:objkv_query_tokens_total"] == asked
    assert metrics["vllm:objkv_queries_total"] == 2
    assert metrics["vllm:objkv_hits_total"] == 1
    assert metrics["vllm:objkv_load_bytes_total"] > 0


def check_spans(collector: Collector) -> None:
    """The trace that came with the request has its lookup and its load."""

    def names() -> list[str]:
        return [span["name"] for span in collector.spans() if span["trace"] == TRACE]

    wanted = {"llm_request", "objkv.lookup", "objkv.load"}
    wait_for_server(lambda: wanted <= set(names()), "the spans of the load", bound_s=TRACES_S)
    spans = [span for span in collector.spans() if span["trace"] == TRACE]
    assert not [span for span in spans if span["failed"]]
    assert [names().count(name) for name in wanted] == [1, 1, 1]
    lookup, load, vllm = (
        next(span for span in spans if span["name"] == name)
        for name in ("objkv.lookup", "objkv.load", "llm_request")
    )
    assert lookup["parent"] == load["parent"] == ABOVE
    assert lookup["attributes"]["objkv.chunks_found"] == LOADED // CHUNK
    assert load["attributes"]["objkv.chunks"] == LOADED // CHUNK
    assert load["attributes"]["objkv.bytes"] > 0
    # vLLM calls the request the same in its own span.
    ids = {span["attributes"]["gen_ai.request.id"] for span in (lookup, load)}
    assert len(ids) == 1
    assert ids.pop().startswith(vllm["attributes"]["gen_ai.request.id"])
