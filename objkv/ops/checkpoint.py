"""How far a long command has come: a file beside the cache, so that it goes on where it ended.

The file is a convenience, not a promise: without it everything is done once more, which is harmless
in every command that has one. Two of a kind at once are too: the second one keeps none.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from objkv.ops.tally import Tally

AGE_MAX_S = 24 * 3600.0
"""What was found longer ago is looked at again."""
_WRITE_EVERY_S = 1.0
_FORMAT = 1


class Checkpoint:
    """Names of the units that are done, and what they found. One thread uses it."""

    def __init__(self, file: Path | None, *, clock: Callable[[], float] = time.time) -> None:
        """``file``: made if there is none; None keeps nothing."""
        self._clock = clock
        self._begun_s = self._written_s = clock()
        self.done: set[str] = set()
        self.tally = Tally()
        self.resumed = False
        """Whether an earlier run is continued."""
        self._fd = -1 if file is None else _locked(file)
        if self._fd >= 0:
            self._read()

    @property
    def is_kept(self) -> bool:
        """Whether a later run can go on from here."""
        return self._fd >= 0

    def finish(self, unit: str, found: Tally) -> None:
        """``unit`` is done, and that is what it found."""
        self.done.add(unit)
        self.tally.add(found)
        if self._clock() - self._written_s >= _WRITE_EVERY_S:
            self._write()

    def close(self, *, complete: bool) -> None:
        """Keep it for the next run, or, if all is done, nothing. Idempotent."""
        if self._fd < 0:
            return
        if complete:
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
        else:
            self._write()
        os.close(self._fd)
        self._fd = -1

    def _read(self) -> None:
        with open(self._fd, "rb", closefd=False) as opened:
            text = opened.read()
        try:
            kept = json.loads(text)
            begun_s, done = float(kept["begun_s"]), {str(unit) for unit in kept["done"]}
            tally = Tally.parse(kept["tally"])
            known = kept["format"] == _FORMAT
        except (AttributeError, KeyError, TypeError, ValueError):
            return  # empty, cut short, or another version's
        if known and 0 <= self._clock() - begun_s < AGE_MAX_S:
            self._begun_s, self.done, self.tally = begun_s, done, tally
            self.resumed = bool(done)

    def _write(self) -> None:
        if self._fd < 0:
            return
        self._written_s = self._clock()
        kept = {
            "format": _FORMAT,
            "begun_s": self._begun_s,
            "done": sorted(self.done),
            "tally": self.tally.plain(),
        }
        # Cut short by a crash it is unreadable, and read as none.
        with suppress(OSError), open(self._fd, "r+b", closefd=False) as opened:
            opened.truncate(0)
            opened.seek(0)
            opened.write(json.dumps(kept).encode())


def checkpoint_file(folder: Path, command: str, *settings: object) -> Path:
    """Where ``command`` with these settings, which decide what it does, keeps how far it is."""
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
    return folder / "progress" / f"{command}-{digest}.json"


def _locked(file: Path) -> int:
    """The open file, or -1 where another process has it or there is no room for it."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(file, flags, 0o600)
    except OSError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return -1
    return fd
