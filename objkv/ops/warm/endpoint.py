"""One OpenAI-compatible endpoint: a vLLM server, or a proxy or router in front of several.

All methods run on one event loop, so that a request can be cancelled at any time: the server then
notices the closed connection and stops computing.
"""

import asyncio
import json
import os
import ssl
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import monotonic, time
from typing import Any, Final, Literal

import httpx

from objkv.config.aws import is_plain
from objkv.config.urls import Url, parse_endpoint
from objkv.errors import ConfigError, ObjkvError
from objkv.ops.warm.prompts import WarmPrompt
from objkv.ops.warm.report import EndpointReport

Trouble = Literal["busy", "down", "failed", "refused"]
TRANSFER_PARAMS: Final = {"objkv_put": True}
"""Of each request: node agents put its chunks at once, see ``connector.kv.request_limits``."""
_CONNECT_S: Final = 10.0
_CHECK_S: Final = 10.0
"""Time limit of requests that need no computing."""
_ANSWER_BYTES_MAX: Final = 64 << 20
"""Ids of a million tokens are 8 MB."""
_TOKENS: Final = 1 << 32
_ERROR_MAX: Final = 300
_FIRST_PAUSE_S: Final = 0.5
_PAUSE_MAX_S: Final = 30.0
_RETRY_AFTER_MAX_S: Final = 120.0


class EndpointError(ObjkvError):
    """No reply. ``busy``: retry later. ``down``: the endpoint is unreachable, try another.
    ``failed``: only this request failed and may be retried. ``refused``: a retry would fail too."""

    def __init__(self, trouble: Trouble, why: str, *, after_s: float | None = None) -> None:
        super().__init__(why)
        self.trouble = trouble
        self.after_s = after_s
        """Seconds to wait before a retry, if the endpoint reported it."""


class Endpoint:
    """Computes prompts, and knows how it fares: pauses after errors, and checks before the next
    request once it was unreachable. Raises ``EndpointError``, and ``ConfigError`` for a model that
    it does not serve and a key that it does not accept."""

    def __init__(
        self,
        url: str,
        *,
        at_once: int = 8,
        answer_s: float = 600.0,
        model: str | None = None,
        api_key: str | None = None,
        allow_plaintext: bool = False,
        socket: Path | None = None,
    ) -> None:
        """``url``: with or without ``/v1``. ``at_once``: concurrent requests. ``answer_s``: a
        request that takes longer has failed. ``model``: the one to use of several. ``socket``: the
        Unix socket to connect to, whatever host the URL names. Raises ``ConfigError``."""
        place = _place(url, api_key is not None and not allow_plaintext)
        self.name = (place.root + f"/{place.path}".removesuffix("/v1")).rstrip("/")
        self.at_once = at_once
        if not is_plain(api_key or ""):
            raise ConfigError(
                "the API key (--api-key, VLLM_API_KEY) contains a space, a line break or a "
                "character other than ASCII: give it without"
            )
        self._answer_s = answer_s
        self._wanted = model
        self.model = ""
        """The base model's name in requests; empty before it has passed a check."""
        limits = httpx.Limits(max_connections=at_once + 2)
        self._http = httpx.AsyncClient(
            base_url=self.name,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(answer_s, connect=_CONNECT_S),
            limits=limits,
            # Servers on this machine are never reached through a proxy.
            trust_env=place.is_far,
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=limits) if socket else None,
        )
        self._answered = self._tokens = self._errors = self._failed_in_row = 0
        self._last_error = ""
        self._not_before_s = 0.0
        self._recovery = asyncio.Lock()
        self.down_since_s: float | None = None
        """When it became unreachable, by ``monotonic``; None while it answers."""

    def __repr__(self) -> str:
        return f"<Endpoint {self.name}>"

    async def check(self) -> None:
        """Return if it accepts requests and serves the model."""
        bound_s = min(_CHECK_S, self._answer_s)
        await self._call("GET", "/health", bound_s=bound_s)
        if not self.model:
            answer = await self._call("GET", "/v1/models", bound_s=bound_s)
            self.model = _served(answer, self._wanted, self.name)

    async def tokenize(self, prompt: WarmPrompt) -> list[int]:
        """Return the token ids that a request with this prompt would have."""
        request: dict[str, Any] = {"model": prompt.model or self.model}
        if prompt.chat is not None:
            request |= {"messages": list(prompt.chat.messages), **prompt.chat.options}
        else:
            request["prompt"] = prompt.text
        answer = await self._call("POST", "/tokenize", request)
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(map(_is_token, tokens)):
            raise EndpointError("refused", f"{self.name} does not tokenize: give token ids")
        return tokens

    async def compute(
        self, tokens: Sequence[int], salt: str | None, adapter: str | None
    ) -> int | None:
        """Compute a prompt and one token after it. Its saves may still be in flight afterwards.

        ``adapter``: None means the base model. Return how many prompt tokens were loaded or in the
        engine's own cache; None if that is not reported.
        """
        request: dict[str, Any] = {
            "model": adapter or self.model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": TRANSFER_PARAMS,
        }
        if salt is not None:
            request["cache_salt"] = salt
        answer = await self._call("POST", "/v1/completions", request)
        usage = answer.get("usage")
        usage = usage if isinstance(usage, Mapping) else {}
        if (computed := usage.get("prompt_tokens")) != len(tokens):
            why = f"{self.name} computed {computed} of {len(tokens)} tokens"
            raise EndpointError("refused", why)
        self._answered += 1
        self._tokens += len(tokens)
        self._failed_in_row, self.down_since_s = 0, None
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        return cached if type(cached) is int else None

    def failed(self, error: EndpointError) -> None:
        """Note a failed request or check: the next one waits, the longer the more have failed."""
        if error.trouble == "refused":  # the prompt is at fault, and the endpoint answers
            self._failed_in_row = 0
            return
        now = monotonic()
        self._errors += 1
        self._failed_in_row += 1
        self._last_error = str(error)
        if error.trouble == "down" and self.down_since_s is None:
            self.down_since_s = now
        pause_s = min(_PAUSE_MAX_S, _FIRST_PAUSE_S * 2 ** min(self._failed_in_row - 1, 10))
        if error.trouble == "failed":  # its other requests may succeed
            pause_s = _FIRST_PAUSE_S
        if error.after_s is not None:
            pause_s = max(pause_s, min(error.after_s, _RETRY_AFTER_MAX_S))
        self._not_before_s = max(self._not_before_s, now + pause_s)

    async def ready(self) -> None:
        """Wait until it may be used: its pause is over, and it answers."""
        async with self._recovery:  # one check for all that wait
            while True:
                if (pause_s := self._not_before_s - monotonic()) > 0:
                    await asyncio.sleep(pause_s)
                elif self.down_since_s is None:
                    return
                else:
                    try:
                        await self.check()
                    except (EndpointError, ConfigError) as exc:  # another model is served now
                        self.failed(EndpointError("down", str(exc)))
                    else:
                        self._failed_in_row, self.down_since_s = 0, None

    def report(self) -> EndpointReport:
        """Return its totals."""
        is_down = self.down_since_s is not None
        return EndpointReport(
            self.name, self._answered, self._tokens, self._errors, is_down, self._last_error
        )

    async def close(self) -> None:
        """Close its connections. Idempotent."""
        await self._http.aclose()

    async def _call(
        self, method: str, path: str, request: object = None, *, bound_s: float | None = None
    ) -> dict[str, Any]:
        what = f"{self.name}{path}"
        content = None if request is None else json.dumps(request).encode()
        headers = {} if content is None else {"Content-Type": "application/json"}
        read = bytearray()
        try:
            # A limit for the whole request: the client's limits apply to each read.
            async with (
                asyncio.timeout(bound_s or self._answer_s),
                self._http.stream(method, path, content=content, headers=headers) as answer,
            ):
                async for piece in answer.aiter_bytes():
                    read += piece
                    if len(read) > _ANSWER_BYTES_MAX:
                        why = f"{what}: longer than {_ANSWER_BYTES_MAX} bytes"
                        raise EndpointError("failed", why)
        except (httpx.TimeoutException, TimeoutError) as exc:
            trouble: Trouble = "down" if isinstance(exc, httpx.ConnectTimeout) else "failed"
            raise EndpointError(trouble, f"{what}: no answer within the time limit") from exc
        except httpx.InvalidURL as exc:
            raise ConfigError(f"endpoint {self.name}: {exc}") from exc
        except httpx.HTTPError as exc:
            raise EndpointError("down", f"{what}: {_reason(exc)}") from exc
        if not answer.is_success:
            raise _error(answer, bytes(read), what)
        try:
            found = json.loads(read or b"{}")  # vLLM's /health is empty
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) or path == "/health":
            return found if isinstance(found, dict) else {}
        why = f"{what}: the answer is not a JSON object: check that the server is OpenAI-compatible"
        raise EndpointError("refused", why)


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < _TOKENS


