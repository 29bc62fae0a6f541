"""How Redis is connected to, and providers of credentials for it: the operator's code, which may
raise or block in any way."""

import asyncio
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import redis

from objkv.assembly import credentials
from objkv.assembly.credentials import RenewedCredentials, load_credentials
from objkv.assembly.redis import connect_redis, describe_redis
from objkv.config import Config
from objkv.errors import ConfigError
from objkv.net.deadline import EndsBy
from objkv.redact import keep_secret, without_secrets


def options(url: str, **settings: object) -> dict[str, object]:
    client = connect_redis(Config.model_validate({"index_url": url, **settings}))
    assert isinstance(client, redis.Redis)
    return client.connection_pool.connection_kwargs


def test_user_and_password_come_from_the_url_unless_they_are_set() -> None:
    url = "redis://user:p%40ss@localhost"
    assert options(url)["username"] == "user"
    assert options(url)["password"] == "p@ss"
    both = options(url, redis_username="other", redis_password="hush")
    assert (both["username"], both["password"]) == ("other", "hush")


def test_a_sentinel_never_gets_the_password_of_redis() -> None:
    url = "redis+sentinel://localhost?service=s"
    client = connect_redis(Config(index_url=url, redis_username="u", redis_password="hush"))
    for sentinel in client.connection_pool.sentinel_manager.sentinels:
        given = sentinel.connection_pool.connection_kwargs
        assert (given["username"], given["password"]) == (None, None)


def test_pools_are_bounded_and_wait() -> None:
    for url in ("redis://localhost", "redis+sentinel://localhost?service=s"):
        pool = connect_redis(Config(index_url=url, load_threads=20)).connection_pool
        assert isinstance(pool, redis.BlockingConnectionPool)
        assert (pool.max_connections, pool.timeout) == (20, 2.0)


def test_time_outs_grow_with_the_lookup_deadline_but_have_floors() -> None:
    quick, slow = (
        options("redis://localhost"),
        options("redis://localhost", lookup_deadline_ms=5_000),
    )
    assert (quick["socket_connect_timeout"], quick["socket_timeout"]) == (1.0, 2.0)
    assert (slow["socket_connect_timeout"], slow["socket_timeout"]) == (5.0, 10.0)


def test_tls_checks_certificate_and_host_name(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).touch()
    files = {f"redis_{name}_file": tmp_path / name for name in ("ca", "cert", "key")}
    given = options("rediss://h", **files)
    assert given["ssl_check_hostname"] is True
    assert given["ssl_cert_reqs"] == "required"
    assert given["ssl_ca_certs"] == str(tmp_path / "ca")
    assert (given["ssl_certfile"], given["ssl_keyfile"]) == (
        str(tmp_path / "cert"),
        str(tmp_path / "key"),
    )


@pytest.mark.parametrize(
    ("url", "names", "words"),
    [
        ("redis://localhost", ["redis_ca_file"], "redis_ca_file: only used with TLS"),
        ("rediss://h", ["redis_cert_file"], "set both or neither"),
        ("rediss://h", ["redis_ca_file"], "No such file"),
    ],
)
def test_tls_files_that_cannot_be_used_are_refused(
    url: str, names: list[str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        options(url, **dict.fromkeys(names, tmp_path / "missing.pem"))


ASKED_S, ANSWERED_S = 1_000.0, 1_030.0


@pytest.mark.parametrize(
    ("told", "skew_s"),
    [((990, 0), -10.0), ((1_000, 0), 0.0), ((1_029, 500_000), 0.0), ((1_031, 500_000), 1.5)],
)
def test_an_answer_that_is_late_is_no_wrong_clock(told: tuple[int, int], skew_s: float) -> None:
    server = Mock(redis.Redis)
    server.info.return_value = {}
    server.time.return_value = told
    facts = describe_redis(server, clock=iter([ASKED_S, ANSWERED_S]).__next__)
    assert facts.clock_skew_s == skew_s


# Providers of credentials.


def provider_that(act: Any) -> RenewedCredentials:
    class Provider:
        def get_credentials(self) -> Any:
            return act()

    return RenewedCredentials(Provider, 9.0, name="m:f")


@pytest.mark.parametrize(
    "kind", [SystemExit, asyncio.CancelledError, KeyboardInterrupt, OSError, TimeoutError]
)
def test_whatever_a_provider_raises_is_a_server_that_is_unavailable_and_shows_no_secret(
    kind: type[BaseException],
) -> None:
    def act() -> Any:
        raise kind("bad t0ken-of-iam")

    keep_secret("t0ken-of-iam")
    with pytest.raises(redis.ConnectionError, match=rf"m:f failed: {kind.__name__}: bad \*\*\*$"):
        provider_that(act).get_credentials()


@pytest.mark.parametrize("words", [("user", "token\n"), ("user\r", "token")])
def test_a_provider_that_returns_a_line_break_is_told_so(words: tuple[str, str]) -> None:
    with pytest.raises(redis.ConnectionError, match="m:f returned a line break") as caught:
        provider_that(lambda: words).get_credentials()
    assert "token" not in str(caught.value)


def test_a_process_without_room_for_a_thread_is_a_server_that_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    provider = provider_that(lambda: ("user", "word"))
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", start)
        with pytest.raises(redis.ConnectionError, match="can't start new thread"):
            provider.get_credentials()
    assert provider.get_credentials() == ("user", "word")


def test_a_provider_that_never_returns_costs_fewer_and_fewer_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, now_s, calls = Event(), [1000.0], 0

    def act() -> Any:
        nonlocal calls
        calls += 1
        gate.wait(60)
        return ("user", "password-1")

    monkeypatch.setattr(credentials, "WAIT_S", 0.001)
    monkeypatch.setattr(credentials, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(credentials, "ends_s", lambda: now_s[0] + 60.0)
    renewed = provider_that(act)
    for _ in range(600):  # an hour, a login every six seconds
        with pytest.raises(redis.ConnectionError, match="returned nothing"):
            renewed.get_credentials()
        now_s[0] += 6.0
    assert 2 <= calls <= 8
    gate.set()
    monkeypatch.setattr(credentials, "WAIT_S", 30.0)
    assert renewed.get_credentials() == ("user", "password-1")


def test_the_reason_of_a_failed_import_shows_no_secret(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_secret("hunter2-hunter2")
    (tmp_path / "providers_of_mine.py").write_text("raise RuntimeError('hunter2-hunter2')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="RuntimeError") as caught:
        load_credentials("providers_of_mine:f", 9.0)
    assert "hunter2" not in str(caught.value)


def test_what_a_provider_returns_is_a_secret_from_then_on() -> None:
    assert provider_that(lambda: ("user", "t0ken-of-iam")).get_credentials()
    assert without_secrets("sent t0ken-of-iam") == "sent ***"


def test_a_provider_that_blocks_ends_with_the_call() -> None:
    gate, began_s = Event(), monotonic()
    with EndsBy(began_s + 0.05), pytest.raises(redis.ConnectionError, match="nothing within"):
        provider_that(lambda: gate.wait(5)).get_credentials()
    assert monotonic() - began_s < credentials.WAIT_S
    gate.set()
