"""The agent's HTTP interface, as a router uses it."""

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from objkv.agent.http.api import AgentHttp, AgentNumbers
from objkv.agent.http.metrics import LEVELS, PREFIX, TOTALS
from objkv.agent.prefetch import Prefetches
from objkv.errors import StoreUnavailable
from objkv.ops.top.scrape import values_of
from tests.agent.world import PATIENCE_S, Node, WatchedStore, ended, opened
from tests.support.paged_cache import wait_until
from tests.support.samples import NAMESPACE, TOKENS, save_identity


class Router:
    """A client of the socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("local", timeout=PATIENCE_S)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(PATIENCE_S)
        connection.sock.connect(str(self._path))
        text = body if isinstance(body, str | None) else json.dumps(body)
        connection.request(method, path, text)
        answer = connection.getresponse()
        content = answer.read().decode()
        connection.close()
        is_json = answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(content) if is_json else content


@pytest.fixture
def router(node: Node) -> Iterator[Router]:
    prefetches = Prefetches(node.core, node.index, node.store)
    path = node.folder / "http"
    numbers = AgentNumbers(node.recorder)
    server = AgentHttp(path, node.core, prefetches, numbers, lambda: 7)
    yield Router(path)
    server.close()
    assert not path.exists()


PROMPT = {"namespace": NAMESPACE, "tokens": list(TOKENS)}


def test_a_prompt_is_prefetched_and_then_read_from_memory(node: Node, router: Router) -> None:
    save_identity(node.store)
    wanted = node.save(codec="zstd")
    matched = {"chunks": 3, "stored": 3, "resident": 0, "tokens": 48}
    assert router.ask("POST", "/v1/match", PROMPT) == (200, matched)
    started = {"started": 3, "resident": 0, "refused": 0}
    assert router.ask("POST", "/v1/prefetch", PROMPT) == (200, started)
    assert node.residents.wait_idle(PATIENCE_S)
    assert router.ask("POST", "/v1/match", PROMPT) == (200, matched | {"resident": 3})
    again = {"started": 0, "resident": 3, "refused": 0}
    assert router.ask("POST", "/v1/prefetch", PROMPT) == (200, again)
    client = node.connect()
    leases = opened(client, wanted)
    for lease in leases:
        ended(client, lease)
    client.release([lease.number for lease in leases])
    assert isinstance(node.store, WatchedStore)
    assert node.store.gets.total() == 3
    status, page = router.ask("GET", "/metrics")
    assert status == 200
    for line in ("prefetches_total 3", "prefetch_used_total 3", "hits_total 3", "clients 7"):
        assert f"objkv_agent_{line}\n" in page


def test_a_prompt_may_be_given_as_hashes_and_ends_at_the_first_missing_chunk(
    node: Node, router: Router
) -> None:
    hashes = [one.claim.key.prefix_hash.hex() for one in node.save()]
    hashes.insert(1, "0" * 40)
    body = {"namespace": NAMESPACE, "hashes": hashes}
    expected = {"chunks": 4, "stored": 1, "resident": 0, "tokens": 16}
    assert router.ask("POST", "/v1/match", body) == (200, expected)
    assert router.ask("POST", "/v1/prefetch", body)[1]["started"] == 1


def test_prefetches_are_bounded_and_count_what_nobody_read(node: Node, router: Router) -> None:
    gate = threading.Event()
    assert isinstance(node.store, WatchedStore)
    node.store.on_get = lambda key: gate.wait(PATIENCE_S) and None  # type: ignore[func-returns-value]
    tokens = list(range(100_000, 100_000 + 16 * 300))
    hashes = [one.claim.key.prefix_hash.hex() for one in node.save(tokens)]
    body = {"namespace": NAMESPACE, "hashes": hashes}
    _, first = router.ask("POST", "/v1/prefetch", body)
    assert first["refused"] > 0
    assert first["started"] * 1024 <= node.residents.total_bytes // 4
    _, second = router.ask("POST", "/v1/prefetch", body | {"hashes": hashes[::-1]})
    assert second["started"] == 0
    gate.set()
    assert node.residents.wait_idle(PATIENCE_S)
    wait_until(lambda: router.ask("POST", "/v1/prefetch", body)[1]["refused"] == 0)
    assert node.residents.wait_idle(PATIENCE_S)
    assert node.recorder.value("agent_prefetch_unused") > 0, "the arena has room for fewer"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "JSON object"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ({}, "namespace"),
        ({"namespace": "x" * 32}, "namespace"),
        ({"namespace": NAMESPACE}, "give tokens"),
        ({"namespace": NAMESPACE, "tokens": [-1]}, "list of token ids"),
        ({"namespace": NAMESPACE, "tokens": [True]}, "list of token ids"),
        ({"namespace": NAMESPACE, "hashes": ["00"]}, "40 hex digits"),
        ({"namespace": NAMESPACE, "tokens": [1]}, "objkv ls"),
        (PROMPT | {"deadline_ms": 0}, "deadline_ms"),
    ],
)
def test_a_wrong_question_is_answered_with_the_fix(
    router: Router, body: object, reason: str
) -> None:
    status, answer = router.ask("POST", "/v1/prefetch", body)
    assert status == 400
    assert reason in answer["error"]


def test_other_paths_methods_and_faults_have_their_status(node: Node, router: Router) -> None:
    assert router.ask("GET", "/healthz") == (200, "ok\n")
    assert router.ask("POST", "/metrics", "x")[0] == 405
    assert router.ask("GET", "/v1/match")[0] == 405
    status, answer = router.ask("GET", "/v2")
    assert (status, "/v1/prefetch" in answer["error"]) == (404, True)

    def down(*_: object) -> Any:
        raise StoreUnavailable("the index is down")

    node.index.lookup = down  # type: ignore[method-assign]
    body = {"namespace": NAMESPACE, "hashes": ["0" * 40]}
    assert router.ask("POST", "/v1/match", body) == (503, {"error": "the index is down"})


def test_metrics_are_whole_from_the_start_and_levels_fall_again(node: Node, router: Router) -> None:
    """A rate from the first event on needs the 0 before it, and large counters all their digits."""
    page = router.ask("GET", "/metrics")[1]
    values = values_of(page)
    assert values.keys() == {PREFIX + name for name in LEVELS} | {
        f"{PREFIX}{name}_total" for name in TOTALS
    }
    assert values[f"{PREFIX}arena_bytes"] == node.residents.total_bytes
    assert page.count("# HELP ") == page.count("# TYPE ") == len(values)
    node.recorder.count("load_bytes", 123_456_789_012)
    node.recorder.level("breaker_open_bulk_read", 1)
    node.recorder.observe("save_seconds", 0.5)
    values = values_of(router.ask("GET", "/metrics")[1])
    assert values[f"{PREFIX}load_bytes_total"] == 123_456_789_012
    assert values[f"{PREFIX}save_seconds_count_total"] == 1
    assert values[f"{PREFIX}breaker_open_bulk_read"] == 1
    node.recorder.level("breaker_open_bulk_read", 0)
    assert values_of(router.ask("GET", "/metrics")[1])[f"{PREFIX}breaker_open_bulk_read"] == 0


def test_leased_bytes_are_those_of_payloads_that_are_held(node: Node, router: Router) -> None:
    client = node.connect()
    lease, *others = opened(client, node.save())
    sizes = [ended(client, one).nbytes for one in (lease, *others)]
    client.release([one.number for one in others])
    wait_until(lambda: node.residents.leased() == 1)
    values = values_of(router.ask("GET", "/metrics")[1])
    assert values[f"{PREFIX}leased_bytes"] == sizes[0]
    assert values[f"{PREFIX}leased_payloads"] == 1


def test_the_documented_command_gives_node_exporter_a_file_while_there_is_an_agent(
    node: Node, router: Router, tmp_path: Path
) -> None:
    if shutil.which("curl") is None:
        if os.environ.get("CI"):
            pytest.fail("curl is not installed")
        pytest.skip("curl is not installed")
    page = (Path(__file__).parents[2] / "docs" / "agent.md").read_text()
    (script,) = re.findall(r"```\n(cd /var/lib/node_exporter.*?)```", page, re.DOTALL)
    script = script.replace("/var/lib/node_exporter", str(tmp_path))
    for socket_file, files in ((node.folder / "http", ["objkv.prom"]), (tmp_path / "none", [])):
        told = script.replace("/run/objkv/agent.sock.http", str(socket_file))
        subprocess.run(["/bin/sh", "-c", told], check=True, timeout=PATIENCE_S)
        assert [file.name for file in tmp_path.iterdir()] == files
        if files:
            values = values_of((tmp_path / "objkv.prom").read_text())
            assert values[f"{PREFIX}clients"] == 7
