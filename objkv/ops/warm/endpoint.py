"""One OpenAI-compatible endpoint: a vLLM server, or a proxy or router in front of several."""

import asyncio
import json
import os
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from threading import Lock, Thread
from time import time
from typing import Any, Final, TypeVar

import httpx

from objkv.config.aws import is_plain
from objkv.config.urls import Url, parse_endpoint
from objkv.errors import ConfigError
from objkv.ops.warm.prefill import TRANSFER_PARAMS, PrefillError, PrefillReply, PrefillRequest
from objkv.ops.warm.prompts import WarmPrompt

T = TypeVar("T")


class LoopClosed(Exception):
    """The call was cancelled, or the loop is closed."""


class Loop:
    """An event loop on its own thread. Unlike a thread that waits for a socket, its calls can be
    cancelled at any time, and the server notices the closed connection."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = Lock()
        self._closed = False
        self._thread = Thread(target=self._loop.run_forever, name="objkv-warm-http", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` and wait for its result. Raises its exceptions, and ``LoopClosed``."""
        with self._lock:
            if self._closed:
                raise LoopClosed
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except CancelledError as exc:
            raise LoopClosed from exc

    def close(self, last: Callable[[], Awaitable[None]]) -> None:
        """Cancel all calls, then run ``last``. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


AT_ONCE: Final = 8
_CONNECT_S: Final = 10.0
_CHECK_S: Final = 10.0
"""Time limit of requests that need no computing."""
_ANSWER_BYTES_MAX: Final = 64 << 20
"""Ids of a million tokens are 8 MB."""
_TOLD_MAX: Final = 300
_BUSY: Final = (429, 503)
_OF_A_CHECK: Final = ("/health", "/v1/models")


@dataclass(frozen=True, slots=True)
class EndpointLimits:
    """Limits of the requests to an endpoint."""

    at_once: int = AT_ONCE
    answer_s: float = 600.0
    """A request that takes longer is retried, on another endpoint if possible."""


@dataclass(frozen=True, slots=True)
class Served:
    """The models that an endpoint serves."""

    model: str
    """The base model's name in requests."""
    root: str
    """The folder or hub id that the model was loaded from."""
    adapters: tuple[str, ...]


class PrefillEndpoint:
    """See ``Prefiller``."""

    def __init__(
        self,
        url: str,
        limits: EndpointLimits,
        *,
        model: str | None = None,
        api_key: str | None = None,
        allow_plaintext: bool = False,
    ) -> None:
        """``url``: with or without ``/v1``. ``model``: the one to use of several. Raises
        ``ConfigError``."""
        place = _place(url, api_key is not None and not allow_plaintext)
        self._base = (place.root + f"/{place.path}".removesuffix("/v1")).rstrip("/")
        self._limits = limits
        self._model = model
        self._served: Served | None = None
        if not is_plain(api_key or ""):
            raise ConfigError(
                "the API key (--api-key, VLLM_API_KEY) contains a space, a line break or a "
                "character other than ASCII: give it without"
            )
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._loop = Loop()
        self._http = httpx.AsyncClient(
            base_url=self._base,
            headers=headers,
            timeout=httpx.Timeout(limits.answer_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=limits.at_once + 2),
            # Servers on this machine are never reached through a proxy.
            trust_env=place.is_far,
        )

    def __repr__(self) -> str:
        return f"<Endpoint {self._base}>"

    @property
    def name(self) -> str:
        """See ``Prefiller``."""
        return self._base

    @property
    def at_once(self) -> int:
        """See ``Prefiller``."""
        return self._limits.at_once

    def check(self) -> None:
        """See ``Prefiller``. Raises ``ConfigError`` if the endpoint does not serve the model."""
        bound_s = min(_CHECK_S, self._limits.answer_s)
        self._call("GET", "/health", bound_s=bound_s)
        if self._served is None:
            told = self._call("GET", "/v1/models", bound_s=bound_s)
            self._served = _served(told, self._model, self._base)

    @property
    def served(self) -> Served:
        """The served models; available after ``check``."""
        assert self._served is not None
        return self._served

    def tokenize(self, prompt: WarmPrompt) -> list[int]:
        """See ``Prefiller``."""
        if prompt.tokens is not None:
            return list(prompt.tokens)
        request: dict[str, Any] = {"model": prompt.model or self.served.model}
        if prompt.chat is not None:
            request |= {"messages": list(prompt.chat.messages), **prompt.chat.options}
        else:
            request["prompt"] = prompt.text
        answer = self._call("POST", "/tokenize", request)
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
            raise PrefillError("refused", f"{self._base} does not tokenize: use --tokenizer")
        return tokens

    def ask(self, ask: PrefillRequest) -> PrefillReply:
        """See ``Prefiller``."""
        request: dict[str, Any] = {
            "model": ask.model or self.served.model,
            "prompt": list(ask.tokens),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": TRANSFER_PARAMS,
        }
        if ask.salt is not None:
            request["cache_salt"] = ask.salt
        answer = self._call("POST", "/v1/completions", request)
        usage = answer.get("usage")
        if not isinstance(usage, Mapping) or usage.get("prompt_tokens") != len(ask.tokens):
            told = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
            raise PrefillError(
                "refused", f"{self._base} computed {told} of {len(ask.tokens)} tokens"
            )
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        return PrefillReply(cached if type(cached) is int else None)

    def close(self) -> None:
        """See ``Prefiller``."""
        self._loop.close(self._http.aclose)

    def _call(
        self, method: str, path: str, request: object = None, *, bound_s: float | None = None
    ) -> dict[str, Any]:
        what = f"{self._base}{path}"
        content = None if request is None else json.dumps(request).encode()
        bound_s = bound_s or self._limits.answer_s
        try:
            # A limit for the whole request: the client's limits apply to each read.
            answer = self._loop.call(
                lambda: asyncio.wait_for(self._answer(method, path, content), bound_s)
            )
        except (httpx.TimeoutException, TimeoutError) as exc:
            is_down = isinstance(exc, httpx.ConnectTimeout)
            raise PrefillError(
                "down" if is_down else "failed", f"{what}: no answer within the time limit"
            ) from exc
        except httpx.InvalidURL as exc:
            raise ConfigError(f"endpoint {self._base}: {exc}") from exc
        except httpx.HTTPError as exc:
            raise PrefillError("down", f"{what}: {_reason(exc)}") from exc
        except LoopClosed as exc:
            raise PrefillError("down", f"{what}: cancelled") from exc
        if len(answer.content) > _ANSWER_BYTES_MAX:
            raise PrefillError("failed", f"{what}: longer than {_ANSWER_BYTES_MAX} bytes")
        if 200 <= answer.status < 300:
            return _parsed(answer, what, is_health=path == "/health")
        if answer.status == 404 and path in _OF_A_CHECK:
            why = f"{self._base} answers HTTP 404 on {path}: check that it is a vLLM server"
            raise PrefillError("refused", why)
        raise _error(answer, what)

    async def _answer(self, method: str, path: str, content: bytes | None) -> "_Answer":
        headers = {} if content is None else {"Content-Type": "application/json"}
        read = bytearray()
        async with self._http.stream(method, path, content=content, headers=headers) as answer:
            async for piece in answer.aiter_bytes():
                read += piece
                if len(read) > _ANSWER_BYTES_MAX:
                    break
        return _Answer(answer.status_code, answer.headers.get("retry-after", ""), bytes(read))


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    retry_after: str
    content: bytes
    """May exceed the limit by one piece."""


