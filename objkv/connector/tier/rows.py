"""Converts rows of vLLM's memory to payloads and back. Payloads are verified before the copy.

A row contains one chunk's bytes of all ranks and layers, in vLLM's own order. It is the single
frame of a payload, which is named by vLLM's key.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from threading import local
from time import time

import numpy as np

from objkv.cache.chunks import ChunkCache, SaveOutcome
from objkv.cache.codec_choice import CodecChooser
from objkv.codec.payload import (
    LAYER_BYTES_MAX,
    Claim,
    Header,
    LayerSpec,
    Provenance,
    encode_in_place,
    frame_pages,
    header_room,
    open_payload,
    payload_bytes_max,
)
from objkv.errors import ConfigError, PayloadError, ValueTooLong
from objkv.index.base import ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.keys.topology import Shard
from objkv.telemetry import Recorder

WHOLE = Shard(0, 1, 0, 1)
"""The shard of every row. A row has the whole chunk, not one rank's part."""

_GROUP_BYTES = 4
_NO_PARENT = bytes(PREFIX_HASH_BYTES)
_NO_TOKENS = "0" * 64
_SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32"}


class RowOutcome(Enum):
    """The outcome of one row."""

    STORED = auto()
    LEFT = auto()
    """Not saved: another saver has it or has just saved it, or the quota is used up."""
    LOADED = auto()
    GONE = auto()
    """The payload is missing or corrupt. Its record was removed."""
    UNWANTED = auto()
    """Its job ended in the meantime."""


Copy = Callable[[np.ndarray], bool]
"""Copies a row from or to ``[row_bytes]`` uint8, which it does not keep. False if the job has ended
and nothing was copied."""


