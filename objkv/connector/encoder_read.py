"""Reads one stored encoder output: what comes out is verified to the last byte, or nothing does."""

import logging
from collections.abc import Callable
from enum import Enum
from time import monotonic

import numpy as np

from objkv.cache.tiered import ChunkCache
from objkv.codec.payload import (
    LayerSpec,
    frame_pages,
    open_payload,
    payload_bytes_max,
    read_header,
)
from objkv.connector.encoder_metadata import Output, Pages
from objkv.errors import PayloadError, ValueTooLong
from objkv.index.base import ShardRecord, Shards
from objkv.keys.chunk import ChunkKey
from objkv.keys.encoder import ENCODER_FIELD
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)


class State(Enum):
    """What is known of one output."""

    WAITING = "waiting"
    HELD = "held"
    """In memory, verified."""
    ABSENT = "absent"
    """Not stored, or nobody knows: to be encoded and saved."""
    UNREAD = "unread"
    """Stored, but not brought in: to be encoded."""
    CORRUPT = "corrupt"
    """To be encoded, and saved over what is stored."""


class OutputReader:
    """Safe from many threads. Raises ``StoreError`` and nothing else."""

    def __init__(
        self,
        cache: ChunkCache,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._cache = cache
        self._recorder = recorder
        self._clock = clock

    def bytes_needed(self, output: Output, shards: Shards) -> int:
        """Memory that ``read`` takes: the payload, and what it is decoded into if that is known."""
        record, layer = shards[ENCODER_FIELD], output.layer
        decoded = 0 if record.codec == "none" else layer.nbytes
        return max(_room(record, layer), layer.nbytes) + decoded

    def read(self, output: Output, shards: Shards) -> tuple[State, Pages | None]:
        """Get the payload that ``shards`` promise, and verify length, claim, dtype, shape and
        checksums. Of what is gone or wrong the record is forgotten."""
        key = output.claim.key
        try:
            return self._read(output, shards)
        except (PayloadError, ValueTooLong) as exc:
            logger.warning("encoder output refused, encoding it reason=%s", exc)
            self._recorder.count("load_corrupt")
            self._cache.reject(key, shards, corrupt=True)
            return State.CORRUPT, None

    def _read(self, output: Output, shards: Shards) -> tuple[State, Pages | None]:
        record, claim, layer = shards[ENCODER_FIELD], output.claim, output.layer
        payload = np.empty(_room(record, layer), dtype=np.uint8)
        started = self._clock()
        got = self._get(claim.key, payload.data, record)
        if got is None:
            self._recorder.count("load_ghosts")
            self._cache.reject(claim.key, shards, corrupt=False)
            return State.ABSENT, None
        seconds = self._clock() - started
        found = read_header(payload.data[:got], seal=self._cache.seal)
        if found.claim == claim and found.frames.layers != (layer,):
            # Another width or dtype, whole and of the right name: what is wrong may be what this
            # replica expects, so it is not held against the payload.
            self._recorder.count("load_refused")
            return State.UNREAD, None
        header = open_payload(payload.data[:got], claim, (layer,), seal=self._cache.seal)
        scratch = None
        if header.frames.codecs[0] != "none":
            scratch = np.empty(layer.nbytes, dtype=np.uint8).data
        pages = np.frombuffer(frame_pages(header, 0, payload.data[:got], scratch), dtype=np.uint8)
        self._recorder.count("loads")
        self._recorder.count("load_bytes", got)
        self._recorder.observe("load_seconds", seconds)
        self._cache.note_load(claim, header, hot=record.hot, seconds=seconds)
        return State.HELD, pages

    def _get(self, key: ChunkKey, buffer: memoryview, record: ShardRecord) -> int | None:
        """The payload; of one that is longer than this output's can be, its beginning."""
        if record.nbytes > len(buffer):
            return self._cache.get_range_into(key, 0, buffer, hot=record.hot)
        return self._cache.get_into(key, buffer, hot=record.hot)


def _room(record: ShardRecord, layer: LayerSpec) -> int:
    return min(record.nbytes, payload_bytes_max((layer,)))
