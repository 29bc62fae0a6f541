"""Reads prompts to warm from batch files and from Python values.

A line of a JSON Lines file, or a Python value, is one prompt: text, a list of token ids, or an
object. An object is a request of OpenAI's API (``prompt`` or ``messages``, ``tools``, ``model``,
``cache_salt`` …), a line of OpenAI's batch format (``custom_id``, ``body``), or has ``token_ids``.
Other fields are ignored: every request generates one token.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from objkv.errors import ConfigError
from objkv.keys.prefix import is_token

LINE_BYTES_MAX: Final = 64 << 20
_OF_A_TEMPLATE: Final = ("documents", "reasoning_effort")
"""Request fields that vLLM passes to the chat template in addition to ``chat_template_kwargs``."""
_OF_A_CHAT: Final = (
    "tools", "chat_template", "add_generation_prompt", "continue_final_message",
    "add_special_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and the options that affect the chat template's tokens."""

    messages: tuple[Mapping[str, Any], ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Request fields: ``tools``, ``chat_template_kwargs``, ``add_generation_prompt`` …"""


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """One prompt; exactly one of ``tokens``, ``text`` and ``chat`` is set."""

    name: str
    """Used in messages: file and line, with the ``custom_id`` if there is one."""
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    chat: Chat | None = None
    salt: str | None = None
    model: str | None = None
    """The request's model: the base model's or an adapter's name."""

    def __post_init__(self) -> None:
        assert [self.tokens, self.text, self.chat].count(None) == 2


def read_prompts(files: Sequence[str]) -> Iterator[WarmPrompt]:
    """Yield the prompts in files and standard input (``-``). A ``.txt`` file is one prompt; any
    other file has one per line. Raises ``ConfigError`` with file and line, and immediately for a
    missing file."""
    for file in files:
        if file != "-" and not Path(file).is_file():
            raise ConfigError(f"{file}: no such file")
    return _read(files)


def _read(files: Sequence[str]) -> Iterator[WarmPrompt]:
    for file in files:
        if file == "-":
            yield from _lines("stdin", sys.stdin.buffer)
        elif file.endswith(".txt"):
            try:
                yield WarmPrompt(file, text=Path(file).read_text(encoding="utf-8-sig"))
            except UnicodeDecodeError as exc:
                raise ConfigError(f"{file}: not UTF-8 text") from exc
        else:
            with open(file, "rb") as opened:
                yield from _lines(file, opened)


def to_prompt(value: object, name: str) -> WarmPrompt:
    """Return the prompt in ``value``, in any of the forms above. Raises ``ConfigError``."""
    if isinstance(value, str):
        return WarmPrompt(name, text=value)
    if isinstance(value, Mapping):
        return _of_request(value, name)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return WarmPrompt(name, tokens=_tokens(value, name))
    raise ConfigError(f"{name}: a prompt must be text, a list of token ids or an object")


def _lines(file: str, opened: Any) -> Iterator[WarmPrompt]:
    lines = iter(lambda: opened.readline(LINE_BYTES_MAX + 1), b"")
    for number, line in enumerate(lines, 1):
        name = f"{file}:{number}"
        if len(line) > LINE_BYTES_MAX:
            raise ConfigError(f"{name}: longer than {LINE_BYTES_MAX >> 20} MiB")
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{name}: not JSON: {exc}") from exc
        yield to_prompt(value, name)


def _of_request(value: Mapping[str, Any], name: str) -> WarmPrompt:
    if isinstance(value.get("custom_id"), str):
        name = f"{name} ({value['custom_id']})"
    if "body" in value:
        value = value["body"]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: body must be an object")
    names = ("prompt", "messages", "token_ids")
    given = [key for key in names if value.get(key) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{name}: must have exactly one of prompt, messages and token_ids, but has "
            f"{', '.join(given) or 'none'}"
        )
    what = value[given[0]]
    common: dict[str, Any] = {
        "salt": _text(value, "cache_salt", name),
        "model": _text(value, "model", name),
    }
    if given == ["messages"]:
        return WarmPrompt(name, chat=_chat(what, value, name), **common)
    if isinstance(what, str) and given == ["prompt"]:
        return WarmPrompt(name, text=what, **common)
    return WarmPrompt(name, tokens=_tokens(what, name), **common)


def _chat(messages: object, request: Mapping[str, Any], name: str) -> Chat:
    if not isinstance(messages, Sequence) or not messages or isinstance(messages, str):
        raise ConfigError(f"{name}: messages must be a list of objects")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{name}: a message must be an object with a role")
        _refuse_media(message.get("content"), name)
    options = {key: request[key] for key in _OF_A_CHAT if request.get(key) is not None}
    if options.get("continue_final_message"):
        # Such requests also need add_generation_prompt false, which is true by default.
        options.setdefault("add_generation_prompt", False)
    more = {key: request[key] for key in _OF_A_TEMPLATE if request.get(key) is not None}
    given = request.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}: chat_template_kwargs must be an object")
    if more or given:
        options["chat_template_kwargs"] = {**more, **given}
    return Chat(tuple(messages), options)


def _refuse_media(content: object, name: str) -> None:
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind != "text":
            raise ConfigError(f"{name}: has a part of type {kind!r}; only text can be warmed")


def _tokens(values: object, name: str) -> tuple[int, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise ConfigError(f"{name}: token ids must be a list of integers")
    tokens = tuple(values)
    for token in tokens:
        if not is_token(token):
            raise ConfigError(f"{name}: {str(token)[:40]!r} is not a token id")
    if not tokens:
        raise ConfigError(f"{name}: has no token ids")
    return tokens


def _text(value: Mapping[str, Any], key: str, name: str) -> str | None:
    found = value.get(key)
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"{name}: {key} must be text")
    return found or None