@dataclass(frozen=True, slots=True)
class RowForm:
    """The form of every row of this engine."""

    layers: tuple[LayerSpec, ...]
    tokens: int
    """Tokens per chunk."""

    @classmethod
    def of(cls, row_bytes: int, kv_dtype: str, tokens: int) -> "RowForm":
        """Make the form. Raises ``ConfigError`` if a row is too large for a payload's frame."""
        if row_bytes > LAYER_BYTES_MAX:
            raise ConfigError(
                f"a chunk has {row_bytes} bytes, but objkv stores at most {LAYER_BYTES_MAX} in one "
                "payload: lower block_size or blocks_per_chunk"
            )
        dtype = _SAFETENSORS.get(kv_dtype, "U8")
        layer = LayerSpec("row", dtype, (1, 1, 1, 1))
        if row_bytes % layer.item_bytes:
            dtype, layer = "U8", LayerSpec("row", "U8", (1, 1, 1, 1))
        shape = (1, 1, 1, row_bytes // layer.item_bytes)
        return cls((LayerSpec("row", dtype, shape),), tokens)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.layers[0].nbytes


def chunk_key(namespace: str, key: bytes) -> ChunkKey:
    """Return objkv's key for vLLM's ``OffloadKey``, which is a block hash and a 4-byte group."""
    block_hash, group = key[:-_GROUP_BYTES], key[-_GROUP_BYTES:]
    digest = hashlib.sha256(block_hash).digest()[:PREFIX_HASH_BYTES]
    return ChunkKey(namespace, digest, int.from_bytes(group, "big"), WHOLE)


class Rows:
    """Saves and loads single rows. Thread-safe: each thread has its own buffers. Raises
    ``StoreError`` and ``PayloadError``."""

    def __init__(
        self, cache: ChunkCache, form: RowForm, recorder: Recorder, *, codec: str, writer: str
    ) -> None:
        """
        Args:
            codec: a codec of the payload format, or ``auto``, which depends on the measured link.
            writer: the name of this process in payloads.
        """
        self._cache = cache
        self._form = form
        self._recorder = recorder
        self._codec = codec
        self._writer = writer
        self._chooser = None
        if codec == "auto":
            self._chooser = CodecChooser(lambda: cache.link.bytes_per_s)
        self._buffers = local()

    def save(self, namespace: str, key: bytes, copy: Copy) -> RowOutcome:
        """Store the row that ``copy`` reads. Returns STORED, LEFT or UNWANTED."""
        claim = self._claim(namespace, key)
        if not self._cache.has_room():
            self._recorder.count("tier_save_over_quota")
            return RowOutcome.LEFT
        if not self._cache.begin_save(claim.key):
            self._recorder.count("tier_save_repeats")
            return RowOutcome.LEFT
        try:
            buffer = self._buffer("payload", payload_bytes_max(self._form.layers))
            room = header_room(self._form.layers)
            pages = buffer[room : room + self._form.row_bytes]
            if not copy(pages):
                return RowOutcome.UNWANTED
            if not self._cache.take_lease(claim.key):
                self._recorder.count("tier_save_leased_elsewhere")
                return RowOutcome.LEFT
            try:
                payload, header = self._encode(claim, buffer.data, pages.data)
                outcome = self._cache.save(claim, payload, header)
            finally:
                self._cache.release_lease(claim.key)
        finally:
            self._cache.end_save(claim.key)
        self._count_saved(outcome, header)
        return RowOutcome.STORED

    def load(self, namespace: str, key: bytes, record: ShardRecord, copy: Copy) -> RowOutcome:
        """Pass the verified row to ``copy``. Returns LOADED, GONE or UNWANTED."""
        claim = self._claim(namespace, key)
        buffer = self._buffer("payload", payload_bytes_max(self._form.layers)).data
        try:
            nbytes = self._cache.get_into(claim.key, buffer, hot=record.hot)
            if nbytes is None:
                self._recorder.count("tier_load_ghosts")
                self._reject(claim, record, corrupt=False)
                return RowOutcome.GONE
            header = open_payload(buffer[:nbytes], claim, self._form.layers, seal=self._cache.seal)
            scratch = self._scratch(header)
            pages = frame_pages(header, 0, buffer[:nbytes], scratch)
        except (PayloadError, ValueTooLong):
            self._recorder.count("tier_load_corrupt")
            self._reject(claim, record, corrupt=True)
            return RowOutcome.GONE
        if not copy(np.frombuffer(pages, np.uint8)):
            return RowOutcome.UNWANTED
        self._recorder.count("tier_loads")
        self._recorder.count("tier_load_bytes", nbytes)
        return RowOutcome.LOADED

    def _claim(self, namespace: str, key: bytes) -> Claim:
        # vLLM's key has neither the chunk's parent nor its position. Its hash depends on both.
        return Claim(chunk_key(namespace, key), _NO_PARENT, 0, self._form.tokens)

    def _encode(
        self, claim: Claim, buffer: memoryview, pages: memoryview
    ) -> tuple[memoryview, Header]:
        codec = self._codec
        if self._chooser is not None:
            codec = self._chooser.choose(claim.key.group, self._form.layers, pages)
        provenance = Provenance(_NO_TOKENS, self._writer, int(time()))
        return encode_in_place(
            claim,
            self._form.layers,
            buffer,
            codec=codec,
            provenance=provenance,
            seal=self._cache.seal,
        )

    def _reject(self, claim: Claim, record: ShardRecord, *, corrupt: bool) -> None:
        self._cache.reject(claim.key, {claim.key.field: record}, corrupt=corrupt)

    def _count_saved(self, outcome: SaveOutcome, header: Header) -> None:
        if outcome is SaveOutcome.SAVED:
            self._recorder.count("tier_saves")
            self._recorder.count("tier_save_bytes", header.nbytes)
        else:
            self._recorder.count("tier_save_existed")

    def _scratch(self, header: Header) -> memoryview | None:
        if header.codec == "none":
            return None
        return self._buffer("scratch", self._form.row_bytes).data

    def _buffer(self, name: str, nbytes: int) -> np.ndarray:
        """Return this thread's buffer. A new one each time would cost as much as the transfer."""
        buffer: np.ndarray | None = getattr(self._buffers, name, None)
        if buffer is None:
            buffer = np.empty(nbytes, np.uint8)
            setattr(self._buffers, name, buffer)
        return buffer
