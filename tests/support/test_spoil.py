"""The proxies that spoil answers: what is asked for happens, and nothing else does."""

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support.servers.quick_s3 import QuickS3
from tests.support.servers.redis import valkey_server, wait_until
from tests.support.servers.spoil import Spoil
from tests.support.servers.spoil_redis import SpoilRedis
from tests.support.servers.spoil_s3 import SpoilS3

GETS = frozenset({"GET"})
HASTY_S = 0.2
"""For an answer that never comes."""
A, B = bytes(range(200)) * 9, bytes(range(1, 201)) * 9


@pytest.fixture
def s3() -> Iterator[SpoilS3]:
    with QuickS3() as server, SpoilS3(server.address) as proxy:
        for name, value in (("a", A), ("b", B)):
            assert ask(proxy, "PUT", name, value)[0] == 200
        yield proxy


def ask(
    proxy: SpoilS3, method: str, name: str, body: bytes = b"", *, timeout_s: float = 120
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*proxy.address, timeout=timeout_s)
    try:
        connection.request(method, f"/bucket/{name}.safetensors", body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_unspoiled_requests_pass_and_are_counted(s3: SpoilS3) -> None:
    assert ask(s3, "GET", "a") == (200, A)
    assert ask(s3, "HEAD", "a") == (200, b"")
    assert ask(s3, "GET", "c")[0] == 404
    assert s3.asked == {"PUT": 2, "GET": 2, "HEAD": 1}
    assert not s3.spoiled


def test_what_is_overlooked_is_neither_spoiled_nor_counted(s3: SpoilS3) -> None:
    s3.overlooked = b"/bucket/b"
    s3.spoil(Spoil("flip", GETS))
    assert ask(s3, "GET", "b") == (200, B)
    assert "GET" not in s3.asked
    assert ask(s3, "GET", "a")[1] != A
    assert s3.spoiled == {"flip": 1}


@pytest.mark.parametrize("fault", ["reset", "unanswered", "stall"])
def test_a_connection_ends_as_it_is_told_to(s3: SpoilS3, fault: str) -> None:
    s3.spoil(Spoil(fault, GETS))
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead, TimeoutError)):
        ask(s3, "GET", "a", timeout_s=HASTY_S if fault == "stall" else 120)
    wait_until(lambda: s3.spoiled == {fault: 1}, "the request to be spoiled")
    s3.mend()
    assert ask(s3, "GET", "a") == (200, A)


def test_bytes_are_others(s3: SpoilS3) -> None:
    s3.spoil(Spoil("flip", GETS, times=1), Spoil("another", GETS))
    wrong = ask(s3, "GET", "a")[1]
    assert sum(x != y for x, y in zip(wrong, A, strict=True)) == 1
    assert ask(s3, "GET", "a") == (200, B)
    s3.spoil(Spoil("truncate", GETS))
    assert ask(s3, "GET", "a") == (200, A[: len(A) // 2])


def test_rules_spare_whom_they_do_not_name(s3: SpoilS3) -> None:
    s3.spoil(Spoil("error", GETS, b"/bucket/b", skip=1, times=1, error="503 SlowDown"))
    statuses = [ask(s3, "GET", name)[0] for name in ("a", "b", "b", "b")]
    assert statuses == [200, 200, 503, 200]


def test_what_is_not_answered_was_done(s3: SpoilS3) -> None:
    s3.spoil(Spoil("unanswered", frozenset({"PUT"})))
    with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
        ask(s3, "PUT", "c", b"value")
    assert ask(s3, "GET", "c") == (200, b"value")


def test_a_hook_is_called_before_the_request_goes_on(s3: SpoilS3) -> None:
    s3.spoil(Spoil("hook", GETS, times=1, hook=lambda: ask(s3, "DELETE", "a") and None))
    assert ask(s3, "GET", "a")[0] == 404


def test_a_closed_proxy_frees_whom_it_stalls() -> None:
    with QuickS3() as server, SpoilS3(server.address) as proxy:
        proxy.spoil(Spoil("stall"))
        with socket.create_connection(proxy.address) as client:
            client.sendall(b"HEAD /bucket/a HTTP/1.1\r\n\r\n")


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[tuple[SpoilRedis, redis.Redis]]:
    with (
        valkey_server(tmp_path) as server,
        SpoilRedis(("127.0.0.1", server.port)) as proxy,
        redis.Redis(port=proxy.address[1], protocol=2, socket_timeout=120, retry=None) as client,
    ):
        client.set("a", A)
        client.set("b", B)
        assert (client.get("a"), client.get("b")) == (A, B)
        yield proxy, client


def test_redis_is_spoiled_too(valkey: tuple[SpoilRedis, redis.Redis]) -> None:
    proxy, client = valkey
    proxy.spoil(Spoil("another", GETS, times=1), Spoil("flip", GETS))
    assert client.get("a") == B
    wrong = client.get("a")
    assert isinstance(wrong, bytes)
    assert sum(x != y for x, y in zip(wrong, A, strict=True)) == 1
    for fault in ("reset", "unanswered", "truncate"):
        proxy.spoil(Spoil(fault, GETS, times=1))
        with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
            client.get("a")
    proxy.spoil(Spoil("stall", GETS))
    with (
        redis.Redis(port=proxy.address[1], socket_timeout=HASTY_S, retry=None) as hasty,
        pytest.raises((redis.ConnectionError, redis.TimeoutError)),
    ):
        hasty.get("a")
    proxy.spoil(Spoil("error", GETS, error="LOADING wait"))
    with pytest.raises(redis.exceptions.BusyLoadingError):
        client.get("a")
    proxy.spoil(Spoil("lag", lag_s=0.01))
    assert client.get("a") == A
    assert client.pipeline(transaction=False).get("a").get("b").execute() == [A, B]
