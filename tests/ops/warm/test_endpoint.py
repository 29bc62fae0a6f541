"""One endpoint: what is sent, and what is made of its answers."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from objkv.errors import ConfigError
from objkv.ops.warm import endpoint as endpoint_module
from objkv.ops.warm.endpoint import Endpoint, EndpointError
from objkv.ops.warm.prompts import WarmPrompt
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.ops.warm.fake_vllm import FakeVllm, Handler, Place, status

TOKENS = [1, 2, 3]


@pytest.fixture
def server(bulk: MemoryStore, index: MemoryIndex) -> Iterator[FakeVllm]:
    with FakeVllm(Place(bulk, index)) as server:
        yield server


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(url, **options)
    try:
        yield endpoint
    finally:
        await endpoint.close()


def computed(server: FakeVllm) -> int | None:
    """What one request gives, to an endpoint that was checked."""

    async def work() -> int | None:
        async with opened(f"{server.url}/v1/", api_key="sesame") as endpoint:
            assert "sesame" not in repr(endpoint)
            await endpoint.check()
            return await endpoint.compute(TOKENS, "salt")

    return asyncio.run(work())


def raw(code: int, body: bytes) -> Callable[[Handler], bool]:
    """An answer of these bytes."""

    def fault(handler: Handler) -> bool:
        handler.send_response(code)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return True

    return fault


def test_the_key_is_sent_and_the_address_may_end_in_v1(server: FakeVllm) -> None:
    computed(server)
    assert server.headers[-1]["Authorization"] == "Bearer sesame"
    assert (server.asked[0].tokens, server.asked[0].salt) == ((1, 2, 3), "salt")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (429, "busy"),
        (503, "busy"),
        (500, "failed"),
        (502, "down"),
        (504, "down"),
        (400, "refused"),
        (404, "refused"),
    ],
)
def test_what_an_answer_means_is_told_by_its_status(server: FakeVllm, code: int, kind: str) -> None:
    server.every = status(code)
    with pytest.raises(EndpointError) as raised:
        computed(server)
    assert raised.value.kind == kind
    assert f"HTTP {code}: told so" in str(raised.value)


def test_who_is_not_let_in_is_told_what_to_give(server: FakeVllm) -> None:
    server.every = status(401)
    with pytest.raises(ConfigError, match="VLLM_API_KEY"):
        computed(server)


def test_a_server_that_computed_another_number_of_tokens_is_not_believed(server: FakeVllm) -> None:
    def cut(handler: Handler) -> bool:
        return handler.answer(200, {"usage": {"prompt_tokens": 2}})

    server.every = cut
    with pytest.raises(EndpointError, match="computed 2 of 3 tokens"):
        computed(server)


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_ids_that_no_token_has_are_not_taken(server: FakeVllm, token: int) -> None:
    async def work() -> list[int]:
        async with opened(server.url) as endpoint:
            return await endpoint.tokenize(WarmPrompt("p", text=f"7 {token}"))

    with pytest.raises(EndpointError, match="does not tokenize"):
        asyncio.run(work())


@pytest.mark.parametrize("code", [200, 500])
def test_an_answer_that_is_nested_without_an_end_is_one_more_bad_answer(
    server: FakeVllm, code: int
) -> None:
    server.every = raw(code, b"[" * 200_000)
    with pytest.raises(EndpointError):
        computed(server)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://me:secret@host", "must not contain a password"),
        ("ftp://me:secret@host", "endpoint: write http://HOST:PORT"),
        ("http://a\u2028b", "a space or a control character"),
        ("http://gpu-7.example.com:8000", "would cross the network unencrypted"),
    ],
)
def test_addresses_that_are_none_or_not_safe_are_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        Endpoint(url, api_key="sesame")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("key", ["sesame-open\n", "sesame open", "sésame-open"])
def test_a_key_that_no_request_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="VLLM_API_KEY") as raised:
        Endpoint("http://127.0.0.1:1", api_key=key)
    assert "open" not in str(raised.value)


def test_a_check_does_not_wait_as_long_as_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "_CHECK_S", 0.2, raising=False)

    async def check(url: str) -> None:
        async with opened(url) as endpoint:
            await endpoint.check()

    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(EndpointError, match="no answer within the time limit"),
    ):
        asyncio.run(check(f"http://127.0.0.1:{silent.getsockname()[1]}"))


def endless(handler: Handler) -> bool:
    """Answers until nobody listens."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
    handler.wfile.write(b"Transfer-Encoding: chunked\r\n\r\n")
    with suppress(OSError):
        while True:
            handler.wfile.write(b"400\r\n%s\r\n" % (b"x" * 1024))
            handler.wfile.flush()
    handler.close_connection = True
    return True


def test_an_answer_without_an_end_is_not_kept(
    server: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "_ANSWER_BYTES_MAX", 1 << 16, raising=False)
    server.every = endless
    with pytest.raises(EndpointError, match="longer than 65536 bytes") as raised:
        computed(server)
    assert raised.value.kind == "failed"


@pytest.mark.parametrize(
    ("errors", "pause_s"),
    [
        ([EndpointError("busy", "later", after_s=7.0)], 7.0),
        ([EndpointError("busy", "later", after_s=1e9)], 120.0),
        ([EndpointError("down", "gone")] * 9, 0.5),
        ([EndpointError("refused", "too long", after_s=7.0)], 0.0),
    ],
)
def test_an_endpoint_is_left_alone_for_as_long_as_its_errors_ask(
    errors: list[EndpointError], pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "monotonic", lambda: 100.0)
    endpoint = Endpoint("http://127.0.0.1:1")
    for error in errors:  # of requests that were sent together
        endpoint.failed(error)
    assert max(0.0, endpoint.not_before_s - 100.0) == pause_s


def test_one_that_stays_down_is_tried_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, now_s, pauses = Endpoint("http://127.0.0.1:1"), 100.0, []
    for _ in range(9):
        monkeypatch.setattr(endpoint_module, "monotonic", lambda at=now_s: at)
        endpoint.failed(EndpointError("down", "gone"))
        pauses.append(endpoint.not_before_s - now_s)
        now_s = endpoint.not_before_s
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert endpoint.down_since_s == 100.0
