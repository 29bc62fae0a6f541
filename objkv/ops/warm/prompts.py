"""The prompts that are to be warmed, as batch files and programs have them.

A line of a JSON Lines file, or a value from Python, is one prompt: text, a list of token ids, or an
object: a request of OpenAI's API (``prompt`` or ``messages``, ``tools``, ``model``,
``cache_salt`` …), the same as a line of OpenAI's batch format (``custom_id``, ``body``), or
``token_ids``. Nothing else of a request matters here: what is asked is always one token.
"""

import glob
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from objkv.errors import ConfigError

LINE_BYTES_MAX: Final = 64 << 20
_TOKEN_END: Final = 1 << 32
_OF_A_TEMPLATE: Final = ("documents", "reasoning_effort")
"""Of a request, what vLLM gives to the chat template beside ``chat_template_kwargs``."""
_OF_A_CHAT: Final = (
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and what else decides which tokens a chat template makes of them."""

    messages: tuple[Mapping[str, Any], ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    """As requests have them: ``tools``, ``chat_template_kwargs``, ``add_generation_prompt`` …"""


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """One prompt; exactly one of ``tokens``, ``text`` and ``chat`` is given."""

    name: str
    """For messages: its file and line, or its ``custom_id``."""
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    chat: Chat | None = None
    salt: str | None = None
    model: str | None = None
    """As the request names it: the base model's name, or an adapter's."""

    def __post_init__(self) -> None:
        assert [self.tokens, self.text, self.chat].count(None) == 2


def read_prompts(places: Sequence[str]) -> Iterator[WarmPrompt]:
    """The prompts in files, in the files that patterns match, and, for ``-``, on standard input.

    A file that is called ``….txt`` is one prompt, any other has one in each line. Raises
    ``ConfigError`` naming file and line; at once for a file that is not there.
    """
    return _read(list(_files(places)))


def _read(files: Sequence[str]) -> Iterator[WarmPrompt]:
    for file in files:
        if file == "-":
            yield from _lines("stdin", sys.stdin.buffer)
        elif file.endswith(".txt"):
            try:
                yield WarmPrompt(file, text=Path(file).read_text(encoding="utf-8"))
            except UnicodeDecodeError as exc:
                raise ConfigError(f"{file}: not UTF-8 text") from exc
        else:
            with open(file, "rb") as opened:
                yield from _lines(file, opened)


def to_prompt(value: object, name: str) -> WarmPrompt:
    """The prompt that ``value`` is, in any of the forms. Raises ``ConfigError``."""
    if isinstance(value, str):
        return WarmPrompt(name, text=value)
    if isinstance(value, Mapping):
        return _of_request(value, name)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return WarmPrompt(name, tokens=_tokens(value, name))
    raise ConfigError(f"{name}: a prompt is text, a list of token ids or an object")


def _files(places: Sequence[str]) -> Iterator[str]:
    for place in places:
        if place == "-" or Path(place).is_file():
            yield place
            continue
        found = sorted(file for file in glob.glob(place, recursive=True) if Path(file).is_file())
        if not found:
            raise ConfigError(f"{place}: no such file")
        yield from found


def _lines(file: str, opened: Any) -> Iterator[WarmPrompt]:
    number = 0
    while line := opened.readline(LINE_BYTES_MAX + 1):
        number += 1
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
            raise ConfigError(f"{name}: its body is no object")
    names = ("prompt", "messages", "token_ids", "prompt_token_ids", "tokens", "text")
    given = [key for key in names if value.get(key) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{name}: give one of prompt, messages and token_ids; it has "
            f"{', '.join(given) or 'none'}"
        )
    what = value[given[0]]
    common: dict[str, Any] = {
        "salt": _text(value, "cache_salt", name),
        "model": _text(value, "model", name),
    }
    if given == ["messages"]:
        return WarmPrompt(name, chat=_chat(what, value, name), **common)
    if isinstance(what, str) and given[0] in ("prompt", "text"):
        return WarmPrompt(name, text=what, **common)
    return WarmPrompt(name, tokens=_tokens(what, name), **common)


def _chat(messages: object, request: Mapping[str, Any], name: str) -> Chat:
    if not isinstance(messages, Sequence) or not messages or isinstance(messages, str):
        raise ConfigError(f"{name}: messages is a list of objects")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{name}: a message is an object with a role")
        _refuse_media(message.get("content"), name)
    options = {key: request[key] for key in _OF_A_CHAT if request.get(key) is not None}
    if options.get("continue_final_message"):
        # A request says so by two fields, of which the first is true by default.
        options.setdefault("add_generation_prompt", False)
    more = {key: request[key] for key in _OF_A_TEMPLATE if request.get(key) is not None}
    given = request.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}: chat_template_kwargs is an object")
    if more or given:
        options["chat_template_kwargs"] = {**more, **given}
    return Chat(tuple(messages), options)


def _refuse_media(content: object, name: str) -> None:
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind != "text":
            raise ConfigError(f"{name}: has a part of type {kind!r}, and only text can be warmed")


def _tokens(values: object, name: str) -> tuple[int, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise ConfigError(f"{name}: token ids are a list of integers")
    tokens = tuple(values)
    for token in tokens:
        # ``bool`` is an int to Python, but JSON's true is no token id.
        if type(token) is not int or not 0 <= token < _TOKEN_END:
            raise ConfigError(f"{name}: {str(token)[:40]!r} is no token id")
    if not tokens:
        raise ConfigError(f"{name}: has no token ids")
    return tokens


def _text(value: Mapping[str, Any], key: str, name: str) -> str | None:
    found = value.get(key)
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"{name}: {key} is text")
    return found or None
