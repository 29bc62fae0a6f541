"""Digests of files, remembered on disk for as long as the files stay what they are.

What is remembered is a saving of time only: an entry that is missing, damaged, somebody else's or
about other files is as good as none, and nothing here raises because of it.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from objkv.config import cache_folder

logger = logging.getLogger(__name__)

_ENTRIES_MAX = 1024
"""Beyond it the oldest go: a thousand adapters, at 1 KiB each."""
_ENTRY_BYTES_MAX = 4 << 20
_SETTLED_NS = 2_000_000_000
"""A file that changed so recently may change again without a new time stamp, as ``git`` knows of
its index: file systems stamp in steps of up to two seconds."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What says, without reading it, that a file is the one that was read before."""

    path: str
    """Absolute, links followed."""
    size: int
    mtime_ns: int
    ctime_ns: int
    """Changes even where a copy keeps ``mtime_ns``."""
    inode: int
    device: int


def identify(paths: Sequence[Path]) -> tuple[FileIdentity, ...]:
    """The identities of files, in order. Raises ``OSError``; one ``stat`` each, nothing is read."""
    found = []
    for path in paths:
        real = path.resolve()
        stat = real.stat()
        found.append(
            FileIdentity(
                str(real),
                stat.st_size,
                stat.st_mtime_ns,
                stat.st_ctime_ns,
                stat.st_ino,
                stat.st_dev,
            )
        )
    return tuple(found)


class DigestCache:
    """Entries in ``folder``, which is made when first needed. Safe from many processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def remembered(self, kind: str, paths: Sequence[Path], compute: Callable[[], str]) -> str:
        """``compute()``, unless an entry says what that was for the same files.

        ``kind``: what is computed of them, and by which recipe. Raises what ``compute`` and
        ``stat`` raise. Files that change meanwhile, or just before, are not remembered.
        """
        files = identify(paths)
        entry = self._entry(kind, files)
        if (known := _read(entry, kind, files)) is not None:
            return known
        digest = compute()
        if identify(paths) == files and _are_settled(files):
            self._write(entry, _content(kind, files, digest))
        return digest

    def _entry(self, kind: str, files: Sequence[FileIdentity]) -> Path:
        return self._folder / f"{_name(kind, files)}.json"

    def _write(self, entry: Path, content: dict[str, object]) -> None:
        """Whole or not at all."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(dir=self._folder, suffix=".partial")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(content, file)
                os.replace(partial, entry)
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise
            self._prune()
        except OSError as exc:  # a full or read-only disk: it is computed again next time
            logger.info("digest not remembered path=%s reason=%s", entry, exc)

    def _prune(self) -> None:
        entries = list(self._folder.glob("*.json"))
        if len(entries) <= _ENTRIES_MAX:
            return
        entries.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in entries[: len(entries) - _ENTRIES_MAX]:
            path.unlink(missing_ok=True)


def open_digests() -> DigestCache:
    """The digests that this user's replicas on this machine remember together."""
    return DigestCache(cache_folder() / "digests")


def _read(entry: Path, kind: str, files: Sequence[FileIdentity]) -> str | None:
    """What the entry says, if it is whole, this user's own and about these files."""
    try:
        stat = entry.stat()
        if stat.st_uid != os.geteuid() or stat.st_size > _ENTRY_BYTES_MAX:
            return None
        content = json.loads(entry.read_bytes())
        digest = content["digest"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(digest, str) or content != _content(kind, files, digest):
        return None
    return digest


def _content(kind: str, files: Sequence[FileIdentity], digest: str) -> dict[str, object]:
    name = _name(kind, files)
    check = hashlib.sha256(f"{name} {digest}".encode()).hexdigest()
    paths = [file.path for file in files]
    return {"kind": kind, "files": paths, "identity": name, "digest": digest, "check": check}


def _name(kind: str, files: Sequence[FileIdentity]) -> str:
    values = [kind, [list(astuple(file)) for file in files]]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _are_settled(files: Sequence[FileIdentity]) -> bool:
    newest = max((max(file.mtime_ns, file.ctime_ns) for file in files), default=0)
    return time.time_ns() - newest > _SETTLED_NS
