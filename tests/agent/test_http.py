"""The agent's HTTP interface, as a router uses it."""

import http.client
import json
import logging
import os
import re
import shutil
import socket
import socketserver
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from objkv import __version__
from objkv.agent.http import listener
from objkv.agent.http.api import AgentHttp
from objkv.agent.http.metrics import LEVELS, PREFIX, TOTALS
from objkv.agent.messages import VERSION
from objkv.ops.agent_api import AgentApi
from objkv.ops.top import values_of
from tests.agent import world
from tests.agent.world import PATIENCE_S, REPLICAS, Node, down, gated, loaded, opened, serving
from tests.support.samples import IDENTITY, NAMESPACE, TOKENS, save_identity
from tests.support.waiting import wait_until

TOKEN = "a-token-of-24-characters"


class Router:
    """A client of the Unix socket, or of an address with a token."""

    def __init__(self, place: Path | tuple[str, int], token: str | None = None) -> None:
        self._place, self._token = place, token

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("local", timeout=PATIENCE_S)
        if isinstance(self._place, Path):
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(PATIENCE_S)
            connection.sock.connect(str(self._place))
        else:
            connection.sock = socket.create_connection(self._place, PATIENCE_S)
        text = body if isinstance(body, str | None) else json.dumps(body)
        headers = {} if self._token is None else {"Authorization": self._token}
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        assert answer.headers["Server"] == "objkv", "no version of anything is told"
        content = answer.read().decode()
        connection.close()
        is_json = answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(content) if is_json else content


@pytest.fixture
def router(node: Node) -> Iterator[Router]:
    with serving(node):
        yield Router(node.http)
    assert not node.http.exists()


PROMPT = {"namespace": NAMESPACE, "tokens": list(TOKENS)}
NBYTES = 1024
"""Of a sample's payload, without its header."""


def counts(answer: dict[str, int]) -> tuple[int, int, int]:
    return answer["started"], answer["resident"], answer["refused"]


def test_a_prompt_is_prefetched_and_then_read_from_memory(node: Node, router: Router) -> None:
    save_identity(node.store)
    wanted = node.save(codec="blosc")
    nbytes = sum(one.record.raw_bytes for one in wanted)
    matched = {"chunks": 3, "stored": 3, "resident": 0, "tokens": 48, "payloads": 3}
    matched |= {"payload_bytes": nbytes, "resident_payloads": 0, "resident_bytes": 0}
    matched |= {"loading_payloads": 0}
    assert router.ask("POST", "/v1/match", PROMPT) == (200, matched)
    started = {"chunks": 3, "stored": 3, "started": 3, "resident": 0, "refused": 0}
    started |= {"started_bytes": nbytes, "resident_bytes": 0, "refused_bytes": 0}
    assert router.ask("POST", "/v1/prefetch", PROMPT) == (200, started)
    wait_until(lambda: not node.arena_cache.leased())
    matched |= {"resident": 3, "resident_payloads": 3, "resident_bytes": nbytes}
    assert router.ask("POST", "/v1/match", PROMPT) == (200, matched)
    again = started | {"started": 0, "resident": 3, "started_bytes": 0, "resident_bytes": nbytes}
    assert router.ask("POST", "/v1/prefetch", PROMPT) == (200, again)
    assert node.arena_cache.unread_bytes >= nbytes
    loaded(node.connect(), wanted)
    assert node.store.gets.total() == 3
    status, page = router.ask("GET", "/metrics")
    assert status == 200
    lines = ("prefetches_total 3", "prefetch_used_total 3", "hits_total 3", "clients 7")
    for line in (*lines, "prefetch_unread_bytes 0", f"arena_bytes {node.arena_cache.total_bytes}"):
        assert f"objkv_agent_{line}\n" in page


def test_a_prompt_may_be_given_as_hashes_and_ends_at_the_first_missing_chunk(
    node: Node, router: Router
) -> None:
    hashes = [one.claim.key.prefix_hash.hex() for one in node.save()]
    hashes.insert(1, "0" * 40)
    body = {"namespace": NAMESPACE, "hashes": hashes}
    status, matched = router.ask("POST", "/v1/match", body)
    expected = {"chunks": 4, "stored": 1, "resident": 0, "tokens": 16, "payloads": 1}
    assert (status, matched | expected) == (200, matched)
    assert router.ask("POST", "/v1/prefetch", body)[1]["started"] == 1


