"""One endpoint: what is sent, and what is made of its answers."""

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from objkv.errors import ConfigError
from objkv.ops.warm import endpoint as endpoint_module
from objkv.ops.warm.endpoint import EndpointLimits, PrefillEndpoint
from objkv.ops.warm.prefill import PrefillError, PrefillRequest
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.ops.warm.fake_vllm import FakeVllm, Handler, Place, status

ASK = PrefillRequest([1, 2, 3], "salt", None)


@pytest.fixture
def server(bulk: MemoryStore, index: MemoryIndex) -> Iterator[FakeVllm]:
    with FakeVllm(Place(bulk, index)) as server:
        yield server


@pytest.fixture
def endpoint(server: FakeVllm) -> Iterator[PrefillEndpoint]:
    endpoint = PrefillEndpoint(f"{server.url}/v1/", EndpointLimits(), api_key="sesame")
    endpoint.check()
    yield endpoint
    endpoint.close()


def test_the_key_is_sent_and_the_address_may_end_in_v1(
    server: FakeVllm, endpoint: PrefillEndpoint
) -> None:
    endpoint.ask(ASK)
    assert server.headers[-1]["Authorization"] == "Bearer sesame"
    assert (server.asked[0].tokens, server.asked[0].salt) == ((1, 2, 3), "salt")
    assert "sesame" not in repr(endpoint)


@pytest.mark.parametrize(
    ("code", "trouble"),
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
def test_what_an_answer_means_is_told_by_its_status(
    server: FakeVllm, endpoint: PrefillEndpoint, code: int, trouble: str
) -> None:
    server.every = status(code)
    with pytest.raises(PrefillError) as raised:
        endpoint.ask(ASK)
    assert raised.value.trouble == trouble
    assert f"HTTP {code}: told so" in str(raised.value)


def test_who_is_not_let_in_is_told_what_to_give(
    server: FakeVllm, endpoint: PrefillEndpoint
) -> None:
    server.every = status(401)
    with pytest.raises(ConfigError, match="--api-key"):
        endpoint.ask(ASK)


def test_a_server_that_computed_another_number_of_tokens_is_not_believed(
    server: FakeVllm, endpoint: PrefillEndpoint
) -> None:
    def cut(handler: Handler) -> bool:
        return handler.answer(200, {"usage": {"prompt_tokens": 2}})

    server.every = cut
    with pytest.raises(PrefillError, match="computed 2 of 3 tokens"):
        endpoint.ask(ASK)


def test_a_call_that_waits_ends_when_the_endpoint_is_closed(
    server: FakeVllm, endpoint: PrefillEndpoint
) -> None:
    def close(handler: Handler) -> bool:
        endpoint.close()
        return False

    server.every = close
    with pytest.raises(PrefillError, match="cancelled"):
        endpoint.ask(ASK)
    with pytest.raises(PrefillError, match="cancelled"):
        endpoint.ask(ASK)


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
        PrefillEndpoint(url, EndpointLimits(), api_key="sesame")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("key", ["sesame-open\n", "sesame open", "sésame-open"])
def test_a_key_that_no_request_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="VLLM_API_KEY") as raised:
        PrefillEndpoint("http://127.0.0.1:1", EndpointLimits(), api_key=key)
    assert "open" not in str(raised.value)


def test_a_check_does_not_wait_as_long_as_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "_CHECK_S", 0.2, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = PrefillEndpoint(f"http://127.0.0.1:{silent.getsockname()[1]}", EndpointLimits())
        with pytest.raises(PrefillError, match="no answer within the time limit"):
            endpoint.check()
        endpoint.close()


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
    server: FakeVllm, endpoint: PrefillEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "_ANSWER_BYTES_MAX", 1 << 16, raising=False)
    server.every = endless
    with pytest.raises(PrefillError, match="longer than 65536 bytes") as raised:
        endpoint.ask(ASK)
    assert raised.value.trouble == "failed"
