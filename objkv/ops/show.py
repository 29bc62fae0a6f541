"""Inspects the payloads of one chunk: their headers, and whether every byte is correct."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from objkv.codec.header import HEADER_BYTES_MAX, read_header
from objkv.codec.payload import check_frames, frame_pages
from objkv.codec.seal import Seal
from objkv.codec.values import ENCRYPTED, Header
from objkv.errors import ConfigError, PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import ReadStore

BEGINNING_CHARS_MIN = 4
_BEGINNING = re.compile(rf"[0-9a-f]{{{BEGINNING_CHARS_MIN},40}}")
_MATCHES_MAX = 1_000
_CHOICES = 5

Verdict = Literal["ok", "corrupt", "missing"]


@dataclass(frozen=True, slots=True)
class FrameReport:
    """The result of checking one layer's frame."""

    layer: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    nbytes: int
    raw_bytes: int
    problem: str | None
    """None if its checksum is correct."""


@dataclass(frozen=True, slots=True)
class PayloadReport:
    """The result of checking one payload. Values from its header are None if it is unreadable."""

    key: str
    verdict: Verdict
    problem: str | None
    nbytes: int | None
    group: int
    shard: str
    parent_hash: bytes | None = None
    token_start: int | None = None
    token_end: int | None = None
    codec: str | None = None
    ratio: float | None = None
    """Stored bytes of the frames divided by raw bytes, without the header."""
    header_bytes: int | None = None
    header_checksum: str | None = None
    token_digest: str | None = None
    tokens_stored: bool | None = None
    """Whether the payload contains the token ids, which reveal the prompt."""
    writer: str | None = None
    created_s: int | None = None
    frames: tuple[FrameReport, ...] = ()
    signed_by: str | None = None
    """Id of the key that signed the payload, according to its header; None if it is not signed."""
    encrypted_by: str | None = None
    seal_verified: bool | None = None
    """Whether the seal was verified with the keys. Without keys, only damage is found. None if the
    payload is not sealed."""


def find_payloads(
    bulk: ReadStore, namespaces: Iterable[str], beginning: str
) -> dict[tuple[str, bytes], list[ChunkKey]]:
    """Return the payloads of chunks whose hash starts with ``beginning``. The result is by
    namespace and prefix hash. Lists at most 1,000 entries per namespace. Raises ``ConfigError``
    unless ``beginning`` is 4 to 40 hex digits."""
    if _BEGINNING.fullmatch(beginning) is None:
        raise ConfigError(
            f"{beginning!r} is not the hash of a chunk; give its 40 hex digits or at least the "
            f"first {BEGINNING_CHARS_MIN}"
        )
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


def choose_chunk(found: Collection[tuple[str, bytes]], beginning: str) -> tuple[str, bytes] | None:
    """Return the one chunk of ``found``, by namespace and prefix hash; None if there is none.
    Raises ``ConfigError`` with the choices if several start with ``beginning``."""
    if len(found) > 1:
        choices = ", ".join(digest.hex() for _, digest in sorted(found)[:_CHOICES])
        raise ConfigError(f"{len(found)} chunks start with {beginning}; give one of {choices}")
    return next(iter(found), None)


def inspect_payload(bulk: ReadStore, key: ChunkKey, seal: Seal | None = None) -> PayloadReport:
    """Verify its header, claim, frames, and its seal if given. Reads what the header states."""
    path = key.path()
    found = bulk.head(path)
    payload = None if found is None else bulk.get(path, 0, HEADER_BYTES_MAX)
    if found is None or payload is None:
        return _report(key, None, "missing", "it is not in the bulk store")
    try:
        header = read_header(payload, seal=seal)
    except PayloadError as exc:
        return _report(key, found.nbytes, "corrupt", f"header: {exc}")
    if found.nbytes > len(payload):
        payload = bulk.get(path, 0, header.nbytes) or b""
    frames = tuple(_frame(header, number, payload) for number in range(len(header.frames)))
    problem = next((frame.problem for frame in frames if frame.problem), None)
    if not header.nbytes == len(payload) == found.nbytes:
        problem = f"{found.nbytes} bytes, but the header states {header.nbytes}"
    if header.claim.key != key:
        problem = f"claims to be {header.claim.key.path()}"
    provenance, marks = header.provenance, header.marks
    return PayloadReport(
        key=key.path(),
        verdict="corrupt" if problem else "ok",
        problem=problem,
        nbytes=found.nbytes,
        group=key.group,
        shard=str(key.shard or ""),
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
        seal_verified=header.is_sealed if marks.signed_by else None,
        frames=frames,
    )


def _report(key: ChunkKey, nbytes: int | None, verdict: Verdict, problem: str) -> PayloadReport:
    return PayloadReport(key.path(), verdict, problem, nbytes, key.group, str(key.shard or ""))


def _frame(header: Header, number: int, payload: bytes) -> FrameReport:
    frame = header.frames[number]
    problem = None
    try:
        if frame.codec.endswith(ENCRYPTED) and not header.is_sealed:
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
