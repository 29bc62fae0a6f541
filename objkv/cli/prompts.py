"""Options that name a prompt: token ids or text with a tokenizer, the namespace, salt, adapter."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from objkv.errors import ConfigError
from objkv.keys.prefix import PromptExtras
from objkv.keys.tokenizer import Tokenizers
from objkv.ops.match import parse_tokens

Tokens = Annotated[
    Path | None,
    typer.Option(
        help="File of token ids: a JSON list, or ids separated by spaces or commas. - is stdin.",
        metavar="FILE",
    ),
]
Text = Annotated[
    str | None, typer.Option(help="Prompt as text. Needs --tokenizer.", metavar="TEXT")
]
TextFile = Annotated[
    Path | None,
    typer.Option(help="File with the prompt as text. Needs --tokenizer.", metavar="FILE"),
]
TokenizerPath = Annotated[
    Path | None, typer.Option(help="A tokenizer.json or its directory.", metavar="PATH")
]
CacheSalt = Annotated[str | None, typer.Option(help="cache_salt of the request.", metavar="TEXT")]
LoraDigest = Annotated[
    str | None,
    typer.Option(help="Content digest of the LoRA adapter in hex digits.", metavar="HEX"),
]


def read_prompt(
    tokens: Path | None, text: str | None, text_file: Path | None, tokenizer: Path | None
) -> list[int]:
    """Return the token ids from the prompt options, or from standard input if there are none.

    Raises ``ConfigError``.
    """
    if [tokens, text, text_file].count(None) < 2:
        raise ConfigError("give only one of --tokens, --text and --text-file")
    if (text is None and text_file is None) != (tokenizer is None):
        raise ConfigError("--text and --text-file need --tokenizer, and --tokenizer one of them")
    if tokenizer is not None:
        given = _read(text_file) if text is None else text
        prompt = Tokenizers(None).tokens(given, tokenizer)
    else:
        prompt = parse_tokens(_read(tokens))
    if not prompt:
        raise ConfigError("the prompt is empty (no token ids)")
    return prompt


def _read(path: Path | None) -> str:
    if path is None or str(path) == "-":
        if sys.stdin.isatty():
            raise ConfigError("no prompt given; use --tokens FILE or pipe token ids to stdin")
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: not UTF-8 text") from exc


def read_extras(lora_digest: str | None, cache_salt: str | None) -> PromptExtras:
    """Return the extras from ``--lora-digest`` and ``--cache-salt``. Raises ``ConfigError``."""
    return PromptExtras(lora_digest=_digest(lora_digest), salt=cache_salt)


def _digest(text: str | None) -> bytes | None:
    try:
        return None if text is None else bytes.fromhex(text)
    except ValueError as exc:
        raise ConfigError(f"--lora-digest {text!r}: not hex digits") from exc
