"""Credentials for Redis that expire: tokens of IAM or Entra, from a provider that operators name.

``redis_credentials`` names a factory, which returns an object with ``get_credentials()``, such as
redis-py's ``CredentialProvider``. Every login calls it. It is code of the operator, which may raise
or block, so it runs on a thread of its own, and a connection waits for it only briefly.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from importlib import import_module
from threading import Lock, Thread
from typing import Any

from redis.credentials import CredentialProvider

from objkv.errors import ConfigError
from objkv.net.deadline import ends_s
from objkv.net.redis_errors import NotTried
from objkv.redact import keep_secret, without_secrets

WAIT_S = 2.0
"""How long a connection waits for credentials: as long as for one reply of the server."""
_ABANDON_S, _ABANDON_S_MAX = 60.0, 3600.0
"""When a call is abandoned together with its thread. The time doubles until a call returns, so that
a provider that always blocks costs few threads."""


class RenewedCredentials(CredentialProvider):
    """Calls ``factory``'s provider for logins, which share a call, on a thread. Thread-safe."""

    def __init__(self, factory: Callable[[], Any], login_s: float, *, name: str) -> None:
        """``login_s``: how long a connection may keep its login."""
        self.login_s = login_s
        self._factory, self._name = factory, name
        self._lock = Lock()
        self._provider: Any = None
        self._call: Future[Any] | None = None
        self._begun_s, self._abandon_s = 0.0, _ABANDON_S
        self._process = os.getpid()

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return user and password, or a password, within ``WAIT_S``. Raises ``NotTried``."""
        left_s = min(WAIT_S, ends_s() - time.monotonic())
        call = self._current_call()
        try:
            # The operator's code may raise anything, SystemExit too: it is read, not raised here.
            error = call.exception(max(0.0, left_s))
        except TimeoutError:
            raise NotTried(
                f"redis_credentials: {self._name} returned nothing within {WAIT_S:g} s"
            ) from None
        if error is not None:  # not chained: a traceback may quote a token
            reason = without_secrets(f"{type(error).__name__}: {error}")
            raise NotTried(f"redis_credentials: {self._name} failed: {reason}")
        found = call.result()
        words = tuple(found) if isinstance(found, tuple | list) else ()
        if len(words) not in (1, 2) or not all(isinstance(word, str) for word in words):
            raise NotTried(
                f"redis_credentials: {self._name} must return (user, password) or (password,)"
            )
        keep_secret(words[-1])
        if not all(word.isprintable() for word in words):
            raise NotTried(
                f"redis_credentials: {self._name} returned a line break or another control "
                "character: remove it there"
            )
        return words

    def _current_call(self) -> Future[Any]:
        """Return the call in progress, or a new one."""
        with self._lock:
            call, now_s = self._call, time.monotonic()
            is_ended = call is None or call.done() or self._process != os.getpid()
            if call is not None and not is_ended and now_s - self._begun_s <= self._abandon_s:
                return call
            longer_s = min(2 * self._abandon_s, _ABANDON_S_MAX)
            self._abandon_s = _ABANDON_S if is_ended else longer_s
            begun: Future[Any] = Future()
            self._call, self._begun_s, self._process = begun, now_s, os.getpid()
            name = "objkv-credentials"
            try:
                Thread(target=self._run, args=(begun,), name=name, daemon=True).start()
            except RuntimeError as exc:  # the process can start no more threads
                begun.set_exception(exc)
            return begun

    def _run(self, call: Future[Any]) -> None:
        try:
            if self._provider is None:
                self._provider = self._factory()
            call.set_result(self._provider.get_credentials())
        except BaseException as exc:  # raised by the waiting connection
            call.set_exception(exc)


@lru_cache(maxsize=8)
def load_credentials(name: str, login_s: float) -> RenewedCredentials:
    """Return the credentials of ``name``, ``module:factory``. All clients of a process share them,
    because a provider may cache its tokens. Calls nothing yet. Raises ``ConfigError``."""
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    # An import runs the operator's code, which may raise anything.
    except Exception as exc:
        reason = without_secrets(f"{type(exc).__name__}: {exc}")
        raise ConfigError(f"redis_credentials {name!r} cannot be imported: {reason}") from None
    if not callable(factory):
        raise ConfigError(f"redis_credentials {name!r} is not callable")
    return RenewedCredentials(factory, login_s, name=name)
