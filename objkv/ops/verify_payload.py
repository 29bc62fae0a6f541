"""One payload held against everything that is known of it: every byte, decoded too."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Condition
from typing import Literal

from objkv.codec.payload import Header, check_frames, frame_pages, read_header
from objkv.codec.seal import Seal
from objkv.codec.values import ENCRYPTED
from objkv.errors import KeyMismatch, PayloadError
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.ops.backends_view import BackendsView, recorded, stored_header
from objkv.ops.rebuild import is_chunk_same, is_same
from objkv.stores.base import Entry

Verdict = Literal["ok", "missing", "corrupt", "foreign", "mismatch", "hot", "changed"]
"""``foreign``: of another key. ``mismatch``: the record says otherwise, the payload is right.
``hot``: the copy in the hot store is not the payload. ``changed``: not stored any longer."""

LARGE_BYTES = 64 << 20
"""Of such a payload the header is read first: what it takes to check it is not known before."""
_PAUSE_S = 0.3
"""Longer than a saver takes from its put to its record."""
_RECENT_S = 60.0
"""What was written longer ago is not being written now."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of one payload's check."""

    verdict: Verdict
    nbytes: int
    detail: str = ""
    header: Header | None = None
    """If it was read, and is right."""
    written_s: float = 0.0
    """When the payload was, or, where there is none, its record says that it was."""
    is_of_other_keys: bool = False
    """Whether it is corrupt only by the keys that it was judged with."""


class Budget:
    """Bytes that all threads together may have in memory. What needs more than all has it alone."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._used = 0
        self._changed = Condition()

    @contextmanager
    def taking(self, nbytes: int) -> Iterator[None]:
        """Wait until ``nbytes`` are free, and have them."""
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
    """Checks payloads by key. Safe from many threads; reads, and changes nothing."""

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
        """The payload of ``key`` and the record it was held against, None where there is none. What
        is wrong is looked at again: somebody may be writing it."""
        checked, record = self.look(key, seal)
        if checked.verdict in ("ok", "changed"):
            return checked, record
        if abs(self._clock() - checked.written_s) < _RECENT_S:
            self._sleep(_PAUSE_S)
        return self.look(key, seal)

    def look(self, key: ChunkKey, seal: Seal | None) -> tuple[Checked, Record | None]:
        """The same, once."""
        record = None
        if not self._view.is_own_index:
            record, shard = recorded(self._view.index, key)
            if shard is None:
                return Checked("changed", 0), None
        entry = self._view.bulk.head(key.path())
        if entry is None:
            if record is None:
                return Checked("changed", 0), None
            shard, detail = record.shards[key.field], "the bulk store does not have it"
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
                    return Checked("foreign", nbytes, f"claims to be {header.claim.key.path()}")
                if record is None:
                    return Checked("ok", nbytes, header=header)
                if not is_same(record.shards[key.field], header) or not is_chunk_same(
                    record, header
                ):
                    return Checked("mismatch", nbytes, "its record says otherwise", header)
                if record.shards[key.field].hot and self._is_copy_wrong(key, payload):
                    return Checked("hot", nbytes, "its copy in the hot store differs", header)
                return Checked("ok", nbytes, header=header)
        except PayloadError as exc:
            of_other_keys = isinstance(exc, KeyMismatch)
            return Checked("corrupt", nbytes, str(exc), is_of_other_keys=of_other_keys)

    def read(self, payload: bytes, seal: Seal | None) -> Header:
        """The header of a payload of which every byte was checked; raises ``PayloadError``. Whose
        it is remains to be compared."""
        header = read_header(payload, seal=seal)
        self._check_frames(header, payload)
        return header

    def _check_frames(self, header: Header, payload: bytes) -> None:
        if header.nbytes != len(payload):
            raise PayloadError(f"{len(payload)} bytes where the header says {header.nbytes}")
        if header.opened is None and any(f.codec.endswith(ENCRYPTED) for f in header.frames):
            check_frames(header, payload)  # without a key that is all that can be told
            return
        import numpy as np  # late: a command line that only prints does without

        coded = [f.layer.nbytes for f in header.frames if f.codec != "none"]
        scratch = np.empty(max(coded), np.uint8).data if coded else None
        for index in range(len(header.frames)):
            frame_pages(header, index, payload, scratch)

    def _is_copy_wrong(self, key: ChunkKey, payload: bytes) -> bool:
        copy = None if self._view.hot is None else self._view.hot.get(key.path())
        return copy is not None and copy != payload
