"""Codecs: encode the pages of one layer as the bytes of one frame, and decode them into a given
buffer.

All functions are thread-safe and release the GIL while they compute. Warning: the first use of
``blosc`` or ``blosclz4`` calls ``blosc2.set_releasegil(True)``, which affects the whole process.
blosc2's global thread count stays unchanged; every call here uses one thread.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Final

import lz4.block

from objkv.errors import PayloadError

Buffer = bytes | bytearray | memoryview

CODECS: Final = ("none", "lz4", "blosc", "blosclz4")
GAIN_MIN: Final = 0.10
"""A codec that saves less than this share of a frame is not worth decoding."""

PRIVATE_NAMES: Final = {"lz4.block": ("_block",)}
"""The binding's extension module, with the library in it. Without it lz4 copies each frame."""
_BLOSC_HEADER_BYTES = 32
_BLOSC_VERSION_MAX = 5
_BLOSC_BLOCK_BYTES_MAX = 16 << 20
"""The decoder's buffers are a few blocks long. objkv's encoder uses blocks of at most 4 MiB."""
_BLOSC_RUNS_MAX = 3
"""Zeros, NaNs, or one value; the next kind would leave the buffer unchanged."""


@dataclass(frozen=True, slots=True)
class _Shuffled:
    """A configuration of blosc2: shuffled bytes and a compressor."""

    name: str
    """Spelled as in blosc2."""
    level: int
    block_bytes_max: int
    """Maximum size of the blocks of a frame; blosc2 chooses if it is 0."""
    flag: int
    """The compressor in the chunk's flags."""
    number: int
    """The compressor in the chunk's own byte."""


# Chosen by measurements with normally distributed BF16. Bitshuffle before lz4 makes frames 5 %
# smaller, but takes 50 % longer to decode, and lz4 is chosen for its speed. Zstandard decodes a
# third faster from blocks of 1 MiB than from blosc2's own choice (2-core x86, blosc2 4.14,
# 2026-11).
_SHUFFLED = {
    "blosc": _Shuffled("ZSTD", level=1, block_bytes_max=1 << 20, flag=4, number=5),
    "blosclz4": _Shuffled("LZ4", level=9, block_bytes_max=0, flag=1, number=1),
}


def compress(codec: str, pages: memoryview, item_bytes: int) -> tuple[str, Buffer]:
    """Return the frame of ``pages`` and its actual codec: ``codec``, or ``none`` if that saves less
    than ``GAIN_MIN``. In that case the frame is ``pages`` itself, not a copy. ``item_bytes``: of an
    element, for shuffling. Raises KeyError for an unknown codec."""
    if codec == "none":
        return "none", pages
    frame: bytes
    if codec == "lz4":
        frame = lz4.block.compress(pages, store_size=False)
    else:
        frame = _compress_blosc(_SHUFFLED[codec], pages, item_bytes)
    if len(frame) > pages.nbytes * (1 - GAIN_MIN):
        return "none", pages
    return codec, frame


def decompress_into(codec: str, frame: memoryview, out: memoryview) -> None:
    """Decode ``frame`` to exactly fill ``out``. Never allocates memory by a length from inside
    ``frame``. Raises ``PayloadError`` for a frame that is corrupt or decodes to another length, and
    for an unknown codec; the content of ``out`` is then undefined."""
    if codec == "lz4":
        _decompress_lz4(frame, out)
    elif codec in _SHUFFLED:
        _check_blosc_header(_SHUFFLED[codec], frame, out.nbytes)
        try:
            _blosc2().decompress2(frame, out, nthreads=1)
        except (ValueError, RuntimeError) as exc:
            raise PayloadError(f"blosc: {exc}") from exc
    else:
        raise PayloadError(f"unknown codec {codec!r}")


def _decompress_lz4(frame: memoryview, out: memoryview) -> None:
    import numpy as np  # imported late: commands that only print do not need it

    # numpy also gives addresses of read-only buffers; both arrays live until the call returns.
    source, target = np.frombuffer(frame, np.uint8), np.frombuffer(out, np.uint8)
    if (decode := _lz4_decoder()) is not None:
        done = decode(source.ctypes.data, target.ctypes.data, len(frame), out.nbytes)
        if done < 0:
            raise PayloadError("lz4: the frame is corrupt, or longer than the layer")
    else:  # the binding cannot decode into a buffer; it allocates as much memory as ``out`` has
        try:
            pages = lz4.block.decompress(frame, uncompressed_size=out.nbytes)
        except (lz4.block.LZ4BlockError, ValueError) as exc:
            raise PayloadError(f"lz4: {exc}") from exc
        done = len(pages)
        target[:done] = np.frombuffer(pages, np.uint8)
    if done != out.nbytes:
        raise PayloadError(f"lz4: the frame decodes to {done} bytes, the layer has {out.nbytes}")


@cache
def _lz4_decoder() -> Callable[[int, int, int, int], int] | None:
    """Return ``LZ4_decompress_safe`` from the library inside the binding, to call it without the
    GIL. None if the binding hides it. It neither reads nor writes past the two given lengths."""
    try:
        library = ctypes.CDLL(lz4.block._block.__file__)
        decode = library.LZ4_decompress_safe
    except (AttributeError, OSError, TypeError):
        return None
    decode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    decode.restype = ctypes.c_int
    return decode


def _compress_blosc(way: _Shuffled, pages: memoryview, item_bytes: int) -> bytes:
    blosc2 = _blosc2()
    frame: bytes = blosc2.compress2(
        pages,
        codec=blosc2.Codec[way.name],
        clevel=way.level,
        filters=[blosc2.Filter.SHUFFLE],
        filters_meta=[0],
        typesize=item_bytes,
        blocksize=min(way.block_bytes_max, pages.nbytes),
        nthreads=1,
    )
    return frame


def _check_blosc_header(way: _Shuffled, frame: memoryview, nbytes: int) -> None:
    """Refuse every chunk that objkv's encoder would not write: blosc2 writes as many bytes as the
    chunk's own header claims, whatever the buffer's length, and loads plugins for unknown filters
    and codecs."""
    if len(frame) < _BLOSC_HEADER_BYTES:
        raise PayloadError(f"blosc: the frame has only {len(frame)} bytes")
    header = bytes(frame[:_BLOSC_HEADER_BYTES])
    known = (
        header[0] <= _BLOSC_VERSION_MAX
        and header[2] & 0b101 == 0b101  # the long header
        and header[2] >> 5 == way.flag
        and set(header[16:22]) <= {0, 1}  # no filter except shuffle
        and header[22] == way.number
        and header[30] == 0
        and header[31] & 0x0F == 0  # no dictionary, not lazy
        and header[31] >> 4 <= _BLOSC_RUNS_MAX
    )
    if not known:
        raise PayloadError(f"blosc: the frame is not a chunk of shuffled {way.name.lower()}")
    if int.from_bytes(header[12:16], "little") != len(frame):
        raise PayloadError("blosc: the frame's length differs from the chunk's")
    if int.from_bytes(header[4:8], "little") != nbytes:
        raise PayloadError("blosc: the chunk's decoded length differs from the layer's")
    block_bytes = int.from_bytes(header[8:12], "little")
    if not 0 < block_bytes <= min(nbytes, _BLOSC_BLOCK_BYTES_MAX):
        raise PayloadError(f"blosc: a block length of {block_bytes} bytes is invalid")


@cache
def _blosc2() -> ModuleType:
    # Imported late: it takes 0.4 s, and most processes never read a compressed payload.
    import blosc2

    blosc2.set_releasegil(True)
    return blosc2  # type: ignore[no-any-return]
