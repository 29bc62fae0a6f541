"""Reads what routers and orchestrators say about a prompt: its tokens or prefix hashes, and when to
fetch it. Nothing of the agent's: the scheduler reads such hints, too."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from objkv.agent.messages import PREFETCH_S_MAX, PrefetchOrder
from objkv.errors import ConfigError
from objkv.keys.prefix import PREFIX_HASH_BYTES, PromptExtras, prefix_hashes

Body = Mapping[str, Any]
DEADLINE_MS: Final = 30_000
DEADLINE_MS_MAX: Final = PREFETCH_S_MAX * 1000
PRIORITY_MAX: Final = 1_000_000
_PROMPT = ("tokens", "text", "hashes")
WITH_TOKENS: Final = ("cache_salt", "lora_digest")
_WITH_TEXT = ("model", "tokenizer")
_ORDER = ("deadline_ms", "priority", "bytes_max")
KNOWN: Final = frozenset({"namespace", *_PROMPT, *WITH_TOKENS, *_WITH_TEXT, *_ORDER})


def read_hashes(body: Body, namespace: str, chunk_tokens: Callable[[], int]) -> list[bytes]:
    """Return the prefix hashes of tokens, or those that are given. Raises ``ConfigError``."""
    if body.get("hashes") is not None:
        refuse(body, ("tokens", *WITH_TOKENS, *_WITH_TEXT), "with hashes")
        return _hashes(body["hashes"])
    if body.get("tokens") is None:
        raise ConfigError("give tokens, text or hashes")
    refuse(body, _WITH_TEXT, "with tokens")
    extras = PromptExtras(_digest(body), read_text(body, "cache_salt"))
    return prefix_hashes(namespace, _tokens(body["tokens"]), chunk_tokens(), extras)


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


def read_text(body: Body, name: str) -> str | None:
    """Return a text, None if there is none. Raises ``ConfigError``."""
    value = body.get(name)
    if value is None or isinstance(value, str):
        return value
    raise ConfigError(f"{name}: give a string")


def _digest(body: Body) -> bytes | None:
    value = read_text(body, "lora_digest")
    if value is None:
        return None
    if not value or not is_hex(value) or len(value) % 2:
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
        isinstance(one, str) and len(one) == size and is_hex(one) for one in value
    ):
        raise ConfigError(f"hashes: give a list with {size} hex digits each")
    return [bytes.fromhex(one) for one in value]


def refuse(body: Body, names: tuple[str, ...], where: str) -> None:
    """Raise ``ConfigError`` if the body has any of ``names``."""
    for name in names:
        if body.get(name) is not None:
            raise ConfigError(f"{name} has no effect {where}: leave it out")


def is_hex(text: str) -> bool:
    """Whether a text has only hex digits."""
    return not text.strip("0123456789abcdef")
