"""Tokenizes text and chat messages with a model's own files, as vLLM does. Uses no network.

Chat templates are programs that come with models, so they run in jinja2's sandbox.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from objkv.errors import ConfigError
from objkv.keys.tokenizer import load_tokenizer, refuse_broken
from objkv.ops.warm.prompts import Chat, WarmPrompt


class LocalTokenizer:
    """Tokenizes with a model's folder, or with a ``tokenizer.json``. Safe from many threads."""

    def __init__(self, place: Path) -> None:
        """Raises ``ConfigError``."""
        self._tokenizer = load_tokenizer(place)
        self._folder = folder = place if place.is_dir() else place.parent
        self._settings = _settings(folder / "tokenizer_config.json")
        self._source = _template(folder, self._settings)
        self._environment = _sandbox()

    def tokenize(self, prompt: WarmPrompt) -> list[int]:
        """Return the prompt's token ids. Raises ``ConfigError`` with the prompt's name."""
        if prompt.tokens is not None:
            return list(prompt.tokens)
        if prompt.chat is None:
            assert prompt.text is not None
            text, special = prompt.text, True
        else:
            text = self._rendered(prompt.chat, prompt.name)
            special = bool(prompt.chat.options.get("add_special_tokens", False))
        refuse_broken(text)
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def _rendered(self, chat: Chat, name: str) -> str:
        options = chat.options
        source = options.get("chat_template") or self._source
        if source is None:
            raise ConfigError(f"{name}: messages need a chat template, but {self._folder} has none")
        if options.get("continue_final_message"):
            raise ConfigError(
                f"{name}: continue_final_message works only with a server's own tokenizer"
            )
        messages = [_message(message, name) for message in chat.messages]
        try:
            return str(
                self._environment.from_string(source).render(
                    messages=messages,
                    tools=options.get("tools"),
                    add_generation_prompt=options.get("add_generation_prompt", True),
                    **self._special_tokens(),
                    **options.get("chat_template_kwargs", {}),
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as exc:
            raise ConfigError(f"{name}: the chat template failed: {exc}") from exc

    def _special_tokens(self) -> dict[str, str]:
        found = {}
        for name, value in self._settings.items():
            token = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(token, str):
                found[name] = token
        return found


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ConfigError(f"{file}: not JSON: {exc}") from exc
    return found if isinstance(found, dict) else {}


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the default chat template, from its own file or from the settings."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the message as vLLM passes it to the template: with parsed tool-call arguments."""
    if message.get("content") is not None and not isinstance(message["content"], str):
        raise ConfigError(
            f"{name}: content in parts works only with a server's own tokenizer: write it as text"
        )
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_call(call, name) for call in calls]}


def _call(call: object, name: str) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    assert isinstance(call, dict)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as exc:
        raise ConfigError(f"{name}: the arguments of a tool call are not JSON: {exc}") from exc
    return {**call, "function": {**function, "arguments": arguments}}


def _sandbox() -> ImmutableSandboxedEnvironment:
    # The same environment as in ``transformers``, which templates rely on.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, **options: Any) -> str:
    # Not jinja2's own, which escapes for HTML.
    known = ("indent", "ensure_ascii", "separators", "sort_keys")
    chosen = {"ensure_ascii": False} | {key: options[key] for key in known if key in options}
    return json.dumps(value, **chosen)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
