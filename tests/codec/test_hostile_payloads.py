"""Whatever the bytes are: a PayloadError, or exactly what went in. Never another exception."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.codec.compress import compress
from objkv.codec.header import PARTS_MAX, TOKENS_MAX, render
from objkv.codec.payload import CODECS, Frame, LayerSpec, read_header
from objkv.codec.values import LAYER_BYTES_MAX, RAW_BYTES_MAX
from objkv.errors import PayloadError
from tests.codec.hostile import PEAK_BYTES_MAX, Stored, payload_of
from tests.codec.payloads import (
    CLAIM,
    LAYERS,
    PROVENANCE,
    is_refused,
    join,
    pages_of,
    pages_read,
    reworked,
    sample,
    split,
)
from tests.fuzz.mutation import places
from tests.support.payloads import open_payload

SAMPLES = {codec: sample(codec) for codec in CODECS}
PAGES = pages_of(LAYERS)
Document = dict[str, Any]


@given(st.sampled_from(CODECS), st.data())
def test_no_flipped_bit_reaches_the_model(codec: str, data: st.DataObject) -> None:
    payload = bytearray(SAMPLES[codec])
    bit = data.draw(st.integers(0, len(payload) * 8 - 1))
    payload[bit // 8] ^= 1 << (bit % 8)
    assert is_refused(payload)


@pytest.mark.parametrize("codec", CODECS)
def test_no_flipped_bit_of_the_header_goes_unnoticed(codec: str) -> None:
    start = read_header(SAMPLES[codec]).data_start
    payload = bytearray(SAMPLES[codec][:start])
    for at in range(start):
        payload[at] ^= 1 << (at % 8)
        with pytest.raises(PayloadError):
            read_header(payload)
        payload[at] ^= 1 << (at % 8)
    assert read_header(payload)


@given(st.sampled_from(CODECS), st.data())
def test_no_cut_extension_or_stretch_written_over_goes_unnoticed(
    codec: str, data: st.DataObject
) -> None:
    payload = SAMPLES[codec]
    at = data.draw(st.integers(0, len(payload) - 1))
    assert is_refused(payload[:at])
    new = data.draw(st.binary(min_size=1, max_size=200))
    assert is_refused(payload + new)
    changed = payload[:at] + new + payload[at + len(new) :]
    assert is_refused(new)
    assert changed == payload or is_refused(changed)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.0, True, "U8", "BF16", "none"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)  # fmt: skip


@given(st.sampled_from(CODECS), st.data())
def test_a_header_with_any_value_replaced_and_its_checksum_right_is_refused(
    codec: str, data: st.DataObject
) -> None:
    document, frames = split(SAMPLES[codec])
    container, key = data.draw(st.sampled_from(places(document)))
    before = container[key]
    container[key] = data.draw(values)
    payload = reworked(document, frames)
    if container[key] == before and type(container[key]) is type(before):
        assert pages_read(payload) == PAGES
    elif key in {"writer", "created_s", "token_digest", "checksum"}:
        with suppress(PayloadError):
            assert pages_read(payload) == PAGES
    else:
        assert is_refused(payload)


Tamper = Callable[[Document], None]


def metadata(name: str, value: str) -> Tamper:
    return lambda document: document["__metadata__"].update({name: value})


def tensor(**changes: Any) -> Tamper:
    return lambda document: document[LAYERS[1].name].update(changes)


def frame(text: str) -> Tamper:
    return metadata("frame.1", text.replace("#", "0" * 32))


N = LAYERS[0].nbytes


@pytest.mark.parametrize(
    "tamper",
    [
        tensor(data_offsets=[-1, 2 * N]),
        tensor(data_offsets=[N, N]),
        tensor(data_offsets=[2 * N, N]),
        tensor(data_offsets=[0, 2 * N]),
        tensor(data_offsets=[N + 1, 2 * N]),
        tensor(data_offsets=[N, 2**63]),
        tensor(data_offsets=[N, float(2 * N)]),
        tensor(data_offsets=[N]),
        tensor(data_offsets=[N, 2 * N, 3 * N]),
        tensor(data_offsets=[True, 2 * N]),
        tensor(dtype="F16"),
        tensor(shape=[2, 2, 32, 16]),
        tensor(shape=[N]),
        tensor(more=1),
        frame(""),
        frame("none BF16 2x2x16x32 #0"),
        frame("none BF16 2x2x16 #"),
        frame("none BF16 2x2x16x0 #"),
        frame("none BF16 2x2x16x-32 #"),
        frame("none BF16 2x2x16x32 # #"),
        frame("lz4 BF16 2x2x16x32 # #"),
        frame("lz4 BF16 2x2x16x32 #"),
        frame("gzip BF16 2x2x16x32 # #"),
        frame("none BF17 2x2x16x32 #"),
        frame("none F32 2x2x16x32 #"),
        frame("none BF16 " + "x".join(["9" * 18] * 4) + " #"),
        frame("none BF16 " + "9" * 5000 + "x1x1x1 #"),
        metadata("format", "objkv/1"),
        metadata("token_start", "512"),
        metadata("token_start", "-1"),
        metadata("token_end", "9" * 5000),
        metadata("token_end", "５１２"),
        metadata("chunk", "../../etc/passwd".ljust(82)),
        metadata("shard", "../../etc/passwd"),
        metadata("shard", "L0-" + "9" * 5000 + "_H0-2"),
        metadata("parent", "00"),
        metadata("tokens", "1 2 x"),
        metadata("tokens", "1  2"),
        metadata("created_s", "1e9"),
        metadata("writer", "x" * 257),
        metadata("token_digest", ""),
        lambda document: document["__metadata__"].pop("frame.2"),
        lambda document: document["__metadata__"].pop("chunk"),
        lambda document: document["__metadata__"].pop("shard"),
        lambda document: document.pop(LAYERS[0].name),
        lambda document: document.update({"": document.pop(LAYERS[2].name)}),
        lambda document: document.update({"x" * 600: document.pop(LAYERS[2].name)}),
        lambda document: [document.pop(layer.name) for layer in LAYERS],
    ],
)
def test_a_header_that_lies_is_refused(tamper: Callable[[Document], object]) -> None:
    document, frames = split(SAMPLES["none"])
    tamper(document)
    payload = reworked(document, frames)
    with pytest.raises(PayloadError) as caught:
        read_header(payload)
    assert len(str(caught.value)) < 1500


OPENING = b'{"__metadata__":{"checksum":"%b","chunk":"%b"' % (
    b"0" * 32,
    CLAIM.key.chunk_text.encode(),
)


@pytest.mark.parametrize(
    "header",
    [
        OPENING,
        OPENING + b"}}",
        OPENING + b'},"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        OPENING + b'},"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        OPENING + b'},"x":' + b"9" * 100_000 + b"}",
        OPENING + b'},"x":NaN}',
        OPENING + b'},"__metadata__":{}}',
        OPENING + b',"format":"objkv/2","format":"objkv/2"}}',
        OPENING + b'},"x":"\xff\xfe"}',
        OPENING + b'},"x":"\xc3\xa4"}',
        OPENING + b"}}{}",
        OPENING + b"}}" + b"\0" * 100,
        b" " * 100,
        b"[]" + b" " * 100,
    ],
)
def test_a_header_that_is_no_such_json_is_refused(header: bytes) -> None:
    with pytest.raises(PayloadError):
        read_header(join(header))


@pytest.mark.parametrize("where", ["object", "metadata"])
def test_a_name_twice_in_a_header_that_is_right_otherwise_is_refused(where: str) -> None:
    """Readers differ in which of the two they take."""
    document, frames = split(SAMPLES["none"])
    text = json.dumps(document, separators=(",", ":"))
    name = LAYERS[0].name if where == "object" else "writer"
    inner: Any = document if where == "object" else document["__metadata__"]
    told = json.dumps({name: inner[name]}, separators=(",", ":"))[1:-1]
    assert text.count(told) == 1
    assert not is_refused(join(text.encode(), frames))
    assert is_refused(join(text.replace(told, f"{told},{told}").encode(), frames))


def test_a_layer_beyond_the_bound_is_refused_before_anything_is_allocated() -> None:
    document, _ = split(SAMPLES["lz4"])
    blocks = LAYER_BYTES_MAX // (2 * 16 * 32 * 2) + 1
    text = document["__metadata__"]["frame.0"]
    document["__metadata__"]["frame.0"] = text.replace("2x2x16x32", f"{blocks}x2x16x32")
    with pytest.raises(PayloadError, match="bytes"):
        read_header(reworked(document))


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
def test_a_frame_that_decodes_to_other_bytes_than_were_saved_is_refused(codec: str) -> None:
    """It is whole, and as long as what was saved."""
    stored = [
        Stored(
            layer, codec, bytes(compress(codec, memoryview(bytes(layer.nbytes)), 2)[1]), "0" * 32
        )
        for layer in LAYERS
    ]
    payload = payload_of(stored)
    open_payload(payload, CLAIM, LAYERS)
    assert is_refused(payload)


@pytest.mark.slow
def test_no_payload_takes_much_memory_or_time_to_refuse(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.codec.hostile", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    outcomes = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(outcomes) > 60
    for name, end, peak_bytes in outcomes:
        assert end.startswith("refused: "), (name, end[:500])
        assert len(end) < 2000, name
        assert peak_bytes < PEAK_BYTES_MAX, (name, peak_bytes)


def test_more_pages_than_any_reader_wants_are_refused_and_not_written() -> None:
    shape = (LAYER_BYTES_MAX // 2**18, 2, 2**16, 1)
    many = [LayerSpec(str(i), "BF16", shape) for i in range(RAW_BYTES_MAX // LAYER_BYTES_MAX + 1)]
    stored = [Stored(layer, "blosc", b"x") for layer in many]
    assert read_header(payload_of(stored[:-1])).raw_bytes == RAW_BYTES_MAX
    with pytest.raises(PayloadError, match="the pages exceed"):
        read_header(payload_of(stored))
    frames = [Frame(layer, "blosc", i, 1, "0" * 32, "0" * 32) for i, layer in enumerate(many)]
    with pytest.raises(PayloadError, match="the pages exceed"):
        render(CLAIM, frames, PROVENANCE)


def test_more_layers_and_tokens_than_can_be_read_are_not_written() -> None:
    frames = [
        Frame(LayerSpec(str(i), "U8", (1, 1, 1, 1)), "none", i, 1, "0" * 32, "0" * 32)
        for i in range(PARTS_MAX // 11)
    ]
    with pytest.raises(PayloadError, match="parts"):
        render(CLAIM, frames, PROVENANCE)
    told = replace(PROVENANCE, tokens=(1,) * (TOKENS_MAX + 1))
    with pytest.raises(PayloadError, match="token ids"):
        sample(provenance=told)
    told = replace(PROVENANCE, tokens=(1,) * TOKENS_MAX)
    payload = sample(provenance=told)
    assert read_header(payload).provenance == told
