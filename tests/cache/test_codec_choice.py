"""The codec that makes loads shortest, chosen from what was measured."""

from dataclasses import dataclass, field
from threading import Event, Thread

import pytest

from objkv.cache import codec_choice as choose
from objkv.cache.codec_choice import SAMPLE_BYTES_MAX, SAMPLE_EVERY, CodecChooser
from objkv.codec.payload import LayerSpec
from tests.contracts.clock import ManualClock

PATIENCE_S = 120.0
LAYERS = [LayerSpec(f"l{i}", "BF16", (1, 1, 32, 64)) for i in range(32)]
PAGES = memoryview(bytes(sum(layer.nbytes for layer in LAYERS)))
RATIO = {"blosc": 1.45, "blosclz4": 1.20}
DECODE = {"blosc": 1.9e9, "blosclz4": 4.2e9}
ENCODE = {"blosc": 0.5e9, "blosclz4": 0.6e9}


@dataclass
class Codecs:
    """Codecs as fast, and as good, as it says."""

    clock: ManualClock
    ratio: dict[str, float] = field(default_factory=RATIO.copy)
    decode: dict[str, float] = field(default_factory=DECODE.copy)
    sampled: list[tuple[str, int]] = field(default_factory=list)

    def compress(self, codec: str, pages: memoryview, item_bytes: int) -> tuple[str, memoryview]:
        assert item_bytes == 2
        self.sampled.append((codec, pages.nbytes))
        self.clock.advance(pages.nbytes / ENCODE[codec])
        nbytes = int(pages.nbytes / self.ratio[codec])
        return ("none", pages) if self.ratio[codec] < 1.1 else (codec, pages[:nbytes])

    def decompress_into(self, codec: str, frame: memoryview, out: memoryview) -> None:
        self.clock.advance(out.nbytes / self.decode[codec])


@pytest.fixture
def codecs(monkeypatch: pytest.MonkeyPatch) -> Codecs:
    # Near zero, where the clock's steps of microseconds are exact.
    codecs = Codecs(ManualClock(0.0))
    monkeypatch.setattr(choose, "compress", codecs.compress)
    monkeypatch.setattr(choose, "decompress_into", codecs.decompress_into)
    return codecs


def test_the_slower_the_link_the_smaller_is_what_is_sent(codecs: Codecs) -> None:
    link: list[float | None] = [None]
    chooser = CodecChooser(lambda: link[0], clock=codecs.clock)
    for link[0] in (None, 20e9):
        assert chooser.choose(0, LAYERS, PAGES) == "none"
    assert codecs.sampled == [], "nothing is measured where nothing can win"
    for codec, links in {
        "blosc": (10e6, 100e6, 1.0e9),
        "blosclz4": (2.0e9, 3.0e9),
        "none": (5.0e9,),
    }.items():
        for link[0] in links:
            assert chooser.choose(0, LAYERS, PAGES) == codec


@pytest.mark.parametrize(("ratio", "codec"), [(1.0, "none"), (1.105, "none"), (1.13, "blosclz4")])
def test_a_codec_that_gains_less_than_a_tenth_is_not_used(
    codecs: Codecs, ratio: float, codec: str
) -> None:
    codecs.ratio = dict.fromkeys(RATIO, ratio)
    assert CodecChooser(lambda: 100e6, clock=codecs.clock).choose(0, LAYERS, PAGES) == codec


def test_groups_are_told_apart(codecs: Codecs) -> None:
    chooser = CodecChooser(lambda: 100e6, clock=codecs.clock)
    assert chooser.choose(0, LAYERS, PAGES) == "blosc"
    codecs.ratio = {"blosc": 1.0, "blosclz4": 1.0}
    assert chooser.choose(1, LAYERS, PAGES) == "none"
    assert chooser.choose(0, LAYERS, PAGES) == "blosc"


