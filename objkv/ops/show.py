"""One chunk taken apart: what its payloads say of themselves, and whether every byte is true."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from objkv.codec.payload import (
    HEADER_BYTES_MAX,
    Header,
    check_frames,
    frame_pages,
    read_header,
)
from objkv.codec.seal import Seal
from objkv.codec.values import ENCRYPTED
from objkv.errors import PayloadError
from objkv.index.base import ReadIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard
from objkv.stores.base import ReadStore

BEGINNING_CHARS_MIN = 4
_BEGINNING = re.compile(rf"[0-9a-f]{{{BEGINNING_CHARS_MIN},40}}")
_MATCHES_MAX = 1_000

Verdict = Literal["ok", "corrupt", "missing"]


@dataclass(frozen=True, slots=True)
class FrameReport:
    """One layer's frame, checked."""

    layer: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    nbytes: int
    raw_bytes: int
    problem: str | None
    """None if its checksum holds."""


@dataclass(frozen=True, slots=True)
class PayloadReport:
    """One payload, checked. What its header says is None where that cannot be read."""

    key: str
    verdict: Verdict
    problem: str | None
    """What is wrong first, if anything."""
    nbytes: int | None
    group: int
    shard: str
    parent_hash: bytes | None = None
    token_start: int | None = None
    token_end: int | None = None
    codec: str | None = None
    ratio: float | None = None
    """Stored bytes of the frames over raw bytes; the header does not count."""
    header_bytes: int | None = None
    header_checksum: str | None = None
    token_digest: str | None = None
    tokens_stored: bool | None = None
    """Whether the payload carries the token ids themselves, which are the prompt."""
    writer: str | None = None
    created_s: int | None = None
    frames: tuple[FrameReport, ...] = ()
    signed_by: str | None = None
    """Id of the key that the payload says it was signed with; None if it is not."""
    encrypted_by: str | None = None
    seal_verified: bool | None = None
    """Whether it was looked at with the keys; without them only damage is found. None if there is
    no seal."""


def is_beginning(text: str) -> bool:
    """Whether ``text`` can be the beginning of a prefix hash, 4 to 40 hex digits."""
    return _BEGINNING.fullmatch(text) is not None


def find_payloads(
    bulk: ReadStore, namespaces: Iterable[str], beginning: str
) -> dict[tuple[str, bytes], list[ChunkKey]]:
    """The payloads, by namespace and prefix hash, of chunks whose hash begins so.

    Looks at no more than 1,000 entries of each namespace.
    """
    assert is_beginning(beginning)
    found: dict[tuple[str, bytes], list[ChunkKey]] = {}
    for namespace in namespaces:
        entries = bulk.scan(f"{namespace}/{beginning[:2]}/{beginning}")
        for entry in islice(entries, _MATCHES_MAX):
            try:
                key = ChunkKey.parse(entry.key)
            except ValueError:
                continue
            found.setdefault((key.namespace, key.prefix_hash), []).append(key)
    return found


def promised_payloads(index: ReadIndex, namespace: str, prefix_hash: bytes) -> list[ChunkKey]:
    """The payloads that the index has a record of; some may be ghosts."""
    [record] = index.lookup(namespace, [prefix_hash])
    keys = []
    for field in record.shards if record else ():
        group, _, shard = field.partition(".")
        try:
            keys.append(ChunkKey(namespace, prefix_hash, int(group), Shard.parse(shard)))
        except ValueError:
            continue
    return keys


def inspect_payload(bulk: ReadStore, key: ChunkKey, seal: Seal | None = None) -> PayloadReport:
    """Get the payload, no more of it than its header says, and verify its header, its claim and
    every frame; with ``seal`` also who made it."""
    path = key.path()
    found = bulk.head(path)
    payload = None if found is None else bulk.get_range(path, 0, HEADER_BYTES_MAX)
    if found is None or payload is None:
        return _report(key, None, "missing", "the bulk store does not have it")
    try:
        header = read_header(payload, seal=seal)
    except PayloadError as exc:
        return _report(key, found.nbytes, "corrupt", f"header: {exc}")
    if found.nbytes > len(payload):
        payload = bulk.get_range(path, 0, header.nbytes) or b""
    frames = tuple(_frame(header, number, payload) for number in range(len(header.frames)))
    problem = next((frame.problem for frame in frames if frame.problem), None)
    if not header.nbytes == len(payload) == found.nbytes:
        problem = f"{found.nbytes} bytes where the header says {header.nbytes}"
    if header.claim.key != key:
        problem = f"claims to be {header.claim.key.path()}"
    provenance, marks = header.provenance, header.marks
    return PayloadReport(
        key=key.path(),
        verdict="corrupt" if problem else "ok",
        problem=problem,
        nbytes=found.nbytes,
        group=key.group,
        shard=str(key.shard),
        parent_hash=header.claim.parent_hash,
        token_start=header.claim.token_start,
        token_end=header.claim.token_end,
        codec=header.codec,
        ratio=round((header.nbytes - header.data_start) / header.raw_bytes, 4),
        header_bytes=header.data_start,
        header_checksum=header.checksum,
        token_digest=provenance.token_digest,
        tokens_stored=provenance.tokens is not None,
        writer=provenance.writer,
        created_s=provenance.created_s,
        signed_by=marks.signed_by or None,
        encrypted_by=marks.encrypted_by or None,
        seal_verified=header.opened is not None if marks.signed_by else None,
        frames=frames,
    )


def _report(key: ChunkKey, nbytes: int | None, verdict: Verdict, problem: str) -> PayloadReport:
    return PayloadReport(key.path(), verdict, problem, nbytes, key.group, str(key.shard))


def _frame(header: Header, number: int, payload: bytes) -> FrameReport:
    frame = header.frames[number]
    problem = None
    try:
        if frame.codec.endswith(ENCRYPTED) and header.opened is None:
            check_frames(header, payload[: frame.offset + frame.nbytes], number)
        else:
            scratch = None if frame.codec == "none" else memoryview(bytearray(frame.layer.nbytes))
            frame_pages(header, number, payload, scratch)
    except PayloadError as exc:
        problem = str(exc)
    return FrameReport(
        layer=frame.layer.name,
        dtype=frame.layer.dtype,
        shape=frame.layer.shape,
        codec=frame.codec,
        nbytes=frame.nbytes,
        raw_bytes=frame.layer.nbytes,
        problem=problem,
    )
