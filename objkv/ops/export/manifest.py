"""The manifest of an export: a file that lists every payload with its length and SHA-256.

The format is JSON lines. The first line describes the export and states the number of lines, which
reveals a truncated file. The manifest is written last, so an export without one is incomplete.
While an export runs, its lines are collected in a file that marks the directory as an export; it is
created before anything else is written.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final, TextIO

from objkv.errors import ConfigError, PayloadError
from objkv.keys.chunk import ChunkKey

NAME: Final = "manifest.jsonl"
FORMAT: Final = "objkv-export-1"
_PART: Final = f"{NAME}.part"
_LINE_CHARS_MAX: Final = 4096
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ManifestLine:
    """One payload of an export."""

    key: str
    """The payload's path, the same as in any bulk store."""
    token_start: int
    token_end: int
    parent: str
    """Prefix hash of the chunk before it, hex."""
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Head:
    """The first line of a manifest."""

    format: str
    objkv: str
    """The objkv version that wrote it."""
    made_s: int
    payloads: int
    nbytes: int
    namespaces: tuple[str, ...]


class ManifestWriter:
    """Reserves a directory for one export, collects the lines, and writes the manifest.

    ``add`` is safe from many threads.
    """

    def __init__(self, folder: Path) -> None:
        """Reserve ``folder``.

        Raises ``ConfigError`` if another export is writing to it, or if it contains anything other
        than an interrupted export.
        """
        self._folder = folder
        self._part = _marked(folder)
        self._lock = Lock()
        self._payloads = self._nbytes = 0
        self._namespaces: set[str] = set()

    def add(self, line: ManifestLine) -> None:
        """Add a payload."""
        text = json.dumps(asdict(line), separators=(",", ":"))
        with self._lock:
            self._part.write(f"{text}\n")
            self._payloads += 1
            self._nbytes += line.nbytes
            self._namespaces.add(line.key.partition("/")[0])

    def finish(self, version: str, made_s: int) -> Head:
        """Write the manifest, which completes the export, and remove the mark."""
        names = tuple(sorted(self._namespaces))
        head = Head(FORMAT, version, made_s, self._payloads, self._nbytes, names)
        self._part.flush()
        new = self._folder / f"{NAME}.new"
        with new.open("wb") as out, (self._folder / _PART).open("rb") as lines:
            out.write(json.dumps(asdict(head), separators=(",", ":")).encode() + b"\n")
            shutil.copyfileobj(lines, out)
            out.flush()
            os.fsync(out.fileno())
        new.replace(self._folder / NAME)
        (self._folder / _PART).unlink()
        return head

    def close(self) -> None:
        """Release the directory, which stays marked unless the export is complete. Idempotent."""
        self._part.close()


def _marked(folder: Path) -> TextIO:
    """Return the file that marks ``folder``, empty and locked by this process."""
    if not (folder / _PART).exists() and any(folder.iterdir()):
        _refuse_complete(folder)
        raise ConfigError(
            f"{folder} is not empty and does not contain an interrupted export; choose another "
            "directory"
        )
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    part = os.fdopen(os.open(folder / _PART, flags, 0o600), "w", encoding="utf-8")
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _refuse_complete(folder)  # another process may have completed one just now
    except BlockingIOError as exc:
        part.close()
        raise ConfigError(f"another export is writing to {folder}") from exc
    except ConfigError:
        part.close()
        raise
    part.truncate(0)
    return part


def _refuse_complete(folder: Path) -> None:
    if (folder / NAME).exists():
        raise ConfigError(f"{folder} already contains a complete export; choose another directory")


def read_head(folder: Path) -> Head:
    """Read the first line of the manifest in ``folder``.

    Raises ``PayloadError`` if it is invalid or from another version.
    """
    with (folder / NAME).open("rb") as opened:
        values = _parsed(opened.readline(_LINE_CHARS_MAX * 64), 1)
    if values.get("format") != FORMAT:
        raise PayloadError(f"{NAME}: not a manifest of this version ({FORMAT})")
    try:
        names = tuple(str(name) for name in values["namespaces"])
        return Head(
            FORMAT,
            str(values["objkv"]),
            int(values["made_s"]),
            int(values["payloads"]),
            int(values["nbytes"]),
            names,
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise PayloadError(f"{NAME}: line 1 does not describe an export") from exc


def read_lines(folder: Path, head: Head) -> Iterator[ManifestLine]:
    """Yield the payloads of the manifest.

    Raises ``PayloadError`` for an invalid line, and at the end if their number differs from
    ``head``.
    """
    number = 1
    with (folder / NAME).open("rb") as opened:
        opened.readline()
        while raw := opened.readline(_LINE_CHARS_MAX):
            number += 1
            yield _line(_parsed(raw, number), number)
    if number - 1 != head.payloads:
        raise PayloadError(f"{NAME}: {number - 1} payloads, but line 1 states {head.payloads}")


def _parsed(raw: bytes, number: int) -> dict[str, Any]:
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise PayloadError(f"{NAME}: line {number} is not JSON") from exc
    if not isinstance(values, dict):
        raise PayloadError(f"{NAME}: line {number} is not a JSON object")
    return values


def _line(values: dict[str, Any], number: int) -> ManifestLine:
    try:
        line = ManifestLine(**values)
        texts_are = all(type(one) is str for one in (line.key, line.parent, line.sha256))
        counts = (line.token_start, line.token_end, line.nbytes)
        if not texts_are or not all(type(one) is int and one >= 0 for one in counts):
            raise TypeError
        ChunkKey.parse(line.key)
    except (TypeError, ValueError) as exc:
        raise PayloadError(f"{NAME}: line {number} does not describe a payload") from exc
    if _SHA256.fullmatch(line.sha256) is None:
        raise PayloadError(f"{NAME}: line {number}: invalid sha256")
    return line
