"""Payloads that an attacker would make: every checksum is right, but the content is not.

Run as a program it reads all of them with little memory left, and prints each outcome.
"""

import ctypes
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from objkv.codec.compress import CODECS, compress
from objkv.codec.header import PARTS_MAX
from objkv.codec.payload import LayerSpec, frame_pages
from objkv.codec.values import digest
from objkv.errors import PayloadError
from tests.codec.payloads import CLAIM, PROVENANCE, join, reworked
from tests.support.payloads import open_payload

LAYER = LayerSpec("model.layers.0.attn", "BF16", (4, 8, 128, 256))
"""2 MiB, which the reader has room for."""
N = LAYER.nbytes
SPARE_BYTES = 160 << 20
"""Address space in addition to the reader's own."""
PEAK_BYTES_MAX = 64 << 20
"""Memory in addition that reading any of them may take: a few times the longest header."""
HEADER_JSON_BYTES = (4 << 20) - 4096

Document = dict[str, Any]


class Stored(NamedTuple):
    layer: LayerSpec
    codec: str
    content: bytes
    raw_checksum: str = "0" * 32


def document_of(frames: Sequence[Stored]) -> Document:
    """Return the JSON of a header that describes ``frames`` in the format's own way."""
    metadata = {
        "checksum": "0" * 32,
        "chunk": CLAIM.key.chunk_text,
        "format": "objkv/2",
        "shard": str(CLAIM.key.shard),
        "parent": CLAIM.parent_hash.hex(),
        "token_start": str(CLAIM.token_start),
        "token_end": str(CLAIM.token_end),
        "token_digest": PROVENANCE.token_digest,
        "writer": PROVENANCE.writer,
        "created_s": str(PROVENANCE.created_s),
    }
    document: Document = {"__metadata__": metadata}
    at = 0
    for number, (layer, codec, content, raw_checksum) in enumerate(frames):
        shape = "x".join(map(str, layer.shape))
        text = f"{codec} {layer.dtype} {shape} {digest(content)}"
        plain = codec == "none"
        metadata[f"frame.{number}"] = text if plain else f"{text} {raw_checksum}"
        document[layer.name] = {
            "dtype": layer.dtype if plain else "U8",
            "shape": list(layer.shape) if plain else [len(content)],
            "data_offsets": [at, at + len(content)],
        }
        at += len(content)
    return document


def payload_of(frames: Sequence[Stored]) -> bytes:
    """A payload of ``frames``, its header's checksum right."""
    return reworked(document_of(frames), b"".join(frame.content for frame in frames))