def _parsed(answer: _Answer, what: str, *, is_health: bool) -> dict[str, Any]:
    if not answer.content:  # as vLLM's /health
        return {}
    try:
        found = json.loads(answer.content)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    if is_health:
        return {}
    why = f"{what}: the answer is not a JSON object: check that the server is OpenAI-compatible"
    raise PrefillError("refused", why)


def _error(answer: _Answer, what: str) -> Exception:
    why = f"{what}: HTTP {answer.status}: {_told(answer)}".rstrip(": ")
    if answer.status in _BUSY:
        return PrefillError("busy", why, after_s=_retry_after(answer.retry_after))
    if answer.status in (401, 403):
        return ConfigError(f"{why}; set --api-key or VLLM_API_KEY")
    if answer.status in (502, 504):  # a proxy in front of the fleet reached no server
        return PrefillError("down", why)
    if answer.status >= 500 or answer.status == 408:
        return PrefillError("failed", why)
    return PrefillError("refused", why)


def _told(answer: _Answer) -> str:
    """Return the error message in the body, as one line."""
    try:
        found: Any = json.loads(answer.content)
    except ValueError:
        found = answer.content.decode("utf-8", "replace")
        if found.lstrip().startswith("<"):  # an HTML page
            return ""
    while isinstance(found, dict):
        found = found.get("error", found.get("message", found.get("detail", "")))
    return " ".join(str(found).split())[:_TOLD_MAX]


def _reason(error: BaseException) -> str:
    """Return the operating system's error text rather than the HTTP client's."""
    told = str(error) or type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            number = 0 if isinstance(cause, ssl.SSLError) else cause.errno or 0
            told = os.strerror(number) if number > 0 else cause.strerror
            told = told[:1].lower() + told[1:]
        if isinstance(cause, BaseExceptionGroup):  # one for each address of a name
            cause = cause.exceptions[0]
        else:
            cause = cause.__cause__ or cause.__context__
    return told


def _retry_after(text: str) -> float | None:
    value = text.strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except (TypeError, ValueError):
        return None


def _served(answer: Mapping[str, Any], wanted: str | None, base: str) -> Served:
    cards = answer.get("data")
    known = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    models = {str(card.get("id")): card for card in known if not card.get("parent")}
    adapters = tuple(str(card.get("id")) for card in known if card.get("parent"))
    if wanted is None:
        wanted = next(iter(models), None)
    if wanted is None or wanted not in models:
        raise ConfigError(f"{base} serves {', '.join(models) or 'no model'}, not {wanted}")
    return Served(wanted, str(models[wanted].get("root") or wanted), adapters)


def _place(url: str, refuse_clear: bool) -> Url:
    _, place = parse_endpoint(url)
    if place.user or place.password:
        raise ConfigError("an endpoint's URL must not contain a password: use --api-key")
    if refuse_clear and place.is_far and not place.is_tls:
        raise ConfigError(
            f"endpoint {place.shown}: the API key would cross the network unencrypted: use "
            "https://, or set allow_plaintext to true on a trusted network"
        )
    return place
