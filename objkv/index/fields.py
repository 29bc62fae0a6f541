"""The encoding of one shard record in Redis and SQLite: a short line, in exactly one form. Any
other is read as absent, because compare-and-delete compares the written bytes."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from itertools import compress
from typing import Final

import xxhash

from objkv.index.base import Record, Savings, ShardRecord, ShardRecords

_NUMBER = "(?:0|[1-9][0-9]{0,17}+)"
_PARTS = (_NUMBER, _NUMBER, "[01]", "[0-9a-z:]{0,32}+", _NUMBER, "[01]")
SHARD_PATTERN = " ".join(_PARTS).encode("ascii")
"""Matches the output of ``encode_shard``. Has no groups and matches no line end."""
SHARD_BYTES_MAX: Final = 93
"""Limit of an encoded shard. That of a real payload has at most 55 bytes: Redis stores a record
compactly only while no value has more than 64."""
_VALUE = re.compile(" ".join(f"({part})" for part in _PARTS).encode("ascii"))


def encode_shard(shard: ShardRecord) -> bytes:
    """Return ``<nbytes> <raw_bytes> <is_plain> <header_checksum> <created_s> <hot>`` in ASCII, the
    booleans 0 or 1, the checksum of digits, lower-case letters and colons."""
    text = (
        f"{shard.nbytes} {shard.raw_bytes} {int(shard.is_plain)} {shard.header_checksum} "
        f"{shard.created_s} {int(shard.hot)}"
    )
    value = text.encode("ascii")
    assert _VALUE.fullmatch(value), text
    return value


def decode_shard(value: bytes) -> ShardRecord | None:
    """Return the encoded shard record; None for what ``encode_shard`` never writes."""
    match = _VALUE.fullmatch(value)
    if match is None:
        return None
    nbytes, raw_bytes, is_plain, checksum, created_s, hot = match.groups()
    return ShardRecord(
        nbytes=int(nbytes),
        raw_bytes=int(raw_bytes),
        is_plain=is_plain == b"1",
        hot=hot == b"1",
        header_checksum=checksum.decode("ascii"),
        created_s=int(created_s),
    )


class WrittenShards(Mapping[str, ShardRecord]):
    """Encoded shards, decoded together on first access: a reader finds more than it loads."""

    __slots__ = ("_decoded", "_fields", "_values")

    def __init__(self, fields: tuple[str, ...], values: Sequence[bytes]) -> None:
        """``values``: of each of ``fields`` a match of ``SHARD_PATTERN`` or nothing; one
        matches."""
        self._fields = fields
        self._values = values
        self._decoded: dict[str, ShardRecord] | None = None

    def __getitem__(self, field: str) -> ShardRecord:
        return self._shards()[field]

    def __iter__(self) -> Iterator[str]:
        return compress(self._fields, self._values)  # decodes nothing

    def __contains__(self, field: object) -> bool:
        return field in self._fields and bool(self._values[self._fields.index(field)])

    def values(self) -> ValuesView[ShardRecord]:
        """All shard records, decoded together; the inherited view gets them one by one."""
        return self._shards().values()

    def __len__(self) -> int:
        return len(self._values) - self._values.count(b"")

    def are_hot(self) -> bool:
        """Whether all of them have copies in the hot store. Decodes nothing."""
        return all(value.endswith(b" 1") for value in self._values if value)

    def written(self, fields: Sequence[str]) -> bytes:
        """Return the encoded shards of ``fields``, divided by line ends; an absent one is empty."""
        if self._fields == fields:
            return b"\n".join(self._values)
        known = dict(zip(self._fields, self._values, strict=True))
        return b"\n".join([known.get(field, b"") for field in fields])

    def _shards(self) -> dict[str, ShardRecord]:
        if self._decoded is None:  # two threads may both decode: the result is the same
            pairs = zip(self._fields, self._values, strict=True)
            self._decoded = {
                field: shard for field, value in pairs if (shard := decode_shard(value))
            }
        return self._decoded


def are_hot(shards: ShardRecords) -> bool:
    """Whether all of these shards have copies in the hot store."""
    if isinstance(shards, WrittenShards):
        return shards.are_hot()
    return all(one.hot for one in shards.values())


def written_rows(found: Iterable[ShardRecords | None], fields: tuple[str, ...]) -> list[bytes]:
    """Return for each chunk what ``WrittenShards.written`` does."""
    absent = b"\n" * (len(fields) - 1)
    # The first branches take no call: a microsecond a chunk would be most of a lookup.
    return [
        absent
        if shards is None
        else (
            shards.written(fields)
            if shards.__class__ is WrittenShards
            else b"\n".join([encode_shard(s) if (s := shards.get(n)) else b"" for n in fields])
        )
        for shards in found
    ]


def shards_of(record: Record | None, fields: Sequence[str]) -> ShardRecords | None:
    """Return what ``ReadIndex.find`` returns of a record."""
    if record is None:
        return None
    return {name: record.shards[name] for name in fields if name in record.shards} or None


def sighting_name(name: str) -> str:
    """Return 32 hex digits. Names that shared them would only have a payload saved too early."""
    return xxhash.xxh3_128_hexdigest(name.encode("utf-8"))


SAVINGS_NUMBERS = ("loads", "tokens", "timed_tokens", "compute_gpu_us", "load_gpu_us")
_SAVINGS = re.compile(rf"([^:]+):([0-9]{{4}}-[0-9]{{2}}):({'|'.join(SAVINGS_NUMBERS)})")


def savings_fields(savings: Savings) -> dict[str, int]:
    """Return the numbers that are not 0 by field, ``<namespace>:<month>:<number>``."""
    numbers = {name: getattr(savings, name) for name in SAVINGS_NUMBERS}
    start = f"{savings.namespace}:{savings.month}"
    return {f"{start}:{name}": value for name, value in numbers.items() if value}


def read_savings(numbers: Mapping[str, int]) -> list[Savings]:
    """Return the savings in fields of ``savings_fields``, sorted, and ignore all others."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for field, value in numbers.items():
        match = _SAVINGS.fullmatch(field)
        if match is not None and value >= 0:
            found.setdefault((match[1], match[2]), {})[match[3]] = value
    return [
        Savings(namespace, month, *(of.get(name, 0) for name in SAVINGS_NUMBERS))
        for (namespace, month), of in sorted(found.items())
    ]
