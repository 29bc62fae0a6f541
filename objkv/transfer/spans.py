"""Spans: the pieces in which a payload is fetched, so that the first layers of all chunks can come
before the last layers of any. Pure.

The first span is asked for before anything is known of the payload but its layers; where the others
lie is read from the header that it brings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from objkv.codec.payload import Header, LayerSpec, payload_bytes_max


@dataclass(frozen=True, slots=True)
class FetchSpan:
    """Frames ``[first, end)`` of one payload, and the bytes in which they lie."""

    number: int
    """0 is the one that begins with the payload's first byte."""
    first: int
    end: int
    start: int
    """Of the payload's bytes."""
    nbytes: int
    last: bool
    """Whether nothing may come behind it."""

    def __post_init__(self) -> None:
        assert 0 <= self.first <= self.end
        assert self.start >= 0
        assert self.nbytes >= 0


def span_count(nbytes: int, layers: int, *, spans_max: int, span_bytes_min: int) -> int:
    """In how many spans to fetch a payload of about ``nbytes``: each costs a request."""
    return max(1, min(spans_max, layers, nbytes // span_bytes_min))


def opening_bytes(layers: Sequence[LayerSpec], count: int, *, tokens: int) -> int:
    """What the first of ``count`` spans has to bring: as many bytes as the header and the first
    equal share of the layers take at most, in any codec."""
    share = -(-len(layers) // count)
    rest = sum(layer.nbytes for layer in layers[share:])
    return payload_bytes_max(layers, tokens=tokens) - rest


def remaining(header: Header, first: int, count: int) -> list[FetchSpan]:
    """At most ``count`` spans, at least one, of equal numbers of frames from ``first`` on.

    The last one proves the payload's end, even if no frames are left for it.
    """
    left = len(header.frames) - first
    pieces = max(1, min(count, left))
    cuts = [first + left * i // pieces for i in range(pieces + 1)]
    offsets = [*header.frames.starts, header.nbytes]
    return [
        FetchSpan(i + 1, a, b, offsets[a], offsets[b] - offsets[a], last=i + 1 == pieces)
        for i, (a, b) in enumerate(pairwise(cuts))
    ]
