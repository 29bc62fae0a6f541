"""Answers to lookups in memory that the agent writes and replicas read.

So a replica needs no message for chunks that were looked up before on its node: two wake-ups of
processes take longer than the rest of a lookup. Prompts that begin alike have equal blocks of
chunks from the start on, so each block has an answer. It is kept for a bounded time, and until
anything changes about one of its chunks on this node.
"""

import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from objkv.agent.memory.arena import PAGE, make_mapped, map_sent
from objkv.errors import ConfigError
from objkv.index.fields import SHARD_BYTES_MAX
from objkv.keys.prefix import PREFIX_HASH_BYTES

BLOCK_MAX: Final = 32
"""Chunks per block, or as many as fit. The last one of a prompt may have fewer."""
_SLOTS = 1024
_SLOT_BYTES = 32_768
_KEY_BYTES = 16
VOUCH_S: Final = 3.0
"""For how long an agent that runs vouches for its answers at a time."""
_HEAD = struct.Struct(f"<{_KEY_BYTES}sddIQ")
_CHECK = struct.Struct("<Q")
TEXT_AT: Final = _HEAD.size + _CHECK.size
"""Position of a text in its slot."""
TEXT_BYTES_MAX: Final = _SLOT_BYTES - TEXT_AT
FIELDS_MAX: Final = TEXT_BYTES_MAX // (SHARD_BYTES_MAX + 1)
"""Fields of one lookup, so that a block has a chunk at least. Others are looked up in turns."""
_TOTAL = PAGE + _SLOTS * _SLOT_BYTES


