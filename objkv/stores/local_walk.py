"""Walks a directory's store: all that is below a folder, in the order of keys.

Others may write below a shared folder. What they can plant there ends no walk: it enters no folder
that no key can name, so none that is nested deeper than a key is long, and leaves out those that
this user may not read.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import suppress

from objkv.stores.base import is_key
from objkv.stores.local_beneath import FOLDER, Beneath
from objkv.stores.local_disk import failed

logger = logging.getLogger(__name__)

_LEFT_OUT = {errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG}

Listed = list[tuple[str, os.stat_result | None]]
"""Names; None for folders; of a symbolic link, what it is itself."""


class Walks:
    """Of one store; thread-safe."""

    def __init__(self, beneath: Beneath) -> None:
        self._beneath = beneath
        self._has_told = False

    def walk(self, folder: str, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        """All that is under ``folder`` and may start with ``prefix``, but for folders, in key
        order: a folder sorts as the keys in it do, with its ``/``.

        One folder's listing is in memory at a time (per level). A folder inside that this user may
        not read is left out, which the log tells once. Raises ``StoreError``.
        """
        levels = [self._ordered(folder, prefix, self.listed(folder))]
        while levels:
            key, found = next(levels[-1], ("", None))
            if found is not None:
                yield key, found
            elif not key:
                levels.pop()
            elif is_key(f"{key}x"):  # it ends with "/": else no key can be in it
                levels.append(self._ordered(key[:-1], prefix, self._inside(key[:-1])))

    def listed(self, folder: str) -> Listed:
        """What is in ``folder``; nothing if there is none. Raises ``StoreError``."""
        try:
            return self._list(folder)
        except OSError as exc:
            raise failed("scan", folder or self._beneath.root, exc) from exc

    def _inside(self, folder: str) -> Listed:
        try:
            return self._list(folder)
        except OSError as exc:
            if exc.errno not in _LEFT_OUT:
                raise failed("scan", folder, exc) from exc
            if not self._has_told:
                self._has_told = True
                logger.warning(
                    "left out a folder that cannot be read, and any other path=%s/%s error=%s",
                    self._beneath.root,
                    folder,
                    exc.strerror,
                )
            return []

    def _ordered(
        self, folder: str, prefix: str, listed: Listed
    ) -> Iterator[tuple[str, os.stat_result | None]]:
        start = f"{folder}/" if folder else ""
        keys = {start + (f"{n}/" if found is None else n): found for n, found in listed}
        return ((key, keys[key]) for key in sorted(keys) if key.startswith(prefix))

    def _list(self, folder: str) -> Listed:
        listed: Listed = []
        try:
            with self._beneath.at(folder, FOLDER) as fd, os.scandir(fd) as found:
                for entry in found:
                    with suppress(FileNotFoundError):  # removed meanwhile
                        is_folder = entry.is_dir(follow_symlinks=False)
                        about = None if is_folder else entry.stat(follow_symlinks=False)
                        listed.append((entry.name, about))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return listed