def _error(answer: httpx.Response, content: bytes, what: str) -> ObjkvError:
    status = answer.status_code
    why = f"{what}: HTTP {status}: {_message(content)}".rstrip(": ")
    if status in (429, 503):
        after_s = _retry_after(answer.headers.get("retry-after", ""))
        return EndpointError("busy", why, after_s=after_s)
    if status in (401, 403):
        return ConfigError(f"{why}; set --api-key or VLLM_API_KEY")
    if status == 404 and what.endswith(("/health", "/v1/models")):
        return EndpointError("refused", f"{what}: HTTP 404: check that it is a vLLM server")
    if status in (502, 504):  # a proxy in front of the fleet reached no server
        return EndpointError("down", why)
    return EndpointError("failed" if status >= 500 or status == 408 else "refused", why)


def _message(content: bytes) -> str:
    """Return the error message in the body, as one line."""
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError):
        found = content.decode("utf-8", "replace")
        if found.lstrip().startswith("<"):  # an HTML page
            return ""
    while isinstance(found, dict):
        found = found.get("error", found.get("message", found.get("detail", "")))
    return " ".join(str(found).split())[:_ERROR_MAX]


def _reason(error: BaseException) -> str:
    """Return the operating system's error text rather than the HTTP client's."""
    text = str(error) or type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            number = 0 if isinstance(cause, ssl.SSLError) else cause.errno or 0
            text = os.strerror(number) if number > 0 else cause.strerror
            text = text[:1].lower() + text[1:]
        if isinstance(cause, BaseExceptionGroup):  # one for each address of a name
            cause = cause.exceptions[0]
        else:
            cause = cause.__cause__ or cause.__context__
    return text


def _retry_after(text: str) -> float | None:
    value = text.strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except (TypeError, ValueError):
        return None


def _served(answer: Mapping[str, Any], wanted: str | None, base: str) -> str:
    """Return the base model's name: ``wanted``, or the first one."""
    cards = answer.get("data")
    known = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    models = [str(card.get("id")) for card in known if not card.get("parent")]
    wanted = wanted or next(iter(models), None)
    if wanted is None or wanted not in models:
        raise ConfigError(f"{base} serves {', '.join(models) or 'no model'}, not {wanted}")
    return wanted


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