@cache
def _compressed(codec: str, nbytes: int) -> bytes:
    pages = np.arange(nbytes // 2, dtype=np.uint16).view(np.uint8).data
    return bytes(compress(codec, pages, 2)[1])


def _chunk(codec: str = "blosc", nbytes: int = N) -> bytearray:
    return bytearray(_compressed(codec, nbytes))


def _changed(codec: str, at: int, value: int, size: int = 4) -> bytes:
    frame = _chunk(codec)
    frame[at : at + size] = value.to_bytes(size, "little")
    return bytes(frame)


def _run(kind: int, nbytes: int = N) -> bytes:
    """A chunk of blosc2 that stands for one value again and again."""
    frame = _chunk()[:32]
    frame[31] = kind << 4
    frame[4:8] = nbytes.to_bytes(4, "little")
    frame[12:16] = (32).to_bytes(4, "little")
    return bytes(frame)


def bombs() -> Iterator[tuple[str, str, bytes]]:
    """(name, codec, frame): what decoding into 2 MiB must refuse."""
    for name, frame in {
        "longer than it should be": b"\x1f\0\x01\0" + b"\xff" * 200_000 + b"\0\0",
        "copies from before its beginning": b"\x10a\xff\xff\xff\xff\xff",
        "endless literals": b"\xf0" + b"\xff" * 100_000,
    }.items():
        yield f"lz4: {name}", "lz4", frame
    for codec in ("blosc", "blosclz4"):
        yield f"{codec}: announces 2 GiB", codec, _changed(codec, 4, 2**31 - 1)
        yield f"{codec}: blocks of 2 GiB", codec, _changed(codec, 8, 2**31 - 1)
        yield f"{codec}: blocks of one byte", codec, _changed(codec, 8, 1)
        yield f"{codec}: blocks of nothing", codec, _changed(codec, 8, 0)
        yield f"{codec}: elements of nothing", codec, _changed(codec, 3, 0, 1)
        for at, name in ((32, "first"), (36, "second")):
            for value in (0, 31, 2**31 - 1, 2**32 - 1):
                frame = _changed(codec, at, value)
                yield f"{codec}: the {name} block at {value}", codec, frame
    for name, frame in {
        "longer, and announced as such": bytes(_chunk(nbytes=2 * N)),
        "a run that leaves memory as it was": _run(4),
        "a run of nothing known": _run(7),
        "a run of a missing value": _run(3),
        "a run of 2 GiB of zeros": _run(1, nbytes=2**31 - 1),
    }.items():
        yield f"blosc: {name}", "blosc", frame


def _filled(start: str, part: Callable[[int], str], end: str, parts: int | None = None) -> bytes:
    """A header of so many parts, by default of so many as make it as long as is allowed."""
    unit = "".join(map(part, range(1000)))
    room = (HEADER_JSON_BYTES - len(start) - len(end)) // len(unit)
    count = room if parts is None else min(parts // 1000, room)
    return (start + (unit * count).removesuffix(",") + end).encode()


def headers() -> Iterator[tuple[str, bytes]]:
    """(name, JSON): what reading a header must refuse."""
    opening = '{"__metadata__":{"checksum":"' + "0" * 32 + f'","chunk":"{CLAIM.key.chunk_text}"'
    inside = opening + ',"format":"objkv/2",'
    beside = opening + "},"
    shapes: tuple[tuple[str, str, Callable[[int], str], str, int], ...] = (
        ("lists", beside + '"x":[', lambda _: "[],", "]}", 2),
        ("objects", beside + '"x":[', lambda _: '{"":0},', "]}", 2),
        ("numbers", beside + '"x":[', lambda n: f"1e{n % 300},", "]}", 1),
        ("integers", beside + '"x":[', lambda n: f"{n + 1000},", "]}", 1),
        ("texts", beside + '"x":[', lambda n: f'"{n:x}",', "]}", 1),
        ("names", inside, lambda n: f'"{n:x}":"",', "}}", 1),
        ("tensors", beside, lambda n: f'"{n:x}":{{}},', "}", 2),
        ("depth", beside + '"x":', lambda _: "[", "", 1),
    )
    for name, start, part, end, values in shapes:
        yield name, _filled(start, part, end)
        yield f"fewer {name}", _filled(start, part, end, PARTS_MAX // values)
    yield "digits", _filled(beside + '"x":', lambda _: "9", "}")
    yield "fractions", _filled(beside + '"x":0.', lambda _: "9", "}")
    yield "escapes", _filled(beside + '"', lambda _: "\\ud83d\\ude00", '":{}}')
    yield "surrogates", _filled(beside + '"', lambda _: "\\udc00", '":{}}')
    for name, text in {
        "writer": "x",
        "shard": "a",
        "frame.0": "9",
        "scales.0": "1",
        "created_s": "9",
        "tokens": "1000 ",
    }.items():
        document = document_of([Stored(LAYER, "none", bytes(N))])
        document["__metadata__"][name] = text * (3_900_000 // len(text)) + text.strip()
        yield f"much {name}", json.dumps(document, separators=(",", ":")).encode()


def claimed() -> Iterator[tuple[str, bytes]]:
    vast = LayerSpec("vast", "BF16", (1 << 11, 8, 128, 256))
    yield "a layer of 1 GiB", payload_of([Stored(vast, "blosc", _run(1, nbytes=1 << 30))])
    many = [LayerSpec(f"{number:x}", "BF16", vast.shape) for number in range(3_000)]
    yield "3 TiB of layers", payload_of([Stored(layer, "blosc", b"x" * 10) for layer in many])


def read(payload: bytes, scratch: memoryview) -> None:
    """Everything a loader does with a payload."""
    header = open_payload(payload, CLAIM, (LAYER,))
    frame_pages(header, 0, payload, scratch)


def _status(name: str) -> int:
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith(name)]
    return int(line.split()[1]) << 10


def _outcome(payload: bytes, scratch: memoryview) -> tuple[str, int]:
    ctypes.CDLL(None).malloc_trim(0)  # what others have freed must not serve this one
    with open("/proc/self/clear_refs", "w") as forget:
        forget.write("5")  # the peak begins here
    before = _status("VmHWM")
    try:
        read(payload, scratch)
    except PayloadError as exc:
        end = f"refused: {exc}"
    except BaseException as exc:
        end = repr(exc)
    else:
        end = "taken"
    return end, _status("VmHWM") - before


def _make(folder: Path) -> None:
    cases = {
        **{name: payload_of([Stored(LAYER, codec, frame)]) for name, codec, frame in bombs()},
        **{f"header: {name}": join(text) for name, text in headers()},
        **dict(claimed()),
    }
    for number, (name, payload) in enumerate(cases.items()):
        (folder / f"{number:03d} {name}").write_bytes(payload)


def _read_good_ones(scratch: memoryview) -> None:
    """Libraries that a codec loads stay loaded, and so does the memory they keep."""
    good = bytes(i // 64 % 256 for i in range(64 << 10)) * (N >> 16)
    for codec in CODECS:
        frame = bytes(compress(codec, memoryview(good), 2)[1])
        scratch[:] = bytes(N)
        read(payload_of([Stored(LAYER, codec, frame, digest(good))]), scratch)
        assert codec == "none" or scratch == good
    read(payload_of([Stored(LAYER, "blosc", _run(1), digest(bytes(N)))]), scratch)


def main() -> None:
    """Make all of them in the folder that is named, and read them; one line of JSON for each."""
    folder = Path(sys.argv[1])
    maker = os.fork()
    if not maker:  # a process of its own, so that its memory is not the reader's
        _make(folder)
        os._exit(0)
    assert os.waitpid(maker, 0)[1] == 0
    scratch = memoryview(bytearray(N))
    _read_good_ones(scratch)
    limit = _status("VmSize") + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for path in sorted(folder.iterdir()):
        outcome = _outcome(path.read_bytes(), scratch)
        path.unlink()
        sys.stdout.write(json.dumps([path.name, *outcome]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
