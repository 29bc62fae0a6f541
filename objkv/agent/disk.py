"""A folder on a local disk for payloads, with a bound in bytes.

Each payload is a file named by the hash of its key. It is written under a temporary name and then
renamed, and never synced: after a power failure a file may hold anything. So a reader verifies it,
as if it came from a store. One agent at a time has the folder.
"""

import fcntl
import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

from objkv.agent.ranking import Ranking
from objkv.config.urls import make_private
from objkv.errors import ConfigError, PayloadError, StoreUnavailable
from objkv.stores.base import Arrived

FOLDER: Final = "payloads"
"""Folder of the files below the configured one, which may be a mount point of another owner."""
FILES_MAX: Final = 1 << 18
"""Each takes 300 bytes of memory, and 1,100 more if it is held back."""
_LOCK = "lock"
_TEMPORARY = "unfinished"
HELD_BACK: Final = "held-back"
"""The list of held-back payloads that an agent leaves for the next one."""
_HELD_BACK_BYTES_MAX = 128 << 20
"""About twice what ``FILES_MAX`` payloads take."""
_NAME = re.compile(r"[0-9a-f]{40}\.(?:plain|signed|encrypted|signed-encrypted)")
_DIGEST_BYTES = 20
_BLOCK = 4096
_SLICE_BYTES = 2 << 20
"""Bytes of one read or write. They are verified while they are in the processor's caches."""


class DiskFile(NamedTuple):
    """A file as the folder lists it."""

    modified_ns: int
    name: str
    nbytes: int