def long_prompt(node: Node, first: int, chunks: int) -> dict[str, Any]:
    tokens = list(range(first, first + 16 * chunks))
    hashes = [one.claim.key.prefix_hash.hex() for one in node.save(tokens)]
    return {"namespace": NAMESPACE, "hashes": hashes}


def test_prefetches_under_way_are_bounded(node: Node, router: Router) -> None:
    gate, body = gated(node), long_prompt(node, 100_000, 300)
    _, first = router.ask("POST", "/v1/prefetch", body)
    assert first["refused"] > 0
    assert first["refused"] + first["started"] == 300
    assert 0 < first["started_bytes"] <= node.arena_cache.ahead_bytes_max
    other = long_prompt(node, 200_000, 3)
    assert counts(router.ask("POST", "/v1/prefetch", other)[1]) == (0, 0, 3)
    _, matched = router.ask("POST", "/v1/match", body)
    assert matched["loading_payloads"] == first["started"]
    gate.set()
    wait_until(lambda: not node.arena_cache.leased())
    assert counts(router.ask("POST", "/v1/prefetch", other)[1]) == (3, 0, 0)
    wait_until(lambda: not node.arena_cache.leased())


def test_what_nobody_reads_displaces_only_its_like(node: Node, router: Router) -> None:
    read = node.save(range(50_000, 50_000 + 16 * 20))
    loaded(node.connect(), read)
    for number in range(1, 12):
        router.ask("POST", "/v1/prefetch", long_prompt(node, 100_000 * number, 50))
        wait_until(lambda: not node.arena_cache.leased())
        assert node.arena_cache.unread_bytes <= node.arena_cache.ahead_bytes_max
    assert all(node.arena_cache.contains_ready([one.claim.key.path() for one in read]))
    unused = node.recorder.value("agent_prefetch_unused")
    assert unused > 0
    assert node.recorder.value("agent_prefetch_unused_bytes") >= unused * NBYTES


def test_namespaces_are_listed_and_salt_and_adapter_are_part_of_a_prompt(
    node: Node, router: Router
) -> None:
    save_identity(node.store)
    node.save()
    [found] = router.ask("GET", "/v1/namespaces")[1]["namespaces"]
    assert (found["namespace"], found["chunk_tokens"]) == (NAMESPACE, 16)
    assert (found["model"], found["tenant"]) == (IDENTITY.model, IDENTITY.tenant)
    assert router.ask("POST", "/v1/match", PROMPT)[1]["stored"] == 3
    for more in ({"cache_salt": "x"}, {"lora_digest": "0a0b"}):
        assert router.ask("POST", "/v1/match", PROMPT | more)[1]["stored"] == 0


@pytest.fixture
def tokenizers(tmp_path: Path) -> Path:
    words = {f"w{token}": token for token in range(200)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "models" / IDENTITY.model
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tmp_path / "models"


def test_text_is_tokenized_if_there_is_a_tokenizer(node: Node, tokenizers: Path) -> None:
    save_identity(node.store)
    node.save()
    router = Router(node.http)
    text = {"namespace": NAMESPACE, "text": " ".join(f"w{token}" for token in TOKENS)}
    place = {"tokenizer": str(tokenizers / IDENTITY.model)}
    with serving(node):
        assert "agent_tokenizers" in router.ask("POST", "/v1/match", text)[1]["error"]
        assert router.ask("POST", "/v1/match", text | place)[1]["stored"] == 3
    with serving(node, tokenizers=tokenizers):
        for model in ({}, {"model": IDENTITY.model}):
            assert router.ask("POST", "/v1/match", text | model)[1]["stored"] == 3
        for model in ("../models", "/etc", "other", "\ud800", "a\0b", "."):
            status, answer = router.ask("POST", "/v1/match", text | {"model": model})
            assert (status, "agent_tokenizers" in answer["error"]) == (400, True)
        assert "surrogate" in router.ask("POST", "/v1/match", text | {"text": "\ud800"})[1]["error"]
    with serving(node, tokenizers=tokenizers / IDENTITY.model):
        assert router.ask("POST", "/v1/match", text | {"model": "other"})[1]["stored"] == 3


def port_of(server: AgentHttp) -> int:
    """The TCP port."""
    return int(server._listeners[-1]._server.socket.getsockname()[1])


def _hosts() -> list[str]:
    """The loopback addresses: IPv6 may be switched off."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return ["127.0.0.1", "::1"]
    return ["127.0.0.1"]


@pytest.mark.parametrize("host", _hosts())
def test_an_address_needs_the_token(node: Node, tokenizers: Path, host: str) -> None:
    save_identity(node.store)
    node.save()
    with serving(node, address=(host, 0), token=TOKEN) as server:
        place = (host, port_of(server))
        right = Router(place, f"Bearer {TOKEN}")
        assert right.ask("POST", "/v1/match", PROMPT)[1]["stored"] == 3
        assert Router(place, f"bearer  {TOKEN}").ask("GET", "/metrics")[0] == 200
        wrong = (None, "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, "\xe9")
        for token in wrong:
            router = Router(place, token)
            assert router.ask("GET", "/healthz") == (200, "ok\n")
            for method, path in (("GET", "/metrics"), ("POST", "/v1/prefetch"), ("GET", "/x")):
                status, answer = router.ask(method, path, PROMPT)
                assert (status, "Authorization: Bearer" in answer["error"]) == (401, True)
        long = PROMPT | {"tokens": list(range(1_000_000))}
        assert Router(place).ask("POST", "/v1/match", long)[0] == 401
        file = {"namespace": NAMESPACE, "text": "w1", "tokenizer": str(tokenizers)}
        assert "Unix socket" in right.ask("POST", "/v1/match", file)[1]["error"]
        assert Router(node.http).ask("GET", "/metrics")[0] == 200


def test_a_client_that_trickles_is_hung_up_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_REQUEST_S", 0.0)
    with serving(node), socket.socket(socket.AF_UNIX) as slow:
        slow.settimeout(PATIENCE_S)
        slow.connect(str(node.http))
        with suppress(BrokenPipeError, ConnectionResetError):
            slow.send(b"GET /heal")
            assert slow.recv(1) == b""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "JSON object"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ({}, "namespace"),
        ({"namespace": "x" * 32}, "namespace"),
        ({"namespace": NAMESPACE}, "give tokens"),
        (PROMPT | {"text": "x"}, "no effect with text"),
        (PROMPT | {"model": "x"}, "no effect"),
        (PROMPT | {"token": "x"}, "'token' is unknown"),
        (PROMPT | {"cache_salt": 5}, "cache_salt"),
        (PROMPT | {"lora_digest": "0"}, "hex digits"),
        (PROMPT | {"priority": 0.5}, "priority"),
        (PROMPT | {"bytes_max": 0}, "bytes_max"),
        ({"namespace": NAMESPACE, "hashes": [], "cache_salt": "x"}, "no effect"),
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


def test_other_paths_methods_and_faults_have_their_status(
    node: Node, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert router.ask("POST", "/metrics", "x")[0] == 405
    status, answer = router.ask("GET", "/v1/match")
    assert (status, "use POST" in str(answer)) == (405, True)
    status, answer = router.ask("GET", "/v2")
    assert (status, "/v1/prefetch" in answer["error"]) == (404, True)
    node.index.lookup = down  # type: ignore[method-assign]
    body = {"namespace": NAMESPACE, "hashes": ["0" * 40]}
    assert router.ask("POST", "/v1/match", body) == (503, {"error": "down"})
    assert router.ask("GET", "/healthz") == (200, "ok\n")
    monkeypatch.setattr(REPLICAS, "is_accepting", False)
    assert router.ask("GET", "/healthz")[0] == 503, "no replica can connect"


def test_metrics_are_whole_from_the_start_and_levels_fall_again(node: Node, router: Router) -> None:
    """A rate from the first event on needs the 0 before it, and large counters all their digits."""
    page = router.ask("GET", "/metrics")[1]
    values = values_of(page)
    assert values.keys() - {f"{PREFIX}puts_all"} == {PREFIX + name for name in LEVELS} | {
        f"{PREFIX}{name}_total" for name in TOTALS
    }
    assert values[f"{PREFIX}arena_bytes"] == node.arena_cache.total_bytes
    client = node.connect()
    lease, *others = opened(client, node.save())
    sizes = [world.ended(client, one).nbytes for one in (lease, *others)]
    client.release([one.number for one in others])
    wait_until(lambda: node.arena_cache.leased() == 1)
    assert page.count("# HELP ") == page.count("# TYPE ") == 1 + len(values)
    node.recorder.count("load_bytes", 123_456_789_012)
    node.recorder.level("breaker_open_bulk_read", 1)
    node.recorder.observe("save_seconds", 0.5)
    values = values_of(router.ask("GET", "/metrics")[1])
    assert values[f"{PREFIX}leased_bytes"] == sizes[0]
    assert values[f"{PREFIX}leased_payloads"] == 1
    assert values[f"{PREFIX}load_bytes_total"] == 123_456_789_012 + sum(sizes)
    assert values[f"{PREFIX}save_seconds_count_total"] == 1
    assert values[f"{PREFIX}breaker_open_bulk_read"] == 1
    node.recorder.level("breaker_open_bulk_read", 0)
    assert values_of(router.ask("GET", "/metrics")[1])[f"{PREFIX}breaker_open_bulk_read"] == 0


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
    for socket_file, files in ((node.http, ["objkv.prom"]), (tmp_path / "none", [])):
        told = script.replace("/run/objkv/agent.sock.http", str(socket_file))
        subprocess.run(["/bin/sh", "-c", told], check=True, timeout=PATIENCE_S)
        assert [file.name for file in tmp_path.iterdir()] == files
        if files:
            values = values_of((tmp_path / "objkv.prom").read_text())
            assert values[f"{PREFIX}clients"] == 7


def test_strangers_keep_no_client_out(node: Node) -> None:
    with serving(node, address=("127.0.0.1", 0), token=TOKEN) as server:
        place, heads = ("127.0.0.1", port_of(server)), (b"GET /met", b"POST /v1/match HTTP/1.0\r\n")
        with ExitStack() as all_of_them:
            for number in range(3 * listener._CLIENTS_MAX):
                stranger = all_of_them.enter_context(socket.create_connection(place, PATIENCE_S))
                stranger.send(heads[number % 2])
                if number % 2:
                    stranger.send(b"Content-Length: 100000\r\n\r\n")
            for _ in range(3):
                assert Router(place, f"Bearer {TOKEN}").ask("GET", "/metrics")[0] == 200


def test_a_request_without_a_thread_keeps_no_slot(
    node: Node, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(socketserver.ThreadingMixIn, "process_request", none_left)
        for _ in range(listener._CLIENTS_MAX):
            with suppress(ConnectionError, http.client.HTTPException):
                router.ask("GET", "/healthz")
    assert router.ask("GET", "/healthz") == (200, "ok\n")


def test_bodies_have_one_bound(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_SILENT_S", 0.1)
    save_identity(node.store)
    router, bound = Router(node.http), listener.BODY_BYTES_MAX
    with serving(node) as server:
        with socket.socket(socket.AF_UNIX) as large:
            large.connect(str(node.http))
            large.send(f"POST /v1/match HTTP/1.0\r\nContent-Length: {bound}\r\n\r\n".encode())
            wait_until(lambda: server._bodies._left <= 0)
            assert router.ask("POST", "/v1/match", PROMPT)[0] == 503
            assert router.ask("GET", "/healthz")[0] == 200
        wait_until(lambda: server._bodies._left == bound)
        assert router.ask("POST", "/v1/match", PROMPT)[0] == 200


def test_the_status_says_how_the_agent_and_its_stores_are(node: Node) -> None:
    node.save()
    logger = logging.getLogger("objkv.net")
    logger.addHandler(node.warnings)
    with serving(node):
        api = AgentApi(node.http)
        status = api.status()
        found = [(one.area, one.url, one.error) for one in status.stores]
        assert found == [("bulk", "s3://kv", None), ("index", "rediss://***@index", None)]
        assert (status.role, status.is_accepting, status.clients) == ("writer", True, 7)
        assert (status.version, status.protocol) == (__version__, VERSION)
        assert status.memory_bytes == node.arena_cache.total_bytes
        assert (status.held_back_payloads, status.joins, status.disk_bytes) == (0, 0, None)
        assert status.warnings == []
        node.index.check = down  # type: ignore[method-assign]
        node.recorder.level("breaker_open_index_write", 1)
        logger.warning("index %s keep failing", "writes")
        status = api.status()
        errors = [(one.error, one.kind) for one in status.stores]
        assert errors == [(None, None), ("down", "StoreUnavailable")]
        assert [one.breakers_open for one in status.stores] == [[], ["write"]]
        assert [one.text for one in status.warnings] == ["index writes keep failing"]
        logger.warning("it answered: signature=0123abcd \x1b[2J")
        last = api.status().warnings[-1].text
        assert last == "it answered: signature=*** \N{REPLACEMENT CHARACTER}[2J"
    logger.removeHandler(node.warnings)
