"""Compare encoding and decoding pages with copying them, and sealed payloads with unsealed ones."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import typer

from benchmarks.alone import run_command
from objkv.cli.bench import BenchOptions, Check, Plot, Quick, Rounds, run_works
from objkv.cli.command import Session
from objkv.codec.compress import CODECS, compress, decompress_into
from objkv.codec.header import digest
from objkv.codec.payload import encode_in_place, frame_pages, header_room, open_payload, read_header
from objkv.codec.seal import KEY_BYTES, Seal, SealKey
from objkv.errors import ConfigError, PayloadError
from objkv.ops.bench.harness import (
    BenchRow,
    BenchSetting,
    Compared,
    Section,
    Target,
    Work,
    interleave,
    make_slab,
)
from objkv.ops.bench.sample import PAYLOAD_1_MIB, PAYLOAD_32_MIB, Shape, kv_like, sample_claim

PLAIN = "not sealed"


def seal_rows(setting: BenchSetting, shape: Shape) -> Iterator[BenchRow]:
    """Payloads of ``shape`` in codec ``none``, made where their pages lie, and opened to the last
    byte: each way to seal beside none. Fewer where there is no library to encrypt with."""
    sides = {name: _Side(shape, seal) for name, seal in _seals().items()}
    for verb, work in (("make", _Side.make), ("open", _Side.open)):
        timings = interleave(
            {name: _timed(side, work) for name, side in sides.items()}, setting.rounds
        )
        for name in sides:
            if name != PLAIN:
                compared = Compared(timings, name, PLAIN, PLAIN)
                yield compared.throughput(f"{name}: {verb}", shape.raw_bytes)


def _seals() -> Mapping[str, Seal | None]:
    signing, encryption = (SealKey(name, "*", os.urandom(KEY_BYTES)) for name in ("s", "e"))
    seals: dict[str, Seal | None] = {PLAIN: None, "signed": Seal([signing])}
    try:
        seals["encrypted"] = Seal((), [encryption])
        seals["signed, encrypted"] = Seal([signing], [encryption])
    except ImportError:
        pass
    return seals


class _Side:
    """One way to seal, with memory of its own."""

    def __init__(self, shape: Shape, seal: Seal | None) -> None:
        self._claim, self._provenance = sample_claim(shape)
        self._layers = tuple(shape.specs())
        self._seal = seal
        room = header_room(self._layers)
        self._slab = make_slab(room + shape.raw_bytes)
        page = kv_like(shape.layer_bytes)
        for at in range(room, len(self._slab), shape.layer_bytes):
            self._slab[at : at + shape.layer_bytes] = page
        self._scratch = make_slab(shape.layer_bytes)
        self._payload = self._slab
        self.make()
        pages = [bytes(pages) for pages in self._pages()]
        if pages != [page] * shape.layers:
            raise PayloadError("what was sealed does not come out again")

    def make(self) -> None:
        """What was encrypted before is as good to encrypt as any other bytes."""
        self._payload, _ = encode_in_place(
            self._claim,
            self._layers,
            self._slab,
            codec="none",
            provenance=self._provenance,
            seal=self._seal,
        )

    def open(self) -> None:
        """All that a loader verifies, and decrypts."""
        for _ in self._pages():
            pass

    def _pages(self) -> Iterator[memoryview]:
        header = open_payload(self._payload, self._claim, self._layers, seal=self._seal)
        for number in range(len(self._layers)):
            yield frame_pages(header, number, self._payload, self._scratch)


def _timed(side: _Side, work: Callable[[_Side], None]) -> Work:
    def round_of_work() -> float:
        started = time.thread_time()
        work(side)
        return time.thread_time() - started

    return round_of_work


DECODE_TARGETS = {
    "blosc": Target(1.5, of="ours"),
    "blosclz4": Target(2.5, of="ours"),
}
_PAGE_BYTES = 1 << 20
"""One layer of a chunk of 256 tokens of an 8B model."""
_PAGES = 32
_QUICK_PAGES = 2
_FILE_BYTES_MAX = 1 << 30
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class _Pages:
    """What is encoded: pages of layers, and bytes per element."""

    pages: Sequence[memoryview]
    item_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(len(page) for page in self.pages)


def bench_codec(setting: BenchSetting) -> Section:
    """All codecs on made-up KV."""
    count = _QUICK_PAGES if setting.quick else _PAGES
    pages = [memoryview(kv_like(_PAGE_BYTES, seed)) for seed in range(count)]
    section = _measure(setting, _Pages(pages, 2), "made-up K/V, BF16")
    setting.tell("codecs", "seals")
    shape = PAYLOAD_1_MIB if setting.quick else PAYLOAD_32_MIB
    sealed = tuple(seal_rows(setting, shape))
    note = f"sealed: whole payloads of {shape.name}, header included, beside those not sealed"
    return replace(section, rows=section.rows + sealed, notes=(*section.notes, note))


def bench_payload_codec(setting: BenchSetting, file: Path) -> Section:
    """All codecs on the pages of a payload in ``file``, which is verified first.

    Raises ``ConfigError`` if it cannot be read, ``PayloadError`` if it is no payload or corrupt.
    """
    try:
        if file.stat().st_size > _FILE_BYTES_MAX:
            raise ConfigError(f"{file}: longer than {_FILE_BYTES_MAX} bytes")
        payload = file.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{file}: {exc.strerror}") from exc
    header = read_header(payload)
    open_payload(payload, header.claim, header.frames.layers)
    sizes = {frame.layer.item_bytes for frame in header.frames}
    if len(sizes) > 1:
        raise PayloadError(f"{file}: elements of {sorted(sizes)} bytes in one payload")
    pages = [
        frame_pages(header, number, payload, memoryview(bytearray(frame.layer.nbytes)))
        for number, frame in enumerate(header.frames)
    ]
    return _measure(setting, _Pages(pages, sizes.pop()), f"payload {file.name}")


def _measure(setting: BenchSetting, data: _Pages, what: str) -> Section:
    rows: list[BenchRow] = []
    out = make_slab(max(len(page) for page in data.pages))
    for codec in CODECS:
        setting.tell("codecs", codec)
        rows += _codec(setting, data, codec, out)
    note = f"{data.nbytes / (1 << 20):.0f} MiB of {what}; one thread, by its CPU time"
    return Section("codec", tuple(rows), {}, (note,))


def _codec(setting: BenchSetting, data: _Pages, codec: str, out: memoryview) -> Iterator[BenchRow]:
    copy = _each(data.pages, lambda page: _copy(out, page))
    if codec == "none":
        checksum = _each(data.pages, digest)
        timings = interleave({"ours": checksum, "limit": copy}, setting.rounds)
        yield Compared(timings, "ours", "limit", "memcpy").throughput(
            "none: checksum alone", data.nbytes, detail="every codec pays it as well"
        )
        return
    frames = [compress(codec, page, data.item_bytes) for page in data.pages]
    ratio = data.nbytes / sum(len(frame) for _, frame in frames)
    used = {name for name, _ in frames}
    encode = _each(data.pages, lambda page: compress(codec, page, data.item_bytes))
    sides = {"encode": encode, "limit": copy}
    if used == {codec}:
        contents = [memoryview(frame) for _, frame in frames]
        pairs = list(zip(contents, data.pages, strict=True))
        for frame, page in pairs:
            decompress_into(codec, frame, out[: len(page)])
            if out[: len(page)] != page:
                raise PayloadError(f"{codec} does not decode to what was encoded")
        sides["decode"] = _each(
            pairs, lambda pair: decompress_into(codec, pair[0], out[: len(pair[1])])
        )
        stored = f"{ratio:.2f} times smaller"
    else:
        stored = "gains less than 10 %: stored as it is"
    timings = interleave(sides, setting.rounds)
    encoded = Compared(timings, "encode", "limit", "memcpy")
    yield encoded.throughput(f"{codec}: encode", data.nbytes, detail=stored)
    if "decode" in sides:
        decoded = Compared(timings, "decode", "limit", "memcpy")
        target = DECODE_TARGETS.get(codec)
        yield decoded.throughput(f"{codec}: decode", data.nbytes, target, stored)


def _each(items: Sequence[_Item], work: Callable[[_Item], object]) -> Work:
    def round_of_work() -> float:
        # A core's own time: what else runs here takes none of it. Everything is in this thread.
        started = time.thread_time()
        for item in items:
            work(item)
        return time.thread_time() - started

    return round_of_work


def _copy(out: memoryview, page: memoryview) -> None:
    np.copyto(np.frombuffer(out, np.uint8, len(page)), np.frombuffer(page, np.uint8))


def main(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    plot: Plot = None,
    file: Annotated[
        Path | None, typer.Option(help="Use this payload instead of synthetic KV.", metavar="FILE")
    ] = None,
) -> int:
    """See ``run_command``."""

    def work(setting: BenchSetting) -> Section:
        return bench_codec(setting) if file is None else bench_payload_codec(setting, file)

    return run_works(session, (work,), BenchOptions(rounds, quick, check, plot))


if __name__ == "__main__":
    run_command(main, __doc__)
