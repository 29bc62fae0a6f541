"""Providers of credentials are the operator's code: they may raise or block in any way."""

import asyncio
from threading import Event, Thread
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from objkv.assembly import credentials
from objkv.assembly.credentials import RenewedCredentials, load_credentials
from objkv.errors import ConfigError
from objkv.net.deadline import EndsBy
from objkv.redact import keep_secret, without_secrets


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
