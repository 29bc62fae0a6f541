"""Verifies one payload: every byte, its decoded pages, its claim, its record and its hot copy."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Condition
from typing import Literal

from objkv.cache.chunks import stored_header
from objkv.codec.payload import Header, check_frames, frame_pages, read_header
from objkv.codec.seal import Seal
from objkv.codec.values import ENCRYPTED
from objkv.errors import KeyMismatch, PayloadError
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.ops.backends_view import BackendsView, recorded
from objkv.ops.rebuild import is_chunk_same, is_same
from objkv.stores.base import Entry

Verdict = Literal["ok", "missing", "corrupt", "mismatch", "hot", "changed"]
"""``mismatch``: the payload is right but differs from its
record. ``hot``: the copy in the hot store differs. ``changed``: no longer stored."""

LARGE_BYTES = 64 << 20
"""From this size on, the header is checked before the whole payload is read into memory."""
_PAUSE_S = 0.3
"""Longer than a writer takes from its put to its record."""
_RECENT_S = 60.0
"""Older payloads cannot be in the middle of being written."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking one payload."""

    verdict: Verdict
    nbytes: int
    detail: str = ""
    header: Header | None = None
    """Set if it was read and is valid."""
    written_s: float = 0.0
    """Time of the payload's write; for a missing payload, the time in its record."""
    is_of_other_keys: bool = False
    """Whether it is corrupt only because it is sealed with keys other than the configured ones."""


class Budget:
    """A limit on the bytes that all threads together hold in memory. A request above the limit
    waits until it is the only one."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._used = 0
        self._changed = Condition()

    @contextmanager
    def taking(self, nbytes: int) -> Iterator[None]:
        """Wait until ``nbytes`` are free, and reserve them within the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + nbytes <= self._nbytes)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


class Checker:
    """Checks payloads by key. Read-only. Safe from many threads."""

    def __init__(
        self,
        view: BackendsView,
        budget: Budget,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._view = view
        self._budget = budget
        self._sleep = sleep

    def check(self, key: ChunkKey, seal: Seal | None) -> tuple[Checked, Record | None]:
        """Check the payload of ``key``. Return the result and its record, or None without one. A
        bad result is checked once more, because a writer may be at work."""
        checked, record = self.look(key, seal)
        if checked.verdict in ("ok", "changed"):
            return checked, record
        if abs(self._clock() - checked.written_s) < _RECENT_S:
            self._sleep(_PAUSE_S)
        return self.look(key, seal)

    def look(self, key: ChunkKey, seal: Seal | None) -> tuple[Checked, Record | None]:
        """Like ``check``, without the second check."""
        record = None
        if not self._view.is_own_index:
            record, shard = recorded(self._view.index, key)
            if shard is None:
                return Checked("changed", 0), None
        entry = self._view.bulk.head(key.path())
        if entry is None:
            if record is None:
                return Checked("changed", 0), None
            shard, detail = record.shards[key.field], "the payload is missing in the bulk store"
            return Checked("missing", shard.nbytes, detail, written_s=shard.created_s), record
        checked = self._check(key, entry, record, seal)
        return replace(checked, written_s=entry.modified_s), record

    def _check(
        self, key: ChunkKey, entry: Entry, record: Record | None, seal: Seal | None
    ) -> Checked:
        nbytes = entry.nbytes
        try:
            if nbytes > LARGE_BYTES:
                stored_header(self._view.bulk, entry, seal)
            with self._budget.taking(nbytes):
                payload = self._view.bulk.get(key.path())
                if payload is None:
                    return Checked("changed", 0)
                header = self.read(payload, seal)
                if header.claim.key != key:
                    return Checked("corrupt", nbytes, f"claims to be {header.claim.key.path()}")
                if record is None:
                    return Checked("ok", nbytes, header=header)
                if not is_same(record.shards[key.field], header) or not is_chunk_same(
                    record, header
                ):
                    return Checked("mismatch", nbytes, "its record differs", header)
                if record.shards[key.field].hot and self._is_copy_wrong(key, payload):
                    return Checked("hot", nbytes, "its copy in the hot store differs", header)
                return Checked("ok", nbytes, header=header)
        except PayloadError as exc:
            of_other_keys = isinstance(exc, KeyMismatch)
            return Checked("corrupt", nbytes, str(exc), is_of_other_keys=of_other_keys)

    def read(self, payload: bytes, seal: Seal | None) -> Header:
        """Check every byte of a payload and return its header; the caller compares the key. Raises
        ``PayloadError``."""
        header = read_header(payload, seal=seal)
        self._check_frames(header, payload)
        return header

    def _check_frames(self, header: Header, payload: bytes) -> None:
        if header.nbytes != len(payload):
            raise PayloadError(f"{len(payload)} bytes, but the header states {header.nbytes}")
        if not header.is_sealed and any(f.codec.endswith(ENCRYPTED) for f in header.frames):
            check_frames(header, payload)  # without a key only the checksums can be checked
            return
        import numpy as np  # late: a command line that only prints does without

        coded = [f.layer.nbytes for f in header.frames if f.codec != "none"]
        scratch = np.empty(max(coded), np.uint8).data if coded else None
        for index in range(len(header.frames)):
            frame_pages(header, index, payload, scratch)

    def _is_copy_wrong(self, key: ChunkKey, payload: bytes) -> bool:
        copy = None if self._view.hot is None else self._view.hot.get(key.path())
        return copy is not None and copy != payload
