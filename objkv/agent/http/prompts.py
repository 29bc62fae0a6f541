"""Reads questions about prompts: a namespace, and tokens, text or prefix hashes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from objkv.agent.http.listener import BODY_BYTES_MAX
from objkv.agent.prefetch import DEADLINE_S_MAX, Prefetches, PrefetchOrder
from objkv.errors import ConfigError
from objkv.keys.prefix import PREFIX_HASH_BYTES, PromptExtras, prefix_hashes
from objkv.keys.tokenizer import Tokenizers

Body = Mapping[str, Any]
DEADLINE_MS: Final = 30_000
DEADLINE_MS_MAX: Final = DEADLINE_S_MAX * 1000
PRIORITY_MAX: Final = 1_000_000
_PROMPT = ("tokens", "text", "hashes")
_WITH_TOKENS = ("cache_salt", "lora_digest")
_WITH_TEXT = ("model", "tokenizer")
_ORDER = ("deadline_ms", "priority", "bytes_max")
KNOWN: Final = frozenset({"namespace", *_PROMPT, *_WITH_TOKENS, *_WITH_TEXT, *_ORDER})


class PromptReader:
    """Reads prompts from requests. Thread-safe. Raises ``ConfigError`` with the fix."""

    def __init__(self, prefetches: Prefetches, tokenizers: Tokenizers) -> None:
        self._prefetches, self._tokenizers = prefetches, tokenizers

    def read(self, body: Body, *, is_local: bool) -> tuple[str, list[bytes]]:
        """Return namespace and prefix hashes. ``is_local``: the client is of the same user, so that
        it may name files."""
        namespace = body.get("namespace")
        if not isinstance(namespace, str) or len(namespace) != 32 or not _is_hex(namespace):
            raise ConfigError("namespace: give its 32 hex digits, as /v1/namespaces lists them")
        if body.get("text") is not None:
            _refuse(body, ("tokens", "hashes"), "with text")
            tokens = self._tokenized(namespace, body, is_local=is_local)
            more = {name: value for name, value in body.items() if name in _WITH_TOKENS}
            body = {"tokens": tokens, **more}
        return namespace, read_hashes(
            body, namespace, lambda: self._prefetches.facts(namespace).chunk_tokens
        )

    def _tokenized(self, namespace: str, body: Body, *, is_local: bool) -> list[int]:
        text, model = _text(body, "text"), _text(body, "model")
        place = _text(body, "tokenizer")
        if place is None:
            model = model or self._prefetches.facts(namespace).model
            return self._tokenizers.tokens(text or "", self._tokenizers.place_of(model))
        if not is_local:
            raise ConfigError("tokenizer: only clients of the Unix socket may name a file")
        if not Path(place).is_absolute() or "\0" in place:
            raise ConfigError("tokenizer: give the absolute path of a tokenizer.json")
        return self._tokenizers.tokens(text or "", Path(place))


def read_hashes(body: Body, namespace: str, chunk_tokens: Callable[[], int]) -> list[bytes]:
    """Return the prefix hashes of a prompt that is given as tokens or as hashes. Raises
    ``ConfigError``."""
    if body.get("hashes") is not None:
        _refuse(body, ("tokens", *_WITH_TOKENS, *_WITH_TEXT), "with hashes")
        return _hashes(body["hashes"])
    if body.get("tokens") is None:
        raise ConfigError("give tokens, text or hashes")
    _refuse(body, _WITH_TEXT, "with tokens")
    extras = PromptExtras(_digest(body), _text(body, "cache_salt"))
    return prefix_hashes(namespace, _tokens(body["tokens"]), chunk_tokens(), extras)


def read_json(content: bytes) -> Body:
    """Return the object in a body. Raises ``ConfigError``, also for names that are not known."""
    if not content:
        raise ConfigError(f"send a JSON object of at most {BODY_BYTES_MAX} bytes")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"the body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise ConfigError("the body is not a JSON object")
    if unknown := sorted(body.keys() - KNOWN):
        raise ConfigError(f"{unknown[0][:100]!r} is unknown: use {', '.join(sorted(KNOWN))}")
    return body


def read_order(body: Body) -> PrefetchOrder:
    """Return deadline, priority and bound of a prefetch. Raises ``ConfigError``."""
    deadline_ms = _integer(body, "deadline_ms", 1, DEADLINE_MS_MAX)
    return PrefetchOrder(
        (DEADLINE_MS if deadline_ms is None else deadline_ms) / 1000,
        _integer(body, "priority", -PRIORITY_MAX, PRIORITY_MAX) or 0,
        _integer(body, "bytes_max", 1, 1 << 62),
    )


def _integer(body: Body, name: str, least: int, most: int) -> int | None:
    value = body.get(name)
    if value is None or (type(value) is int and least <= value <= most):
        return value
    raise ConfigError(f"{name}: give an integer from {least} to {most}")


def _text(body: Body, name: str) -> str | None:
    value = body.get(name)
    if value is None or isinstance(value, str):
        return value
    raise ConfigError(f"{name}: give a string")


def _digest(body: Body) -> bytes | None:
    value = _text(body, "lora_digest")
    if value is None:
        return None
    if not value or not _is_hex(value) or len(value) % 2:
        raise ConfigError("lora_digest: give hex digits")
    return bytes.fromhex(value)


def _tokens(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(
        type(one) is int and 0 <= one < 1 << 32 for one in value
    ):
        raise ConfigError("tokens: give a list of token ids")
    return value


def _hashes(value: Any) -> list[bytes]:
    size = 2 * PREFIX_HASH_BYTES
    if not isinstance(value, list) or not all(
        isinstance(one, str) and len(one) == size and _is_hex(one) for one in value
    ):
        raise ConfigError(f"hashes: give a list with {size} hex digits each")
    return [bytes.fromhex(one) for one in value]


def _refuse(body: Body, names: tuple[str, ...], where: str) -> None:
    for name in names:
        if body.get(name) is not None:
            raise ConfigError(f"{name} has no effect {where}: leave it out")


def _is_hex(text: str) -> bool:
    return not text.strip("0123456789abcdef")
