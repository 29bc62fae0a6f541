"""Two OpenAI-compatible servers, one Valkey, one bucket: sharing, an outage, an orderly end."""

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from objkv.config import Config
from objkv.index.redis.index import RedisIndex
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.stores.s3.client import open_s3_access
from tests.engine.collector import Collector, collecting
from tests.engine.endings import DRAIN_S
from tests.engine.harness import run_replica
from tests.engine.job import Generate, Job, Prompt
from tests.engine.loglines import objkv_errors
from tests.engine.prompts import prompt_of
from tests.engine.scenario import Values, scenario
from tests.engine.servers import PATIENT, Answer, Server
from tests.support.agents import AgentProcess
from tests.support.servers.ceph import ceph_missing, ceph_radosgw
from tests.support.servers.redis import RedisServer, valkey_server, wait_until

pytestmark = pytest.mark.slow
BUCKET = "kv-cache"
SHARED, DURING, AFTER, LAST = (prompt_of(600, seed=seed) for seed in range(4))
CHUNK, LOADED = 256, 512
"""Tokens of a chunk, and of the whole chunks of 600."""
NOTICED_S = 300.0
"""Until a server that is asked short prompts has noticed that the index is gone, or back."""
PAUSE_MS = 1_200_000
"""Until it is ended: longer than all that is waited for meanwhile."""
TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACES_S = 300.0
GIVEN_UP = "index reads keep failing, serving without them"
BACK = "index reads work again"
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


@contextmanager
def bulk_place(folder: Path) -> Iterator[dict[str, str]]:
    """A bucket where Ceph is installed, a directory elsewhere."""
    if ceph_missing():
        yield {"OBJKV_BULK_URL": f"file://{folder}/chunks"}
        return
    with ceph_radosgw(folder / "ceph") as ceph:
        settings = {
            "s3_endpoint_url": ceph.endpoint_url,
            "s3_region": "us-east-1",
            "s3_addressing": "path",
            "s3_access_key_id": ceph.access_key,
            "s3_secret_access_key": ceph.secret_key,
        }
        access = open_s3_access(Config.model_validate(settings))
        access.client.create_bucket(Bucket=BUCKET)
        access.close()
        variables = {f"OBJKV_{name.upper()}": value for name, value in settings.items()}
        yield variables | {"OBJKV_BULK_URL": f"s3://{BUCKET}/kv"}


def chunks_indexed(valkey: RedisServer, server: Server, prompt: Prompt) -> int:
    """How many of the prompt's chunks have a record."""
    found = re.search(r"objkv ready .*namespace=(\w+)", server.log)
    assert found is not None
    hashes = prefix_hashes(found[1], prompt.tokens, CHUNK, PromptExtras())
    with closing(RedisIndex(valkey.client())) as index:
        return sum(record is not None for record in index.lookup(found[1], hashes))


def wait_until_indexed(valkey: RedisServer, server: Server, prompt: Prompt) -> None:
    """Until the index has a record of each of the prompt's chunks."""
    all_chunks = LOADED // CHUNK
    wait_until(lambda: chunks_indexed(valkey, server, prompt) == all_chunks, "the prompt's records")


def ask_until(
    noticed: Callable[[str], bool], server: Server, numbers: Iterator[int]
) -> list[float]:
    """Ask until the server's log is as it should be; the seconds of every answer."""
    seconds: list[float] = []
    deadline = time.monotonic() + NOTICED_S
    while not noticed(server.log):
        assert time.monotonic() < deadline, f"{server.log_file} does not tell"
        seconds.append(server.complete(probe(next(numbers))).seconds)
    return seconds


def has_all_back(log: str) -> bool:
    """Whether an agent has found the index again each time that it had lost it."""
    return log.count(BACK) == log.count(GIVEN_UP)


def ask_until_saved(valkey: RedisServer, server: Server, numbers: Iterator[int]) -> None:
    """Ask until something that the server saved was announced: its worker gave up writes apart from
    reads, and finds out with a write that the index is back."""
    deadline = time.monotonic() + NOTICED_S
    while True:
        prompt = probe(next(numbers))
        server.complete(prompt)
        with suppress(TimeoutError):
            return wait_until(
                lambda prompt=prompt: chunks_indexed(valkey, server, prompt) > 0,  # type: ignore
                "a record",
                bound_s=2.0,
            )
        assert time.monotonic() < deadline, f"{server.log_file}: nothing is announced"


@scenario
def an_outage_and_an_end(folder: Path) -> Values:
    prompts = (SHARED, DURING, AFTER, LAST)
    alone = run_replica(Job(steps=tuple(Generate(prompts=(p,)) for p in prompts)), folder)
    answers: dict[str, Answer] = {}
    numbers = itertools.count()
    with (
        valkey_server(folder / "valkey") as valkey,
        bulk_place(folder) as bulk,
        Replica(folder / "one", SETTINGS | bulk | index_at(valkey)) as one,
        collecting() as collector,
        Replica(
            folder / "two",
            SETTINGS | bulk | index_at(valkey) | traced_at(collector),
            ("--otlp-traces-endpoint", collector.url),
        ) as two,
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

        valkey.kill()
        for name, server in (("one", one), ("two", two)):
            answers[f"{name} during"] = server.complete(DURING)
        waited = [ask_until(lambda log: GIVEN_UP in log, server, numbers) for server in (one, two)]

        valkey.restart()
        waited += [ask_until(has_all_back, server, numbers) for server in (one, two)]
        ask_until_saved(valkey, one, numbers)
        answers["one after"] = one.complete(AFTER)
        wait_until_indexed(valkey, one, AFTER)
        answers["two after"] = two.complete(AFTER)

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
        "seconds": [seconds for several in waited for seconds in several],
        "metrics": metrics,
        "spans": spans,
        "early": early,
        "ends": ends,
        "left": left,
        "logs": logs,
    }


def traced_at(collector: Collector) -> dict[str, str]:
    """OpenTelemetry's own variables."""
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


def index_at(valkey: RedisServer) -> dict[str, str]:
    return {"OBJKV_INDEX_URL": f"{valkey.url}/0"}


def test_every_answer_has_the_tokens_of_vllm_alone() -> None:
    run = an_outage_and_an_end()
    names = ("shared", "during", "after", "last")
    for name, tokens in zip(names, run["alone"].tokens, strict=True):
        assert run["tokens"][f"one {name}"] == list(tokens), name
        assert run["tokens"][f"two {name}"] == list(tokens), name


def test_the_second_server_answers_a_shared_prompt_from_objkv() -> None:
    run = an_outage_and_an_end()
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
    spans = an_outage_and_an_end()["spans"]
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


def test_without_an_index_servers_go_on_alone_and_say_so_once_and_share_again_with_it() -> None:
    run = an_outage_and_an_end()
    assert (run["cached"]["one after"], run["cached"]["two after"]) == (0, LOADED)
    assert run["cached"]["one during"] == run["cached"]["two during"] == 0
    assert max(run["seconds"]) < 60  # half of what a lookup may take
    for log in run["logs"]:
        assert log.count(GIVEN_UP) == log.count(BACK) == 1


def test_servers_that_are_told_to_end_save_what_they_have_and_leave_nothing() -> None:
    run = an_outage_and_an_end()
    assert run["early"] == 0
    assert (run["cached"]["one last"], run["cached"]["two last"]) == (0, LOADED)
    assert not any(run["ends"])  # 0, or None where vLLM hung
    assert run["left"] == {"processes": [], "leases": []}


def test_nothing_that_objkv_logged_is_an_error() -> None:
    for log in an_outage_and_an_end()["logs"]:
        assert objkv_errors(log) == []