class LookupScope:
    """Lookups of one namespace and some shard fields."""

    def __init__(self, namespace: str, fields: tuple[str, ...]) -> None:
        """``fields``: from 1 to ``FIELDS_MAX``."""
        self.namespace, self.fields = namespace, fields
        self._text = "\n".join((namespace, *fields, "")).encode()
        self.chunks = min(BLOCK_MAX, FIELDS_MAX // len(fields))
        """Chunks per block."""

    def blocks(self, hashes: bytes) -> list[bytes]:
        """Divide prefix hashes, one after another, into those of each block."""
        step = self.chunks * PREFIX_HASH_BYTES
        return [hashes[at : at + step] for at in range(0, len(hashes), step)]

    def key(self, block: bytes) -> bytes:
        """Return the key of a block of prefix hashes."""
        return xxh3_128_digest(self._text + block)


@dataclass(slots=True, eq=False)
class PendingAnswer:
    """A block that is being looked up, or is on the board."""

    key: bytes
    hashes: Sequence[bytes]
    """The prefix hashes of its chunks."""
    is_void: bool = False
    """Whether something has changed about a chunk since the lookup began."""


class AnswerBoard:
    """One mapping of the answers: a slot for each block, found by its key. The agent's is writable,
    a replica's is not. Thread-safe.

    A reader checks what it has copied, so it may read while the agent writes. The first page has
    the time until which the agent vouches for its answers, since one that hangs cannot void them.
    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self.fd = fd
        """The memfd, which this object closes."""
        self._view = memoryview(mapping)
        self._vouched = self._view[:8].cast("Q")
        self._lock = Lock()
        self._at: dict[int, PendingAnswer] = {}
        """What each slot has, by its position."""
        self._by_chunk: dict[bytes, tuple[PendingAnswer, ...]] = {}

    @classmethod
    def create(cls) -> "AnswerBoard":
        """Make an empty one, which takes memory as it is written. Raises ``ConfigError``."""
        try:
            return cls(*make_mapped("answers", _TOTAL))
        except OSError as exc:
            raise ConfigError(f"no memory for answers: {exc}") from exc

    @classmethod
    def join(cls, fd: int) -> "AnswerBoard":
        """Map the answers that an agent sent. Takes over ``fd``. Raises ``TransferError``."""
        return cls(fd, map_sent(fd, "answers", range(_TOTAL, _TOTAL + 1)))

    def vouch(self, until_s: float) -> None:
        """Vouch for all answers that are not void, until then; seconds since the epoch."""
        self._vouched[0] = int(1000 * until_s)

    def begin(self, key: bytes, hashes: Sequence[bytes]) -> PendingAnswer:
        """Begin a block's lookup. ``write`` or ``end`` must follow."""
        pending = PendingAnswer(key, hashes)
        with self._lock:
            for one in hashes:
                self._by_chunk[one] = (*self._by_chunk.get(one, ()), pending)
        return pending

    def write(self, pending: PendingAnswer, text: bytes, span: tuple[float, float]) -> None:
        """Keep a block's answer, unless something has changed about one of its chunks since its
        lookup began. ``span``: from when until when it is valid, in seconds since the epoch."""
        assert len(text) <= TEXT_BYTES_MAX
        at = _slot_start(pending.key)
        head = _HEAD.pack(pending.key, *span, len(text), xxh3_64_intdigest(text))
        with self._lock:
            if pending.is_void:
                self._unlink(pending)
                return
            if (before := self._at.get(at)) is not None:
                self._unlink(before)
            self._at[at] = pending
            self._view[at : at + len(head)] = bytes(len(head))
            self._view[at + TEXT_AT : at + TEXT_AT + len(text)] = text
            self._view[at + _HEAD.size : at + TEXT_AT] = _CHECK.pack(xxh3_64_intdigest(head))
            self._view[at : at + len(head)] = head

    def end(self, all_pending: Iterable[PendingAnswer]) -> None:
        """End lookups. What was not written is not kept."""
        with self._lock:
            for pending in all_pending:
                if self._at.get(_slot_start(pending.key)) is not pending:
                    self._unlink(pending)

    def discard(self, prefix_hash: bytes) -> None:
        """Void all answers about a chunk, also of lookups under way: something has changed."""
        if prefix_hash not in self._by_chunk:  # as of nearly all that is saved
            return
        with self._lock:
            for pending in self._by_chunk.get(prefix_hash, ()):
                pending.is_void = True
                at = _slot_start(pending.key)
                if self._at.get(at) is pending:
                    self._view[at : at + _HEAD.size] = bytes(_HEAD.size)
                    del self._at[at]
                    self._unlink(pending)

    def find(self, key: bytes, now: float) -> tuple[int, int] | None:
        """Return checksum and length of a block's text, or None without a valid answer."""
        if self._vouched[0] <= 1000 * now:
            return None
        at = _slot_start(key)
        copy = bytes(self._view[at : at + TEXT_AT])
        found, begins_s, ends_s, nbytes, checksum = _HEAD.unpack_from(copy)
        # A begin in the future means that the clock was set back meanwhile.
        if found != key or not begins_s <= now < ends_s:
            return None
        (check,) = _CHECK.unpack_from(copy, _HEAD.size)
        if check != xxh3_64_intdigest(copy[: _HEAD.size]) or nbytes > TEXT_BYTES_MAX:
            return None
        return checksum, nbytes

    def read(self, key: bytes, found: tuple[int, int]) -> bytes | None:
        """Return the text of a block that was ``found``, or None if it was replaced since."""
        checksum, nbytes = found
        at = _slot_start(key) + TEXT_AT
        text = bytes(self._view[at : at + nbytes])
        return text if xxh3_64_intdigest(text) == checksum else None

    def close(self) -> None:
        """Close the descriptor. Idempotent. The memory stays while another thread may read it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _unlink(self, pending: PendingAnswer) -> None:
        """Forget a pending answer's chunks. The lock must be held. A chunk of other answers is not
        absent for a moment: ``discard`` looks for it without the lock."""
        for one in pending.hashes:
            others = self._by_chunk.get(one, ())
            if left := tuple(other for other in others if other is not pending):
                self._by_chunk[one] = left
            else:
                self._by_chunk.pop(one, None)


def _slot_start(key: bytes) -> int:
    return PAGE + int.from_bytes(key[:4], "little") % _SLOTS * _SLOT_BYTES
