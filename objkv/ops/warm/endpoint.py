"""One OpenAI-compatible endpoint: a vLLM server, or a proxy or router in front of several.

All methods run on one event loop, so that a request can be cancelled at any time: the server then
notices the closed connection and stops computing.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final, Literal

import httpx

from objkv.config.aws import is_plain
from objkv.config.urls import Url, parse_endpoint
from objkv.errors import ConfigError, ObjkvError
from objkv.keys.prefix import is_token
from objkv.ops.warm.prompts import WarmPrompt

FailureKind = Literal["busy", "down", "failed", "refused"]
TRANSFER_PARAMS: Final = {"objkv_put": True}
"""Of each request: node agents put its chunks at once, see ``connector.kv.requests``."""
_CONNECT_S: Final = 10.0
_CHECK_S: Final = 10.0
_ANSWER_S: Final = 1800.0
"""A request that takes longer has failed: a long prompt may wait for users' requests."""
_ANSWER_BYTES_MAX: Final = 64 << 20
"""Ids of a million tokens are 8 MB."""
_ERROR_MAX: Final = 300
_FIRST_PAUSE_S: Final = 0.5
_PAUSE_MAX_S: Final = 30.0
_RETRY_AFTER_MAX_S: Final = 120.0


class EndpointError(ObjkvError):
    """No reply. ``busy``: retry later. ``down``: the endpoint is unreachable, try another.
    ``failed``: only this request failed and may be retried. ``refused``: a retry would fail too."""

    def __init__(self, kind: FailureKind, why: str, *, after_s: float | None = None) -> None:
        super().__init__(why)
        self.kind = kind
        self.after_s = after_s
        """Seconds to wait before a retry, if the endpoint reported it."""


@dataclass(slots=True)
class EndpointReport:
    """The totals of one endpoint."""

    name: str
    answered: int = 0
    errors: int = 0
    last_error: str = ""


class Endpoint:
    """Computes prompts, and pauses after errors. Raises ``EndpointError``, and ``ConfigError`` for
    a model that it does not serve and a key that it does not accept."""

    def __init__(
        self,
        url: str,
        *,
        at_once: int = 8,
        model: str | None = None,
        api_key: str | None = None,
        allow_plaintext: bool = False,
        socket: Path | None = None,
    ) -> None:
        """``url``: with or without ``/v1``. ``at_once``: concurrent requests. ``model``: the one of
        several. ``socket``: where to connect, whatever host the URL names."""
        place = _place(url, api_key is not None and not allow_plaintext)
        if not is_plain(api_key or ""):
            raise ConfigError(
                "the API key (VLLM_API_KEY) contains a space, a line break or a character other "
                "than ASCII: give it without"
            )
        name = (place.root + f"/{place.path}".removesuffix("/v1")).rstrip("/")
        self.at_once = at_once
        self.running = 0
        """Requests under way, and prompts that are not saved yet."""
        self._wanted = model
        self.model = ""
        """The base model's name in requests; empty before it has passed a check."""
        limits = httpx.Limits(max_connections=at_once + 2)
        self._http = httpx.AsyncClient(
            base_url=name,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            limits=limits,
            # Servers on this machine are never reached through a proxy.
            trust_env=place.is_far,
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=limits) if socket else None,
        )
        self.report = EndpointReport(name)
        self._pause_s = 0.0
        self.not_before_s = 0.0
        """No request is sent before, by ``monotonic``."""
        self.down_since_s: float | None = None
        """When it became unreachable, by ``monotonic``; None while it answers."""

    @property
    def name(self) -> str:
        return self.report.name

    async def check(self) -> None:
        """Return if it answers and serves the model."""
        answer = await self._call("GET", "/v1/models", bound_s=_CHECK_S)
        self.model = _served(answer, self._wanted, self.name)

    async def tokenize(self, prompt: WarmPrompt) -> list[int]:
        """Return the token ids that a request with this prompt would have."""
        request: dict[str, Any] = {"model": self.model}
        if prompt.chat is not None:
            request |= {"messages": list(prompt.chat.messages), **prompt.chat.options}
        else:
            request["prompt"] = prompt.text
        answer = await self._call("POST", "/tokenize", request)
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(map(is_token, tokens)):
            raise EndpointError("refused", f"{self.name} does not tokenize: give token ids")
        return tokens

    async def compute(self, tokens: Sequence[int], salt: str | None) -> int:
        """Compute a prompt and one token after it; its saves go on afterwards. Return how many
        prompt tokens were loaded or in the engine's own cache, 0 if that is not reported."""
        if not self.model:
            await self.check()
        request: dict[str, Any] = {
            "model": self.model,
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
        self.report.answered += 1
        self._pause_s, self.down_since_s = 0.0, None
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        return cached if type(cached) is int else 0

    def failed(self, error: EndpointError) -> None:
        """Note a failed request: the next one waits, the longer the more have failed in a row."""
        if error.kind == "refused":  # the prompt is at fault, and the endpoint answers
            return
        now_s = monotonic()
        self.report.errors += 1
        self.report.last_error = str(error)
        if error.kind == "down" and self.down_since_s is None:
            self.down_since_s = now_s
        if error.kind == "failed":  # its other requests may succeed
            pause_s = _FIRST_PAUSE_S
        elif now_s >= self.not_before_s:  # it was tried again
            pause_s = self._pause_s = min(_PAUSE_MAX_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        else:
            pause_s = 0.0
        pause_s = max(pause_s, min(error.after_s or 0.0, _RETRY_AFTER_MAX_S))
        self.not_before_s = max(self.not_before_s, now_s + pause_s)

    async def close(self) -> None:
        """Close its connections. Idempotent."""
        await self._http.aclose()

    async def _call(
        self, method: str, path: str, request: object = None, *, bound_s: float = _ANSWER_S
    ) -> dict[str, Any]:
        what = f"{self.name}{path}"
        content = None if request is None else json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        read = bytearray()
        try:
            # A limit for the whole request: the client's limits apply to each read.
            async with (
                asyncio.timeout(bound_s),
                self._http.stream(method, path, content=content, headers=headers) as answer,
            ):
                async for piece in answer.aiter_bytes():
                    read += piece
                    if len(read) > _ANSWER_BYTES_MAX:
                        why = f"{what}: longer than {_ANSWER_BYTES_MAX} bytes"
                        raise EndpointError("failed", why)
        except (httpx.TimeoutException, TimeoutError) as exc:
            kind: FailureKind = "down" if isinstance(exc, httpx.ConnectTimeout) else "failed"
            raise EndpointError(kind, f"{what}: no answer within the time limit") from exc
        except httpx.HTTPError as exc:
            raise EndpointError("down", f"{what}: {str(exc) or type(exc).__name__}") from exc
        if not answer.is_success:
            raise _error(answer, bytes(read), what)
        try:
            found = json.loads(read)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found
        why = f"{what}: the answer is not a JSON object: check that the server is OpenAI-compatible"
        raise EndpointError("refused", why)


def _error(answer: httpx.Response, content: bytes, what: str) -> ObjkvError:
    status = answer.status_code
    why = f"{what}: HTTP {status}: {_message(content)}".rstrip(": ")
    if status in (429, 503):
        after = answer.headers.get("retry-after", "").strip()
        return EndpointError("busy", why, after_s=float(after) if after.isdecimal() else None)
    if status in (401, 403):
        return ConfigError(f"{why}; set VLLM_API_KEY")
    if status == 404 and what.endswith("/v1/models"):
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
        raise ConfigError("an endpoint's URL must not contain a password: set VLLM_API_KEY")
    if refuse_clear and place.is_far and not place.is_tls:
        raise ConfigError(
            f"endpoint {place.shown}: the API key would cross the network unencrypted: use "
            "https://, or set allow_plaintext to endpoints on a trusted network"
        )
    return place
