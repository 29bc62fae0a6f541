"""An attacker's requests to allocate or decode too much are refused with little memory."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from objkv.codec.header import PARTS_MAX, TOKENS_MAX, render
from objkv.codec.payload import Frame, LayerSpec, encode, read_header
from objkv.codec.values import LAYER_BYTES_MAX, RAW_BYTES_MAX
from objkv.errors import PayloadError
from tests.codec.hostile import PEAK_BYTES_MAX, Stored, payload_of
from tests.codec.payloads import CLAIM, LAYERS, PROVENANCE, pages_of


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
    stored = [Stored(layer, "zstd", b"x") for layer in many]
    assert read_header(payload_of(stored[:-1])).raw_bytes == RAW_BYTES_MAX
    with pytest.raises(PayloadError, match="the pages exceed"):
        read_header(payload_of(stored))
    frames = [Frame(layer, "zstd", i, 1, "0" * 32, "0" * 32) for i, layer in enumerate(many)]
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
        encode(CLAIM, LAYERS, pages_of(LAYERS), codec="none", provenance=told)
    told = replace(PROVENANCE, tokens=(1,) * TOKENS_MAX)
    payload = encode(CLAIM, LAYERS, pages_of(LAYERS), codec="none", provenance=told)
    assert read_header(payload).provenance == told