def test_samples_are_taken_in_turn_and_one_that_a_pause_spoilt_does_not_decide(
    codecs: Codecs,
) -> None:
    chooser = CodecChooser(lambda: 100e6, clock=codecs.clock)
    chooser.saved(1e6)
    for _ in range(4 * SAMPLE_EVERY):
        chooser.choose(0, LAYERS, PAGES)
    names = [codec for codec, _ in codecs.sampled]
    assert names == ["blosc", "blosclz4", "blosclz4", "blosc", "blosclz4"], "one in turn"
    codecs.decode = {"blosc": 1e6, "blosclz4": 1e6}
    before = len(codecs.sampled)
    for _ in range(2 * SAMPLE_EVERY):
        assert chooser.choose(0, LAYERS, PAGES) == "blosc"
    assert len(codecs.sampled) == before + 2
    # When it is no pause but how it is, the choice follows.
    for _ in range(6 * SAMPLE_EVERY):
        chooser.choose(0, LAYERS, PAGES)
    assert chooser.choose(0, LAYERS, PAGES) == "none"


def test_sampling_takes_at_most_a_fiftieth_of_the_time_that_saving_takes(codecs: Codecs) -> None:
    chooser = CodecChooser(lambda: 5e9, clock=codecs.clock)
    layers = LAYERS[:1]  # one layer a chunk: a sample costs as much as many saves
    save_s, chunks = PAGES.nbytes / 5e9 / len(LAYERS), 20_000
    for _ in range(chunks):
        chooser.choose(0, layers, PAGES[: layers[0].nbytes])
        chooser.saved(save_s)
    one = layers[0].nbytes / ENCODE["blosc"] + layers[0].nbytes / DECODE["blosc"]
    assert 3 * one < codecs.clock() < 0.02 * chunks * save_s + 3 * one


def test_of_a_long_layer_only_a_part_is_sampled(codecs: Codecs) -> None:
    layer = LayerSpec("l", "BF16", (1, 1, 1024, 2048))
    chooser = CodecChooser(lambda: 100e6, clock=codecs.clock)
    chooser.choose(0, [layer], memoryview(bytes(layer.nbytes)))
    assert codecs.sampled == [("blosc", SAMPLE_BYTES_MAX), ("blosclz4", SAMPLE_BYTES_MAX)]


def test_nobody_waits_for_a_sample_that_another_thread_takes(
    codecs: Codecs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go = Event(), Event()

    def stuck(codec: str, pages: memoryview, item_bytes: int) -> tuple[str, memoryview]:
        asked.set()
        assert go.wait(PATIENCE_S)
        return codecs.compress(codec, pages, item_bytes)

    monkeypatch.setattr(choose, "compress", stuck)
    chooser = CodecChooser(lambda: 100e6, clock=codecs.clock)
    thread = Thread(target=chooser.choose, args=(0, LAYERS, PAGES))
    thread.start()
    assert asked.wait(PATIENCE_S)
    assert chooser.choose(0, LAYERS, PAGES) == "none"
    go.set()
    thread.join(PATIENCE_S)
    assert chooser.choose(0, LAYERS, PAGES) == "blosc"


def test_real_codecs_are_measured_and_chosen_for_a_slow_link() -> None:
    numbers = bytes(i // 64 % 256 for i in range(PAGES.nbytes))
    chooser = CodecChooser(lambda: 1e4)
    assert chooser.choose(0, LAYERS, memoryview(numbers)) in {"blosc", "blosclz4"}


def test_a_codec_that_does_not_work_here_is_not_used_and_does_not_end_the_save(
    codecs: Codecs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def compress(codec: str, pages: memoryview, item_bytes: int) -> tuple[str, memoryview]:
        if codec == "blosc":
            tried.append(codec)
            raise ImportError("no such library")
        return codecs.compress(codec, pages, item_bytes)

    monkeypatch.setattr(choose, "compress", compress)
    chooser = CodecChooser(lambda: 10e6, clock=codecs.clock)
    assert [chooser.choose(0, LAYERS, PAGES) for _ in range(5)] == ["blosclz4"] * 5
    assert len(tried) == 1
