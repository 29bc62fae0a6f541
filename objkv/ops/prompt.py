"""Prompts as operators have them: token ids written down, or text and a tokenizer's file."""

import json
import re
from pathlib import Path

from tokenizers import Tokenizer

from objkv.errors import ConfigError

_SEPARATORS = re.compile(r"[\s,]+")
_TOKEN_END = 1 << 32
_WRITTEN = re.compile(r"[0-9]{1,20}")


def parse_tokens(text: str) -> list[int]:
    """Token ids from a JSON list, or separated by spaces, commas or lines.

    Raises ``ConfigError`` naming the first thing that is not a token id.

    >>> parse_tokens("[1, 2, 3]") == parse_tokens("1 2,3")
    True
    """
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"the token ids are not a JSON list: {exc}") from exc
    else:
        values = [word for word in _SEPARATORS.split(text) if word]
    return [_token(value) for value in values]


def tokenize(text: str, tokenizer: Path) -> list[int]:
    """Token ids of ``text`` with the special tokens that the tokenizer adds by itself; see
    ``load_tokenizer``."""
    return list(load_tokenizer(tokenizer).encode(text).ids)


def load_tokenizer(tokenizer: Path) -> Tokenizer:
    """``tokenizer`` is a ``tokenizer.json``, or a model's folder that holds one. Raises
    ``ConfigError``; never uses the network."""
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        raise ConfigError(f"{path} is no file: give the path of a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception for anything wrong in the file
        raise ConfigError(f"{path} is no tokenizer.json") from exc


def _token(value: object) -> int:
    # ``bool`` is an int to Python, but JSON's true is no token id.
    if isinstance(value, str) and _WRITTEN.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _TOKEN_END:
        shown = repr(value)[:80]
        raise ConfigError(f"{shown} is not a token id: write integers from 0 to 2**32 - 1")
    return value
