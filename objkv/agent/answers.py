"""Answers to lookups, in blocks of chunks. Agent and client remember whole blocks.

A prefix hash depends on all chunks before it, so prompts that begin alike have equal blocks from
the start on. The agent numbers the blocks that it remembers. A client that has read a block gets
only its number, so a repeated lookup costs nothing per chunk.

A block has for each chunk its records as ``encode_shard`` writes them, in the order of the fields,
divided by line ends; an absent one is empty. Line ends divide chunks as well.
"""

import struct
import time
from collections.abc import Callable, Sequence
from itertools import chain, count
from threading import Lock
from typing import Final, NamedTuple

from objkv.agent.messages import MESSAGE_BYTES_MAX, MessageKind, ProtocolError, kind_of
from objkv.index.base import Shards
from objkv.index.fields import WrittenShards, written_rows
from objkv.index.near import NearIndex
from objkv.keys.prefix import PREFIX_HASH_BYTES

BLOCK: Final = 16
"""Chunks per block. The last block of an answer may have fewer."""
SENT_MAX: Final = 512
"""Blocks that a client remembers: about 3 MB."""
_BLOCK_BYTES = BLOCK * PREFIX_HASH_BYTES
_KEPT_BYTES = 8 << 20
_ROW_BYTES = 100
"""What the agent keeps for a record, about."""
_HEAD = struct.Struct("<BBH")
_numbers = count(1)


class AnswerBlock(NamedTuple):
    """One block of an answer."""

    text: bytes
    number: int = 0
    """Names its text as long as the agent runs. 0: it is not remembered."""
    ends_s: float = 0.0
    """When its first record ends."""
    discards: int = 0
    """``NearIndex.discards`` before its records were read."""


class AnswerBlocks:
    """Finds chunks in ``near``, and remembers blocks as long as all their records are kept there.
    Thread-safe."""

    def __init__(
        self,
        near: NearIndex,
        namespace: str,
        fields: tuple[str, ...],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``near`` keeps records of these fields, by the same clock."""
        self.near = near
        self._namespace, self._fields, self._clock = namespace, fields, clock
        self._lock = Lock()
        self._kept: dict[bytes, AnswerBlock] = {}
        self._max = max(1, _KEPT_BYTES // (BLOCK * _ROW_BYTES * max(1, len(fields))))

    def __len__(self) -> int:
        return len(self._kept)

    def find(
        self, hashes: bytes, find: Callable[[Sequence[bytes]], Sequence[Shards | None]]
    ) -> list[AnswerBlock]:
        """Return the blocks of the answer for these prefix hashes. ``find`` looks up those that are
        not remembered, in one call."""
        keys = [hashes[at : at + _BLOCK_BYTES] for at in range(0, len(hashes), _BLOCK_BYTES)]
        now, discards = self._clock(), self.near.discards
        ends_max = now + self.near.ttl_s
        blocks: list[AnswerBlock | None] = list(map(self._kept.get, keys))
        unknown: list[int] = []
        for number, one in enumerate(blocks):
            # An end beyond the maximum means that the clock was set back meanwhile.
            if one is None or one.discards != discards or not now < one.ends_s <= ends_max:
                unknown.append(number)
        if unknown:
            asked = [_divided(keys[number]) for number in unknown]
            found = iter(find(list(chain.from_iterable(asked))))
            for number, part in zip(unknown, asked, strict=True):
                shards = [next(found) for _ in part]
                if not any(one is None for one in shards):
                    self._keep(keys[number], part, discards)
                blocks[number] = AnswerBlock(b"\n".join(written_rows(shards, self._fields)))
        return [one for one in blocks if one is not None]

    def _keep(self, key: bytes, hashes: Sequence[bytes], discards: int) -> None:
        kept = self.near.kept(self._namespace, hashes)
        if kept is None:
            return
        shards, ends_s = kept
        text = b"\n".join(written_rows(shards, self._fields))
        with self._lock:
            last = self._kept.pop(key, None)
            while len(self._kept) >= self._max:
                del self._kept[next(iter(self._kept))]
            number = last.number if last and last.text == text else next(_numbers)
            self._kept[key] = AnswerBlock(text, number, ends_s, discards)


def _divided(hashes: bytes) -> list[bytes]:
    step = PREFIX_HASH_BYTES
    return [hashes[at : at + step] for at in range(0, len(hashes), step)]


class SentBlocks:
    """The blocks that one client remembers, as its agent knows. For one thread."""

    def __init__(self) -> None:
        self._sent: set[int] = set()

    def pack(self, blocks: Sequence[AnswerBlock]) -> bytes | None:
        """Return the answer, or None if it would be too long."""
        numbers = [one.number for one in blocks]
        # After this answer the client may have to remember all of its blocks besides the others.
        forget = len(self._sent) + len(numbers) > SENT_MAX
        sent: set[int] = set() if forget else self._sent
        fresh: set[int] = set()
        texts = []
        for text, number, _, _ in blocks:
            if number not in sent and number not in fresh:
                texts.append(text)
                if number:
                    fresh.add(number)
        head = struct.pack(
            f"<BBH{len(numbers)}Q", MessageKind.FOUND, forget, len(numbers), *numbers
        )
        message = head + b";".join(texts)
        if len(message) > MESSAGE_BYTES_MAX:
            return None
        sent |= fresh
        self._sent = sent
        return message


class FoundBlocks:
    """The client's side of ``SentBlocks``. For one thread at a time.

    Records are decoded when they are read, and not again while their block is remembered.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Shards | None, ...]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def read(self, message: bytes, count: int, fields: tuple[str, ...]) -> list[Shards | None]:
        """Read the answer for ``count`` chunks, in the order in which answers came. Raises
        ``ProtocolError``."""
        if kind_of(message) is not MessageKind.FOUND:
            raise ProtocolError(f"{kind_of(message).name} instead of FOUND")
        try:
            _, forget, number = _HEAD.unpack_from(message)
            numbers = struct.unpack_from(f"<{number}Q", message, _HEAD.size)
        except struct.error as exc:
            raise ProtocolError(f"an invalid answer: {exc}") from exc
        if forget:
            self._known.clear()
        at = _HEAD.size + 8 * len(numbers)
        texts = iter(message[at:].split(b";") if len(message) > at else ())
        found: list[Shards | None] = []
        for number in numbers:
            block = self._known.get(number)
            if block is None:
                block = _read(next(texts, b""), min(BLOCK, count - len(found)), fields)
                if number:
                    self._known[number] = block
            found += block
        if len(found) != count or next(texts, None) is not None or len(self._known) > SENT_MAX:
            raise ProtocolError(f"{len(found)} records for {count} chunks")
        return found


def _read(text: bytes, count: int, fields: tuple[str, ...]) -> tuple[Shards | None, ...]:
    texts = text.split(b"\n")
    if count <= 0 or len(texts) != count * len(fields):
        raise ProtocolError(f"{len(texts)} records for {count} chunks")
    rows = zip(*[iter(texts)] * len(fields), strict=True)
    return tuple([WrittenShards(fields, row) if any(row) else None for row in rows])
