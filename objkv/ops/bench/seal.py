"""``bench codec``: what signing and encrypting cost, whole payloads beside those not sealed."""

import os
import time
from collections.abc import Callable, Iterator, Mapping

from objkv.codec.payload import encode_in_place, frame_pages, header_room, open_payload
from objkv.codec.seal import KEY_BYTES, Seal, SealKey
from objkv.errors import PayloadError
from objkv.ops.bench.crew import make_slab
from objkv.ops.bench.rounds import Compared, Work, interleave
from objkv.ops.bench.rows import Row
from objkv.ops.bench.sample import Shape, kv_like, sample_claim
from objkv.ops.bench.setting import Setting

PLAIN = "not sealed"


def seal_rows(setting: Setting, shape: Shape) -> Iterator[Row]:
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
