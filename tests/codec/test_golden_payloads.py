"""The golden payloads: written once, read for ever."""

import pytest

from tests.codec.payloads import pages_read
from tests.support.payloads import open_payload
from tests.vectors.make_payloads import CLAIM, FOLDER, LAYERS, PROVENANCE, SEALS, golden, pages_of

COMPRESSED = ["lz4", "blosc", "blosclz4"]


@pytest.mark.parametrize("name", ["none", "tokens", "untyped", "scales", *SEALS])
def test_what_is_written_today_is_byte_for_byte_what_was_written_then(name: str) -> None:
    file = f"{name}.safetensors"
    assert golden()[file] == (FOLDER / file).read_bytes()


@pytest.mark.parametrize("name", ["none", *COMPRESSED, *SEALS, "blosc-signed-encrypted"])
def test_what_was_written_then_is_read_today(name: str) -> None:
    payload = (FOLDER / f"{name}.safetensors").read_bytes()
    seal = SEALS.get(name.removeprefix("blosc-"))
    assert pages_read(payload, seal, CLAIM, LAYERS) == list(map(pages_of, LAYERS))
    if seal is None:
        assert open_payload(payload, CLAIM, LAYERS).provenance == PROVENANCE


@pytest.mark.parametrize("codec", COMPRESSED)
def test_compressed_headers_differ_from_the_golden_ones_in_lengths_and_checksums_only(
    codec: str,
) -> None:
    then = open_payload((FOLDER / f"{codec}.safetensors").read_bytes(), CLAIM, LAYERS)
    now = open_payload(golden()[f"{codec}.safetensors"], CLAIM, LAYERS)
    assert [frame.codec for frame in then.frames] == [codec, "none", codec]
    assert then.codec == "mixed"
    for old, new in zip(then.frames, now.frames, strict=True):
        assert (old.layer, old.codec, old.raw_checksum) == (new.layer, new.codec, new.raw_checksum)
    assert (then.data_start, then.raw_bytes) == (now.data_start, now.raw_bytes)
