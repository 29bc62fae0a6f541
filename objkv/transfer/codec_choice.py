"""Which codec makes later loads shortest, chosen chunk by chunk from what was measured here.

A load is modelled as a pipeline of two stages: while one layer is decoded the next is on the wire.
Per raw byte the wire needs ``1 / (ratio * link)`` seconds and the decoder ``decode``; the slower
stage sets the pace, and the other one shows for a single layer::

    seconds = max(wire, decode) + min(wire, decode) / layers        without codec: 1 / link

``link`` is what one call gets of those under way at once, and ``decode`` is one core's: several
loads at once have several of both. A codec must win by 10 %, or nothing is compressed.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from threading import Lock
from time import perf_counter
from typing import Final

import numpy as np

from objkv.codec.compress import GAIN_MIN, compress, decompress_into
from objkv.codec.payload import LayerSpec

logger = logging.getLogger(__name__)

CANDIDATES: Final = ("blosc", "blosclz4")
SAMPLE_EVERY: Final = 32
"""Chunks from one sample to the next."""
SAMPLE_BYTES_MAX: Final = 1 << 20
"""How many bytes of a layer's pages a sample takes at most."""
SHARE_MAX: Final = 0.02
"""Share of the time that saving takes which sampling may cost; a candidate's first is free."""
_SAMPLES = 5
"""Kept per candidate; their median counts, so that one pause of the machine does not."""
_LINK_MAX = 8e9
"""Bytes/s beyond which no codec decodes: nothing is sampled at all."""


@dataclass(frozen=True, slots=True)
class _Sample:
    ratio: float
    decode_s: float
    """Per raw byte."""


def load_seconds(link: float, ratio: float, decode_s: float, layers: int) -> float:
    """Seconds per raw byte that a load takes, as modelled above.

    ``link`` in bytes/s, ``decode_s`` in seconds per raw byte, 0 without codec.
    """
    wire = 1 / (ratio * link)
    return max(wire, decode_s) + min(wire, decode_s) / layers


class CodecChooser:
    """Safe from many threads, none of which waits for another."""

    def __init__(
        self, link: Callable[[], float | None], *, clock: Callable[[], float] = perf_counter
    ) -> None:
        """``link``: bytes/s of the way to the bulk store, None while unknown."""
        self._link = link
        self._clock = clock
        self._lock = Lock()
        self._samples: dict[tuple[int, str], deque[_Sample]] = {}
        self._chunks: dict[int, int] = {}
        self._saving_s = 0.0
        self._sampling_s = 0.0
        self._sampler = Lock()
        self._scratch = np.zeros(0, dtype=np.uint8)

    def choose(self, group: int, layers: Sequence[LayerSpec], pages: memoryview) -> str:
        """The codec for one chunk.

        Args:
            group: KV cache groups are measured apart, because their data differ.
            pages: the raw bytes of all layers, one after the other; only read, and only now.
        """
        link = self._link()
        with self._lock:
            number = self._chunks.get(group, 0)
            self._chunks[group] = number + 1
        if link is None or link >= _LINK_MAX:
            return "none"
        for codec in self._due(group, number):
            self._sample(group, codec, _piece(layers, pages, number))
        return self._best(group, link, len(layers))

    def saved(self, seconds: float) -> None:
        """A save took so long, encoding included: what the cost of sampling is held against."""
        with self._lock:
            self._saving_s += seconds

    def _due(self, group: int, number: int) -> list[str]:
        """Candidates to measure with this chunk: those never measured, else one in turn."""
        with self._lock:
            if unknown := [c for c in CANDIDATES if (group, c) not in self._samples]:
                return unknown
            if number % SAMPLE_EVERY or self._sampling_s > SHARE_MAX * self._saving_s:
                return []
            return [CANDIDATES[number // SAMPLE_EVERY % len(CANDIDATES)]]

    def _sample(self, group: int, codec: str, piece: tuple[memoryview, int]) -> None:
        if not self._sampler.acquire(blocking=False):
            return
        try:
            started = self._clock()
            try:
                sample = self._measure(codec, *piece)
            except Exception:  # e.g. a library that does not load here: saved without it
                logger.exception("codec cannot be used here codec=%s", codec)
                sample = _Sample(1.0, 0.0)
            with self._lock:
                self._sampling_s += self._clock() - started
                kept = self._samples.setdefault((group, codec), deque(maxlen=_SAMPLES))
                kept.append(sample)
        finally:
            self._sampler.release()

    def _measure(self, codec: str, pages: memoryview, item_bytes: int) -> _Sample:
        used, frame = compress(codec, pages, item_bytes)
        if used == "none":
            return _Sample(1.0, 0.0)
        if self._scratch.nbytes < pages.nbytes:
            self._scratch = np.zeros(pages.nbytes, dtype=np.uint8)
            self._scratch.fill(1)  # the first touch of fresh memory costs more than decoding
        started = self._clock()
        decompress_into(codec, memoryview(frame), self._scratch.data[: pages.nbytes])
        return _Sample(pages.nbytes / len(frame), (self._clock() - started) / pages.nbytes)

    def _best(self, group: int, link: float, layers: int) -> str:
        best, least = "none", (1 - GAIN_MIN) / link
        with self._lock:
            known = {c: list(self._samples.get((group, c), ())) for c in CANDIDATES}
        for codec, samples in known.items():
            if not samples:
                continue
            ratio = median(sample.ratio for sample in samples)
            decode_s = median(sample.decode_s for sample in samples)
            seconds = load_seconds(link, ratio, decode_s, layers)
            if ratio > 1 and seconds <= least:
                best, least = codec, seconds
        return best


def _piece(layers: Sequence[LayerSpec], pages: memoryview, number: int) -> tuple[memoryview, int]:
    """A part of one layer, another layer each time, and the size of its elements."""
    index = (len(layers) // 2 + number // SAMPLE_EVERY) % len(layers)
    start = sum(layer.nbytes for layer in layers[:index])
    nbytes = min(layers[index].nbytes, SAMPLE_BYTES_MAX)
    return pages[start : start + nbytes], layers[index].item_bytes
