"""Tokenizers, from local files alone: prompts as text become token ids."""

from functools import lru_cache
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import TYPE_CHECKING

from objkv.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LOADED_MAX = 4
_FILE = "tokenizer.json"


def load_tokenizer(tokenizer: Path) -> "Tokenizer":
    """Load ``tokenizer``, a ``tokenizer.json`` or a directory that contains one. Ignores the file's
    truncation and padding, as vLLM does. Never uses the network. Raises ``ConfigError``."""
    from tokenizers import Tokenizer  # late: most agents need none

    path = tokenizer / _FILE if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        raise ConfigError(f"{path} is not a file: name a tokenizer.json or its folder")
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception for anything wrong in the file
        raise ConfigError(f"{path} is not a valid tokenizer.json") from exc
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def refuse_broken(text: str) -> None:
    """Raise ``ConfigError`` for text that no tokenizer takes."""
    if not _is_plain(text):
        raise ConfigError("the text contains half of a character (a lone surrogate)")


class Tokenizers:
    """Tokenizers of several models. The last few stay loaded. Thread-safe."""

    def __init__(self, folder: Path | None) -> None:
        """``folder``: has ``MODEL/tokenizer.json`` of each model, or one file for all."""
        self._folder = folder
        self._lock = Lock()
        self._load = lru_cache(_LOADED_MAX)(load_tokenizer)

    def place_of(self, model: str) -> Path:
        """Return the tokenizer of ``model``. Raises ``ConfigError``."""
        if self._folder is None:
            raise ConfigError(
                "text needs a tokenizer: set agent_tokenizers to a folder with "
                f"MODEL/{_FILE}, or send tokens"
            )
        if (self._folder / _FILE).is_file():
            return self._folder / _FILE
        parts = PurePosixPath(model).parts
        if not parts or not _is_plain(model) or "\0" in model or {"/", "..", "."} & set(parts):
            raise ConfigError(f"model {model[:100]!r} is not a folder below agent_tokenizers")
        place = self._folder.joinpath(*parts) / _FILE
        if not place.is_file():
            raise ConfigError(f"agent_tokenizers has no {PurePosixPath(*parts) / _FILE}")
        return place

    def tokens(self, text: str, place: Path) -> list[int]:
        """Return the token ids of ``text``. ``place``: see ``load_tokenizer``, also for errors."""
        refuse_broken(text)
        with self._lock:  # otherwise several threads would load the same one
            tokenizer = self._load(place)
        # In a batch, because only this lets other threads run meanwhile: for a million words they
        # wait 0.1 s, and 2.8 s otherwise (tokenizers 0.22, 2 cores, 2026-11).
        [encoded] = tokenizer.encode_batch([text])
        return list(encoded.ids)


def _is_plain(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
