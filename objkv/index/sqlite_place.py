"""Where the SQLite file of an index lies, and who may reach it.

What is in it (which prefixes are stored, how often they are asked for) is nobody else's business:
the file is made for this user alone. Where the folder is made for a group it is the group's too:

    install -d -m 2770 -g GROUP FOLDER

SQLite gives its ``-wal`` and ``-shm`` files the owner, group and mode of the file itself.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from objkv.errors import StoreDenied

_ALONE = 0o600
_GROUP = 0o660
_COMPANIONS = ("-wal", "-shm", "-journal")


def prepare(path: Path) -> None:
    """Make the file and its folder where they are missing, and refuse what somebody else planted.

    Raises ``StoreDenied`` with what to fix. Whoever may write to the file's folder can still
    replace the file later: only folders where everybody may write are looked at with distrust.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = path.parent.stat()
        if not os.path.lexists(path):
            _make(path, folder)
        _check(path, folder)
        for suffix in _COMPANIONS:
            companion = path.with_name(path.name + suffix)
            with suppress(FileNotFoundError):  # as usual, or gone with its last user just now
                _check(companion, folder)
    except OSError as exc:
        raise StoreDenied(f"index {path}: {exc.strerror}: {exc.filename}") from exc


def is_shared_by_group(folder: os.stat_result) -> bool:
    """Whether a folder is made for a group, and for nobody else."""
    return folder.st_mode & 0o077 == 0o070


def _make(path: Path, folder: os.stat_result) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileExistsError):  # another process just made it, or planted it: it is looked at
        fd = os.open(path, flags, _ALONE)
        try:
            if is_shared_by_group(folder):
                os.fchmod(fd, _GROUP)  # whatever the umask says
        finally:
            os.close(fd)


def _check(path: Path, folder: os.stat_result) -> None:
    found = path.lstat()
    if folder.st_mode & stat.S_IWOTH and found.st_uid not in (os.geteuid(), 0):
        raise StoreDenied(
            f"index {path}: belongs to another user, in a folder where everybody may put files: set"
            " index_url to a file in a folder of your own"
        )
    with suppress(FileNotFoundError):  # a link of the operator's that leads to no file yet
        if not stat.S_ISREG(path.stat().st_mode):
            raise StoreDenied(f"index {path}: is no file: remove it, or set index_url to another")
