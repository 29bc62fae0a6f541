"""Chooses, per chunk, the codec that makes later loads fastest, from measurements on this machine.

A load is a pipeline: while one layer is decoded, the next is on the wire. Per raw byte the wire
needs ``1 / (ratio * link)`` seconds and the decoder ``decode`` seconds. The slower stage sets the
pace, and the other adds its time for a single layer::

    seconds = max(wire, decode) + min(wire, decode) / layers        without codec: 1 / link

``link`` is the bandwidth that one of several concurrent calls gets, and ``decode`` is measured on
one core: concurrent loads have several of both. A codec must win by 10 %, or nothing is compressed.
"""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median
from threading import Lock
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np

from objkv.codec.compress import GAIN_MIN, compress, decompress_into
from objkv.codec.values import LayerSpec

logger = logging.getLogger(__name__)

CANDIDATES: Final = ("blosc", "blosclz4")
SAMPLE_EVERY: Final = 32
"""One chunk in this many is sampled."""
SAMPLE_BYTES_MAX: Final = 1 << 20
"""Most bytes of a layer's pages in one sample."""
SHARE_MAX: Final = 0.02
"""Of the time of saves, for sampling after the first sample of each candidate."""
_SAMPLES = 5
"""Kept per candidate. Their median counts, so that one pause of the machine has no effect."""
_KINDS_MAX = 256
_LINK_MAX = 8e9
"""Bytes/s. No codec decodes faster, so nothing is sampled at a faster link."""


class _Sample(NamedTuple):
    ratio: float
    decode_s: float
    """Decoding time per raw byte."""


@dataclass(slots=True)
class _DataKind:
    """The chunks whose data are alike."""

    chunks: int = 0
    samples: dict[str, deque[_Sample]] = field(default_factory=dict)
    """By codec."""


def load_seconds(link: float, ratio: float, decode_s: float, layers: int) -> float:
    """Return the seconds per raw byte of a load in the model above. ``link`` is in bytes/s,
    ``decode_s`` in seconds per raw byte."""
    wire = 1 / (ratio * link)
    return max(wire, decode_s) + min(wire, decode_s) / layers


class CodecChooser:
    """Chooses the codec for each chunk. Thread-safe. No thread waits for another."""

    def __init__(
        self, link: Callable[[], float | None], *, clock: Callable[[], float] = perf_counter
    ) -> None:
        """``link``: returns the bytes/s between here and the bulk store, None while unknown."""
        self._link = link
        self._clock = clock
        self._lock = Lock()
        self._kinds: dict[Hashable, _DataKind] = {}
        self._saving_s = 0.0
        self._sampling_s = 0.0
        self._sampler = Lock()
        self._scratch = np.zeros(0, dtype=np.uint8)

    def choose(self, kind: Hashable, layers: Sequence[LayerSpec], pages: memoryview) -> str:
        """Choose the codec for one chunk. ``kind``: namespace and KV cache group, which are
        measured separately. ``pages``: raw bytes of all layers, one after the other; not kept."""
        link = self._link()
        with self._lock:
            while len(self._kinds) >= _KINDS_MAX and kind not in self._kinds:
                del self._kinds[next(iter(self._kinds))]
            one = self._kinds.setdefault(kind, _DataKind())
            number, one.chunks = one.chunks, one.chunks + 1
        if link is None or link >= _LINK_MAX:
            return "none"
        for codec in self._due(one, number):
            self._sample(one, codec, _piece(layers, pages, number))
        return self._best(one, link, len(layers))

    def saved(self, seconds: float) -> None:
        """Record the time of a save and its encoding, which bounds that for sampling."""
        with self._lock:
            self._saving_s += seconds

    def _due(self, one: _DataKind, number: int) -> list[str]:
        """Return the codecs to measure with this chunk: those never measured, else one in turn."""
        with self._lock:
            if unknown := [codec for codec in CANDIDATES if codec not in one.samples]:
                return unknown
            if number % SAMPLE_EVERY or self._sampling_s > SHARE_MAX * self._saving_s:
                return []
            return [CANDIDATES[number // SAMPLE_EVERY % len(CANDIDATES)]]

    def _sample(self, one: _DataKind, codec: str, piece: tuple[memoryview, int]) -> None:
        if not self._sampler.acquire(blocking=False):
            return
        try:
            started = self._clock()
            try:
                sample = self._measure(codec, *piece)
            except Exception:  # such as a library that does not load here: save without the codec
                logger.exception("codec cannot be used here codec=%s", codec)
                sample = _Sample(1.0, 0.0)
            with self._lock:
                self._sampling_s += self._clock() - started
                one.samples.setdefault(codec, deque(maxlen=_SAMPLES)).append(sample)
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

    def _best(self, one: _DataKind, link: float, layers: int) -> str:
        best, least = "none", (1 - GAIN_MIN) / link
        with self._lock:
            known = {codec: list(samples) for codec, samples in sorted(one.samples.items())}
        for codec, samples in known.items():
            ratio = median(sample.ratio for sample in samples)
            decode_s = median(sample.decode_s for sample in samples)
            seconds = load_seconds(link, ratio, decode_s, layers)
            if ratio > 1 and seconds <= least:
                best, least = codec, seconds
        return best


def _piece(layers: Sequence[LayerSpec], pages: memoryview, number: int) -> tuple[memoryview, int]:
    """Return a part of one layer, a different layer each time, and its element size."""
    index = (len(layers) // 2 + number // SAMPLE_EVERY) % len(layers)
    start = sum(layer.nbytes for layer in layers[:index])
    nbytes = min(layers[index].nbytes, SAMPLE_BYTES_MAX)
    return pages[start : start + nbytes], layers[index].item_bytes