class DiskFolder:
    """The files of one agent. Touches no file whose name is not its own. Raises
    ``StoreUnavailable`` for every error of the file system."""

    def __init__(self, path: Path) -> None:
        """Create the folder below ``path`` if need be. Raises ``ConfigError``."""
        self.path = path / FOLDER
        self._lock = -1
        try:
            make_private(self.path)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as exc:
            raise ConfigError(
                f"agent_disk_url: no folder {self.path} ({exc.strerror}): give a folder that this "
                "user may write"
            ) from exc
        found = os.fstat(self._fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"agent_disk_url: {self.path} is not a private folder of this user: remove it, or "
                "give another one"
            )

    def lock(self) -> bool:
        """Take the folder, before everything else. Returns False if another agent has it."""
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        with _translated("lock"), ExitStack() as undo:
            lock = os.open(_LOCK, flags, 0o600, dir_fd=self._fd)
            undo.callback(os.close, lock)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                undo.pop_all()
                self._lock = lock
        return self._lock >= 0

    def listed(self) -> Iterator[DiskFile]:
        """Yield all payloads. Removes what an earlier agent left unfinished."""
        with _translated("list"):
            self._unlink(_TEMPORARY)
            with os.scandir(self._fd) as entries:
                for entry in entries:
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        found = entry.stat(follow_symlinks=False)
                        yield DiskFile(found.st_mtime_ns, entry.name, found.st_size)

    def write(self, name: str, payload: memoryview) -> None:
        """Write a file and give it its name. Only one thread writes."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with _translated(f"write {name}"):
            try:
                fd = os.open(_TEMPORARY, flags, 0o600, dir_fd=self._fd)
                try:
                    at = 0
                    while at < len(payload):
                        at += os.write(fd, payload[at : at + _SLICE_BYTES])
                finally:
                    os.close(fd)
                os.rename(_TEMPORARY, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except BaseException:
                with suppress(OSError):
                    self._unlink(_TEMPORARY)
                raise

    def read_into(self, name: str, buffer: memoryview, arrived: Arrived) -> int | None:
        """See ``ReadStore.get_into``. Raises ``PayloadError`` for a shorter file."""
        with _translated(f"read {name}"):
            try:
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)
            except FileNotFoundError:
                return None
        try:
            at, size = 0, len(buffer)
            while at < size:
                with _translated(f"read {name}"):
                    got = os.preadv(fd, [buffer[at : at + _SLICE_BYTES]], at)
                if not got:
                    raise PayloadError(f"{at} bytes, expected {size}")
                at += got
                arrived(at)
            return size
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with _translated(f"remove {name}"):
            self._unlink(name)

    def take_held_back(self) -> bytes:
        """Return and remove the list that the last agent left; empty if there is none."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        with _translated(f"read {HELD_BACK}"), suppress(FileNotFoundError):
            with open(os.open(HELD_BACK, flags, dir_fd=self._fd), "rb") as file:
                text = file.read(_HELD_BACK_BYTES_MAX)
            self._unlink(HELD_BACK)
            return text
        return b""

    def free_bytes(self) -> int:
        """Return the free space of the file system."""
        with _translated("statvfs"):
            found = os.fstatvfs(self._fd)
            return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Give the folder to the next agent. No other call may follow."""
        if self._lock >= 0:
            os.close(self._lock)

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def __del__(self) -> None:
        """Close the folder. Not in ``close``: a thread may hang in a call, and the descriptor's
        number must not name another folder then."""
        with suppress(AttributeError, OSError):
            os.close(self._fd)


class Disk:
    """Payloads by the path of their key, in the order of a ``Ranking``. Thread-safe.

    ``load``, ``begin``, ``make_room``, ``write`` and ``purge`` are for one background thread, the
    only one that changes the folder: a file system that hangs delays no other thread.
    """

    def __init__(self, folder: DiskFolder, nbytes_max: int, form: str = "plain") -> None:
        """Takes over ``folder``. ``nbytes_max``: bound; 0: half of the free space at the start, own
        files included. ``form``: how payloads are sealed. Files of another form are removed."""
        self.nbytes_max = nbytes_max
        """0 until it is known."""
        self.nbytes = 0
        self.folder = folder
        self._form = form
        self._lock = Lock()
        self._sizes: dict[str, int] = {}
        self._ranking = Ranking(nbytes_max)
        self._doomed: deque[str] = deque()
        """Files to remove, if they were not written again."""
        self._writing = ""
        """The file that is being written; empty if it was discarded meanwhile."""
        self.is_loaded = False
        self._only_copies: dict[str, str] = {}
        """Keys, by file, of payloads that exist nowhere but here."""

    def __len__(self) -> int:
        return len(self._sizes)

    def size_of(self, key: str) -> int | None:
        """Return the size of a payload's file; None if there is none."""
        return self._sizes.get(self._name(key))

    def load(self, stop: Callable[[], bool]) -> None:
        """First, find the files of earlier agents, unless ``stop()``. Raises ``StoreUnavailable``.
        The folder must be locked."""
        found, others = list[DiskFile](), list[DiskFile]()
        for file in self.folder.listed():
            if stop():
                return
            is_own = file.name.endswith(f".{self._form}") and file.nbytes > 0
            (found if is_own else others).append(file)
        used = sum(_blocks(file.nbytes) for file in found)
        nbytes_max = self.nbytes_max or (self.folder.free_bytes() + used) // 2
        found.sort(reverse=True)
        while found and (used > nbytes_max or len(found) > FILES_MAX):
            others.append(found.pop())
            used -= _blocks(others[-1].nbytes)
        with self._lock:
            self.nbytes_max, self.nbytes = nbytes_max, used
            self._ranking = Ranking(nbytes_max)
            for file in reversed(found):
                self._sizes[file.name] = file.nbytes
                self._ranking.add(file.name, _blocks(file.nbytes))
            self._doomed += (file.name for file in others)
            self.is_loaded = True
        with suppress(StoreUnavailable):  # the next write tries again
            self.purge()

    def get_into(self, key: str, buffer: memoryview, arrived: Arrived) -> int | None:
        """See ``ReadStore``. Verifies nothing. Raises ``PayloadError``, ``StoreUnavailable``."""
        return self.folder.read_into(self._name(key), buffer, arrived)

    def use(self, key: str) -> None:
        """Record that a payload was read and was right."""
        name = self._name(key)
        with self._lock:
            if name in self._sizes:
                self._ranking.use(name)

    def discard(self, key: str) -> bool:
        """Have ``purge`` remove a payload, also if it is being written. Return whether it was
        nowhere else."""
        name = self._name(key)
        with self._lock:
            if self._writing == name:
                self._writing = ""
            return self._drop(name) is not None

    @property
    def has_dropped(self) -> bool:
        """Whether there are files for ``purge`` to remove."""
        return bool(self._doomed)

    def mark_only_copy(self, key: str) -> bool:
        """Note that a payload is nowhere else. Return False if it is not on disk."""
        name = self._name(key)
        with self._lock:
            if name not in self._sizes:
                return False
            self._only_copies[name] = key
            return True

    def unmark_only_copy(self, key: str) -> None:
        """The payload is in memory again."""
        with self._lock:
            self._only_copies.pop(self._name(key), None)

    def begin(self, key: str) -> None:
        """Announce the next ``write``. From now on ``discard`` applies to it."""
        with self._lock:
            self._writing = self._name(key)

    def make_room(self, nbytes: int) -> list[str | None]:
        """Drop payloads until there is room for one of ``nbytes``, unless it is larger than the
        bound. Return, for each of them, its key if it was nowhere else."""
        dropped = list[str | None]()
        room = self.nbytes_max - _blocks(nbytes)
        with self._lock:
            while 0 <= room < self.nbytes or len(self._sizes) >= FILES_MAX:
                victim = self._ranking.victim(lambda _: True)
                assert victim is not None
                dropped.append(self._drop(victim))
        return dropped

    def write(self, key: str, payload: memoryview) -> bool:
        """Write a missing payload. Return False if it was discarded since ``begin``, or
        ``make_room`` made none. Raises ``StoreUnavailable``."""
        name, nbytes = self._name(key), _blocks(len(payload))
        assert name not in self._sizes
        if self.nbytes + nbytes > self.nbytes_max:
            return False
        self.purge()
        self.folder.write(name, payload)
        with self._lock:
            if self._writing != name:
                self._doomed.append(name)
                return False
            self._writing = ""
            self._sizes[name] = len(payload)
            self._ranking.add(name, nbytes)
            self.nbytes += nbytes
        return True

    def purge(self) -> None:
        """Remove the files of payloads that are gone. Raises ``StoreUnavailable``."""
        while self._doomed:
            name = self._doomed[0]  # only this thread takes any
            if name not in self._sizes:
                self.folder.remove(name)
            self._doomed.popleft()

    def _name(self, key: str) -> str:
        digest = hashlib.blake2b(key.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        return f"{digest}.{self._form}"

    def _drop(self, name: str) -> str | None:
        """Forget a file, if there is one. Return its key if that was the only copy."""
        size = self._sizes.pop(name, None)
        if size is None:
            return None
        self._ranking.remove(name)
        self.nbytes -= _blocks(size)
        self._doomed.append(name)
        return self._only_copies.pop(name, None)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StoreUnavailable(f"disk, {what}: {exc.strerror or exc}") from exc


def _blocks(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK
