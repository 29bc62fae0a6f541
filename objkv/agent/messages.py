"""The messages between the agent and its clients, as bytes. This module specifies them.

Each is one datagram of a ``SOCK_SEQPACKET`` socket, at most ``MESSAGE_BYTES_MAX`` long: its kind in
one byte, fixed fields, then lists whose length follows from the message's. Numbers are
little-endian. Reading raises ``ProtocolError`` for anything that this module would not write.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

from objkv.agent.memory.answers import FIELDS_MAX
from objkv.agent.memory.arena import CELLS, CellState
from objkv.codec.join import PartPosition
from objkv.codec.values import Claim
from objkv.errors import ObjkvError, TransferError
from objkv.index.base import ShardRecord, ShardRecords
from objkv.index.fields import SHARD_BYTES_MAX, WrittenShards
from objkv.keys.chunk import ChunkKey, parse_field
from objkv.keys.identity import SEALS
from objkv.keys.prefix import PREFIX_HASH_BYTES

VERSION: Final = 9
MESSAGE_BYTES_MAX: Final = 65_536
OPEN_MAX: Final = 256
"""Payloads in one ``open``."""
DEADLINE_MS_MAX: Final = 0xFFFF_FFFF
PREFETCH_S_MAX: Final = 600
"""The longest deadline of a prefetch."""
HELD_BACK_MARK: Final = "unsaved:"
"""Begins the checksum in the record of a payload that only this node has, and in no index's."""
MALFORMED: Final = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RecursionError, TypeError, ValueError),
)
"""What reading JSON that another process wrote may raise."""
_NAMESPACE_CHARS = 32
_FIND_RECORDS = MESSAGE_BYTES_MAX // (SHARD_BYTES_MAX + 1)


class ProtocolError(TransferError):
    """The other side sent an invalid message."""


class MessageKind(IntEnum):
    """The first byte of each message."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    OPEN = 4
    OPENED = 5
    RELEASE = 6
    FIND = 7
    FOUND = 8
    FAILED = 9
    REJECT = 10
    COMMIT = 11
    COMMITTED = 12
    CALL = 13
    RESULT = 14
    DROP = 15


class CommitStatus(IntEnum):
    """The outcome for a payload in an outbox. Its memory may change in any case."""

    ACCEPTED = 1
    """The agent has a copy, and saves it."""
    REPEATED = 2
    """It is being saved, or was just saved, by this agent."""
    NO_ROOM = 3
    OVER_QUOTA = 4
    SHED = 5
    """The store has just refused a save."""
    REFUSED = 6
    """It is not a valid payload."""
    HELD_BACK = 7
    """The agent has a copy, and saves it if it is seen a second time."""
    PART = 8
    """The agent has a copy, and waits for the parts of other ranks."""
    DROPPED = 9
    """It will not be whole: another rank has dropped its part, or it came too late."""


class MissReason(IntEnum):
    """Why a payload cannot be read from the arena."""

    NONE = 0
    MISSING = 1
    """Indexed, but not stored."""
    CORRUPT = 2
    """Stored, but not what its record or its key promises."""
    NO_ROOM = 3
    """Every byte that could be freed is leased, or the client holds too much."""
    LATE = 4
    STORE = 5
    """The store failed."""
    CLOSED = 6
    """The agent is ending."""


class Urgency(IntEnum):
    """Which fetches go first."""

    IN_STEP = 0
    """A forward pass waits."""
    BETWEEN_STEPS = 1
    PREFETCH = 2


@dataclass(frozen=True, slots=True)
class PrefetchOrder:
    """When and how much to prefetch."""

    deadline_s: float
    priority: int = 0
    """Among prefetches lower values go first. Loads of requests go before all of them."""
    bytes_max: int | None = None
    """Most bytes to fetch. None: what the agent allows."""
    puts: bool = False
    """Whether it is only for payloads that this node holds back, which are saved then."""

    def __post_init__(self) -> None:
        assert 0 < self.deadline_s <= PREFETCH_S_MAX
        assert type(self.priority) is int
        assert self.bytes_max is None or type(self.bytes_max) is int
        assert type(self.puts) is bool


def is_held_back(record: ShardRecord) -> bool:
    """Whether an agent made the record for a payload in its memory. A replica may keep it for a
    while, so the payload may have been saved, in another form, or evicted since."""
    return record.header_checksum.startswith(HELD_BACK_MARK)


class Hello(NamedTuple):
    """The first message of a client."""

    version: int
    wants_arena: bool
    """Whether the answer is to carry the arena and an eventfd."""
    has_outbox: bool = False
    """Whether the message carries an outbox."""
    replica: bytes = bytes(16)
    """Names the replica whose ranks join payloads."""
    seals: int = 0
    """How the client's payloads are sealed, see ``seals_mask``."""


def seals_mask(seals: Iterable[str]) -> int:
    """Return a number with a bit for each of ``SEALS``."""
    return sum(1 << SEALS.index(one) for one in seals)


class SavedPart(NamedTuple):
    """What a rank hands over of a payload that several ranks write."""

    number: int
    """The scheduler's number of the save. All parts of a payload have the same."""
    position: PartPosition


ClaimRow = tuple[bytes, bytes, int, int, int]
"""One of ``Claims``: prefix hash, parent's hash, start and end of the tokens, and which field."""
CLAIM_ROW: Final = (
    ("prefix_hash", f"V{PREFIX_HASH_BYTES}"),
    ("parent_hash", f"V{PREFIX_HASH_BYTES}"),
    ("token_start", "<u4"),
    ("token_end", "<u4"),
    ("field", "<u2"),
)
"""The same as a structured dtype of numpy, packed."""
_CLAIM = struct.Struct(f"<{PREFIX_HASH_BYTES}s{PREFIX_HASH_BYTES}sIIH")


@dataclass(frozen=True, slots=True)
class Claims:
    """Claims of payloads of one namespace, in columns: without an object for each of them."""

    namespace: str
    fields: tuple[str, ...]
    """The different ones, see ``ChunkKey.field``."""
    rows: bytes
    """A row of ``CLAIM_ROW`` for each payload."""

    @classmethod
    def of(cls, claims: Sequence[Claim]) -> "Claims":
        """Return the columns of claims of one namespace, at least one."""
        namespace, fields, rows = claims[0].key.namespace, dict[str, int](), []
        for claim in claims:
            key = claim.key
            assert key.namespace == namespace
            number = fields.setdefault(key.field, len(fields))
            tokens = claim.token_start, claim.token_end
            rows.append(_CLAIM.pack(key.prefix_hash, claim.parent_hash, *tokens, number))
        return cls(namespace, tuple(fields), b"".join(rows))

    def __len__(self) -> int:
        return len(self.rows) // _CLAIM.size

    def __iter__(self) -> Iterator[ClaimRow]:
        return _CLAIM.iter_unpack(self.rows)

    def claim(self, row: ClaimRow) -> Claim:
        """Return a row as an object."""
        prefix_hash, parent_hash, start, end, field = row
        key = ChunkKey.of(self.namespace, prefix_hash, self.fields[field])
        return Claim(key, parent_hash, start, end)


class OpenRequest(NamedTuple):
    """A request to read payloads."""

    urgency: Urgency
    deadline_ms: int
    wanted: Claims


class OpenAnswer(NamedTuple):
    """The answer to the opening of one payload."""

    state: int
    """A ``CellState``. If it is FAILED, there is no lease."""
    reason: int = MissReason.NONE
    layout: int = 0
    """Number of the layout if the state is READY, see ``KnownLayouts``. 0: not known."""
    lease: int = 0
    """Names the payload in RELEASE, on this connection. 0: none."""
    cell: int = 0
    """The payload's cell on the board, unless the state is READY already."""
    offset: int = 0
    """Position in the arena if the state is READY."""
    nbytes: int = 0


_HELLO = struct.Struct("<BH??16sB")
_COMMIT = struct.Struct("<QQBBQ4I2Q")
_NO_PART = (0,) * 7
_DROP = struct.Struct("<BQI")
_OPENING = struct.Struct(f"<BBI{_NAMESPACE_CHARS}sHH")
_OPENED = struct.Struct("<BBHIIQQ")
_FIND = struct.Struct(f"<B{_NAMESPACE_CHARS}sH")
_ANSWERS = frozenset(product(CellState, MissReason))


def kind_of(message: bytes) -> MessageKind:
    """Return the kind of a message."""
    try:
        return MessageKind(message[0])
    except (IndexError, ValueError):
        raise ProtocolError("a message of no known kind") from None


def pack_hello(hello: Hello) -> bytes:
    """Return the message."""
    return _HELLO.pack(MessageKind.HELLO, *hello)


def unpack_hello(message: bytes) -> Hello:
    """Read the message. The fields after the version may differ in other versions."""
    hello = Hello(*_HELLO.unpack_from(message.ljust(_HELLO.size, b"\0"))[1:])
    if hello.version == VERSION and len(message) != _HELLO.size:
        raise ProtocolError("a greeting of another length")
    return hello


def pack_text(kind: MessageKind, text: str) -> bytes:
    """Return a message that has only a text. Raises ``ProtocolError`` if it is too long."""
    return _bounded(bytes((kind,)) + text.encode())


def unpack_text(message: bytes) -> str:
    """Read its text."""
    return message[1:].decode(errors="replace")


def pack_open_request(opening: OpenRequest, kind: MessageKind = MessageKind.OPEN) -> bytes:
    """Return the message. At most ``OPEN_MAX`` payloads. ``kind``: REJECT if they are wrong."""
    urgency, deadline_ms, wanted = opening
    assert 0 < len(wanted) <= OPEN_MAX
    names = "\n".join(wanted.fields).encode()
    counts = len(wanted), len(names)
    head = _OPENING.pack(kind, urgency, deadline_ms, wanted.namespace.encode(), *counts)
    return _bounded(head + names + wanted.rows)


def unpack_open_request(message: bytes) -> OpenRequest:
    """Read an opening or a rejection."""
    try:
        _, urgency, deadline_ms, name, number, size = _OPENING.unpack_from(message)
        at = _OPENING.size + size
        fields = tuple(message[_OPENING.size : at].decode().split("\n"))
        if not 0 < number <= OPEN_MAX or len(message) != at + number * _CLAIM.size:
            raise ProtocolError(f"an opening of {number} payloads in {len(message)} bytes")
        for field in fields:
            parse_field(field)
        wanted = Claims(_namespace(name), fields, message[at:])
        for _, _, start, end, place in wanted:
            if start >= end or place >= len(fields):
                raise ProtocolError("an invalid range of tokens, or no such field")
        return OpenRequest(Urgency(urgency), deadline_ms, wanted)
    except (struct.error, ValueError) as exc:
        raise ProtocolError(f"an invalid opening: {exc}") from exc


def pack_opened(answers: Iterable[OpenAnswer]) -> bytes:
    """Return the message."""
    return bytes((MessageKind.OPENED,)) + b"".join([_OPENED.pack(*one) for one in answers])


def unpack_opened(message: bytes, count: int) -> list[OpenAnswer]:
    """Read the answer to an opening of ``count`` payloads, at least one."""
    _expect(message, MessageKind.OPENED)
    if len(message) != 1 + count * _OPENED.size:
        raise ProtocolError(f"{len(message)} bytes for {count} payloads")
    answers = list(map(OpenAnswer._make, _OPENED.iter_unpack(message[1:])))
    if not _ANSWERS.issuperset(map(itemgetter(0, 1), answers)):
        raise ProtocolError("an answer in an unknown state")
    if max(map(attrgetter("cell"), answers)) >= CELLS:
        raise ProtocolError("a cell that is not on the board")
    return answers


def pack_release(leases: Sequence[int]) -> bytes:
    """Return the message. At most ``RELEASE_MAX`` leases."""
    assert len(leases) <= RELEASE_MAX
    return struct.pack(f"<B{len(leases)}I", MessageKind.RELEASE, *leases)


RELEASE_MAX: Final = 8192


def unpack_release(message: bytes) -> tuple[int, ...]:
    """Read the leases that end."""
    count, rest = divmod(len(message) - 1, 4)
    if rest:
        raise ProtocolError("a release that ends within a number")
    return struct.unpack_from(f"<{count}I", message, 1)


class Commit(NamedTuple):
    """A payload, or a part of one, in an outbox."""

    offset: int
    nbytes: int
    puts: bool = False
    """Whether it is to be saved at once, and not held back."""
    part: SavedPart | None = None
    """None if it is a whole payload."""


def pack_commits(commits: Sequence[Commit]) -> bytes:
    """Return the message of at most ``COMMITS_MAX`` payloads."""
    entries = [bytes((MessageKind.COMMIT,))]
    for offset, nbytes, puts, part in commits:
        place = _NO_PART if part is None else (part.number, *part.position)
        entries.append(_COMMIT.pack(offset, nbytes, puts, part is not None, *place))
    return _bounded(b"".join(entries))


COMMITS_MAX: Final = 256


def unpack_commits(message: bytes) -> list[Commit]:
    """Read the message."""
    if not 0 < len(message) - 1 <= COMMITS_MAX * _COMMIT.size:
        raise ProtocolError("a commit of no payload, or of too many")
    try:
        commits = []
        for offset, nbytes, puts, has_part, *rest in _COMMIT.iter_unpack(message[1:]):
            if max(puts, has_part) > 1 or any(rest) > has_part:
                raise ProtocolError("a commit with an unknown flag, or without its part")
            part = SavedPart(rest[0], PartPosition(*rest[1:])) if has_part else None
            commits.append(Commit(offset, nbytes, bool(puts), part))
        return commits
    except struct.error as exc:
        raise ProtocolError("a commit that ends within a payload") from exc


class Drop(NamedTuple):
    """A part of a payload that a rank will not hand over."""

    number: int
    """See ``SavedPart``."""
    parts: int
    """How many parts the payload has."""
    path: str
    """The payload's."""


def pack_drop(drop: Drop) -> bytes:
    """Return the message."""
    return _bounded(_DROP.pack(MessageKind.DROP, *drop[:2]) + drop.path.encode())


def unpack_drop(message: bytes) -> Drop:
    """Read the message."""
    try:
        _, number, parts = _DROP.unpack_from(message)
        key = ChunkKey.parse(message[_DROP.size :].decode("ascii"))
        if key.shard is not None:  # a path of any length, and such a payload is never joined
            raise ProtocolError("a drop of a payload that is not whole")
        return Drop(number, parts, key.path())
    except (struct.error, ValueError) as exc:
        raise ProtocolError(f"an invalid drop: {exc}") from exc


def pack_committed(statuses: Iterable[CommitStatus]) -> bytes:
    """Return the answer."""
    return bytes((MessageKind.COMMITTED, *statuses))


def unpack_committed(message: bytes, count: int) -> list[CommitStatus]:
    """Read the answer for ``count`` payloads."""
    _expect(message, MessageKind.COMMITTED)
    if len(message) != 1 + count:
        raise ProtocolError(f"{len(message) - 1} answers for {count} payloads")
    try:
        return [CommitStatus(status) for status in message[1:]]
    except ValueError:
        raise ProtocolError("an answer in an unknown state") from None


def find_max(fields: int) -> int:
    """Return how many chunks one FIND may ask for."""
    return _FIND_RECORDS // fields if 0 < fields <= FIELDS_MAX else 0


def pack_find(namespace: str, hashes: Sequence[bytes], fields: Sequence[str]) -> bytes:
    """Return the message."""
    names = "\n".join(fields).encode()
    head = _FIND.pack(MessageKind.FIND, namespace.encode(), len(names))
    return _bounded(b"".join((head, names, *hashes)))


def unpack_find(message: bytes) -> tuple[str, bytes, tuple[str, ...]]:
    """Read namespace, prefix hashes one after the other, and fields."""
    try:
        _, name, size = _FIND.unpack_from(message)
        at = _FIND.size + size
        fields = tuple(message[_FIND.size : at].decode("ascii").split("\n"))
        hashes = message[at:]
    except (struct.error, ValueError) as exc:
        raise ProtocolError(f"an invalid question: {exc}") from exc
    if len(message) < at or len(hashes) % PREFIX_HASH_BYTES:
        raise ProtocolError("a question that ends within a hash")
    return _namespace(name), hashes, fields


def pack_found(texts: Sequence[bytes]) -> bytes:
    """Return the answer to FIND, with the text of each block."""
    return _bounded(bytes((MessageKind.FOUND,)) + b";".join(texts))


def unpack_found(message: bytes, count: int) -> list[bytes]:
    """Read the texts of ``count`` blocks."""
    _expect(message, MessageKind.FOUND)
    texts = message[1:].split(b";")
    if len(texts) != count:
        raise ProtocolError(f"{len(texts)} blocks instead of {count}")
    return texts


def read_block(text: bytes, count: int, fields: tuple[str, ...]) -> tuple[ShardRecords | None, ...]:
    """Read the records of a block of ``count`` chunks."""
    texts = text.split(b"\n")
    if len(texts) != count * len(fields):
        raise ProtocolError(f"{len(texts)} records for {count} chunks")
    rows = zip(*[iter(texts)] * len(fields), strict=True)
    return tuple([WrittenShards(fields, row) if any(row) else None for row in rows])


def pack_failure(error: ObjkvError) -> bytes:
    """Return the message that a call failed in the agent, with the error's class and text."""
    return pack_text(MessageKind.FAILED, f"{type(error).__name__}\n{error}"[:4096])


def _bounded(message: bytes) -> bytes:
    if len(message) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a message of {len(message)} bytes")
    return message


def _expect(message: bytes, kind: MessageKind) -> None:
    if message[:1] != bytes((kind,)):
        raise ProtocolError(f"{kind_of(message).name} instead of {kind.name}")


def _namespace(name: bytes) -> str:
    if name.translate(None, b"0123456789abcdef"):
        raise ProtocolError("an invalid namespace")
    return name.decode("ascii")
