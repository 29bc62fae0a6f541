"""Rows of vLLM's memory as payloads, by the node's agent. Payloads are verified before the copy.

A row contains one chunk's bytes of all ranks and layers, in vLLM's own order. It is the single
frame of a payload, which is named by vLLM's key.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from objkv.agent.messages import PayloadRequest
from objkv.agent.payloads import ReadOutcome, WriteOutcome
from objkv.codec.payload import LAYER_BYTES_MAX, Claim, LayerSpec
from objkv.connector.tier.jobs import JobChunk
from objkv.errors import ConfigError, TransferError
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.keys.topology import Shard
from objkv.telemetry import Recorder

WHOLE = Shard(0, 1, 0, 1)
"""The shard of every row. A row has the whole chunk, not one rank's part."""
_GROUP_BYTES = 4
_NO_PARENT = bytes(PREFIX_HASH_BYTES)
_SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32"}
_LOADS = {
    ReadOutcome.READ: "tier_loads",
    ReadOutcome.MISSING: "tier_load_ghosts",
    ReadOutcome.CORRUPT: "tier_load_corrupt",
    ReadOutcome.OTHER_FORM: "tier_load_corrupt",
    ReadOutcome.REFUSED: "tier_load_refused",
    ReadOutcome.LATE: "tier_load_deadlines",
    ReadOutcome.FAILED: "tier_load_errors",
}
_SAVES = {
    WriteOutcome.ACCEPTED: "tier_saves",
    WriteOutcome.KEPT: "tier_saves",
    WriteOutcome.EXISTED: "tier_save_existed",
    WriteOutcome.REPEATED: "tier_save_repeats",
    WriteOutcome.OVER_QUOTA: "tier_save_over_quota",
    WriteOutcome.SHED: "tier_saves_shed",
    WriteOutcome.LATE: "tier_save_deadlines",
    WriteOutcome.FAILED: "tier_save_errors",
}
_STORED = frozenset((WriteOutcome.ACCEPTED, WriteOutcome.EXISTED))
_SETTLED = _STORED | {WriteOutcome.KEPT, WriteOutcome.REPEATED, WriteOutcome.OVER_QUOTA}
"""Outcomes with which a job does not fail."""


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
        if row_bytes % LayerSpec("row", dtype, (1, 1, 1, 1)).item_bytes:
            dtype = "U8"
        items = row_bytes // LayerSpec("row", dtype, (1, 1, 1, 1)).item_bytes
        return cls((LayerSpec("row", dtype, (1, 1, 1, items)),), tokens)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.layers[0].nbytes

    def claim(self, namespace: str, key: bytes) -> Claim:
        """Return the claim of a row's payload."""
        # vLLM's key has neither the chunk's parent nor its position. Its hash depends on both.
        return Claim(chunk_key(namespace, key), _NO_PARENT, 0, self.tokens)


def chunk_key(namespace: str, key: bytes) -> ChunkKey:
    """Return objkv's key for vLLM's ``OffloadKey``, which is a block hash and a 4-byte group."""
    block_hash, group = key[:-_GROUP_BYTES], key[-_GROUP_BYTES:]
    digest = hashlib.sha256(block_hash).digest()[:PREFIX_HASH_BYTES]
    return ChunkKey(namespace, digest, int.from_bytes(group, "big"), WHOLE)


@dataclass(frozen=True, slots=True)
class RowMemory:
    """vLLM's memory. No view of it may outlive a copy, otherwise it cannot be unmapped."""

    form: RowForm
    memory: memoryview
    """``[rows * row_bytes]`` uint8."""

    def copy_to(self, row: int, pages: memoryview) -> None:
        """Write a row."""
        np.copyto(self._view(row), np.frombuffer(pages, np.uint8))

    def copy_from(self, row: int, pages: memoryview) -> None:
        """Read a row into ``pages``."""
        np.copyto(np.frombuffer(pages, np.uint8), self._view(row))

    def _view(self, row: int) -> np.ndarray:
        size = self.form.row_bytes
        return np.frombuffer(self.memory, np.uint8, size, row * size)


class RowLoad(JobChunk):
    """A row to load: a ``PayloadRead``."""

    def __init__(
        self, chunk: JobChunk, wanted: PayloadRequest, memory: RowMemory, recorder: Recorder
    ) -> None:
        super().__init__(*chunk.parts)
        self.wanted, self.layers = wanted, memory.form.layers
        self._memory, self._recorder, self._is_copied = memory, recorder, False

    def take(self, pages: Sequence[memoryview]) -> None:
        """See ``PayloadRead``."""
        with self.touch() as allowed:
            if allowed:
                self._memory.copy_to(self.row, pages[0])
                self._is_copied = True

    def end(self, outcome: ReadOutcome) -> None:
        """See ``PayloadRead``. Notes payloads that were missing or corrupt."""
        if self.is_needed and outcome in _LOADS:
            self._recorder.count(_LOADS[outcome])
        if self._is_copied:
            self._recorder.count("tier_load_bytes", self.wanted.record.nbytes)
        is_gone = outcome in (ReadOutcome.MISSING, ReadOutcome.CORRUPT)
        self.settle(done=self._is_copied, noted=is_gone)


class RowSave(JobChunk):
    """A row to save: a ``PayloadWrite``."""

    token_digest = "0" * 64

    def __init__(
        self, chunk: JobChunk, claim: Claim, memory: RowMemory, recorder: Recorder
    ) -> None:
        super().__init__(*chunk.parts)
        self.claim, self.layers = claim, memory.form.layers
        self._memory, self._recorder = memory, recorder

    def write(self, pages: memoryview) -> None:
        """See ``PayloadWrite``."""
        with self.touch() as allowed:
            if not allowed:
                raise TransferError("a job ended while it was saved")
            self._memory.copy_from(self.row, pages)

    def end(self, outcome: WriteOutcome, nbytes: int) -> None:
        """See ``PayloadWrite``. Notes payloads that the agent saves."""
        if self.is_needed and outcome in _SAVES:
            self._recorder.count(_SAVES[outcome])
        self._recorder.count("tier_save_bytes", nbytes)
        self.settle(done=outcome in _SETTLED, noted=outcome in _STORED)
