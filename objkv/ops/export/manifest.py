"""What an export consists of: a file that names every payload in it, with its length and SHA-256.

JSON lines. The first says what the export is and how many lines follow, so that one that was cut
short is noticed. It is written last: without it an export is not complete. Before anything else is
written, the file in which its lines are collected marks the folder as one of an export: nothing is
written where that is not.
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
    """Its path, in the export as in any bulk store."""
    token_start: int
    token_end: int
    parent: str
    """Prefix hash of the chunk before it, hex."""
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Head:
    """What an export is."""

    format: str
    objkv: str
    """Version that made it."""
    made_s: int
    payloads: int
    nbytes: int
    namespaces: tuple[str, ...]


class ManifestWriter:
    """Has a folder for one export, collects lines beside the payloads, and makes the manifest of
    them. Many threads may add."""

    def __init__(self, folder: Path) -> None:
        """Raises ``ConfigError`` for a folder that holds anything but an export which was
        interrupted, or that another export is writing into."""
        self._folder = folder
        self._part = _marked(folder)
        self._lock = Lock()
        self._payloads = self._nbytes = 0
        self._namespaces: set[str] = set()

    def add(self, line: ManifestLine) -> None:
        """One payload more."""
        text = json.dumps(asdict(line), separators=(",", ":"))
        with self._lock:
            self._part.write(f"{text}\n")
            self._payloads += 1
            self._nbytes += line.nbytes
            self._namespaces.add(line.key.partition("/")[0])

    def finish(self, version: str, made_s: int) -> Head:
        """Write the manifest; the export is complete, and the folder no longer marked."""
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
        """Let others have the folder, which stays marked unless the export is complete.

        Idempotent.
        """
        self._part.close()


def _marked(folder: Path) -> TextIO:
    """The file that marks ``folder``, for this process alone and empty."""
    if not (folder / _PART).exists() and any(folder.iterdir()):
        _refuse_complete(folder)
        raise ConfigError(
            f"{folder} is not empty, and holds no export that was interrupted: choose another "
            "folder"
        )
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    part = os.fdopen(os.open(folder / _PART, flags, 0o600), "w", encoding="utf-8")
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _refuse_complete(folder)  # somebody else's, a moment ago
    except BlockingIOError as exc:
        part.close()
        raise ConfigError(f"another export is writing into {folder}") from exc
    except ConfigError:
        part.close()
        raise
    part.truncate(0)
    return part


def _refuse_complete(folder: Path) -> None:
    if (folder / NAME).exists():
        raise ConfigError(f"{folder} holds a complete export already: choose another folder")


def read_head(folder: Path) -> Head:
    """What the export in ``folder`` is. Raises ``PayloadError`` where it is none, or another
    version's."""
    with (folder / NAME).open("rb") as opened:
        values = _parsed(opened.readline(_LINE_CHARS_MAX * 64), 1)
    if values.get("format") != FORMAT:
        raise PayloadError(f"{NAME}: no manifest of this version ({FORMAT})")
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
        raise PayloadError(f"{NAME}: line 1 is not an export's") from exc


def read_lines(folder: Path, head: Head) -> Iterator[ManifestLine]:
    """Its payloads. Raises ``PayloadError`` for what is no line, and in the end where there are
    fewer or more than ``head`` says."""
    number = 1
    with (folder / NAME).open("rb") as opened:
        opened.readline()
        while raw := opened.readline(_LINE_CHARS_MAX):
            number += 1
            yield _line(_parsed(raw, number), number)
    if number - 1 != head.payloads:
        raise PayloadError(f"{NAME}: {number - 1} payloads where its head says {head.payloads}")


def _parsed(raw: bytes, number: int) -> dict[str, Any]:
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise PayloadError(f"{NAME}: line {number} is no JSON") from exc
    if not isinstance(values, dict):
        raise PayloadError(f"{NAME}: line {number} is no object")
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
        raise PayloadError(f"{NAME}: line {number} names no payload") from exc
    if _SHA256.fullmatch(line.sha256) is None:
        raise PayloadError(f"{NAME}: line {number}: sha256 is none")
    return line
