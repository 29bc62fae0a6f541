"""Which weights these are: digests of files."""

import json
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.connector.model.weights import local_folder, weights_digest

PAGE = 4096


def tensors(path: Path, content: bytes, name: str = "w") -> None:
    """A safetensors file of one tensor."""
    entry = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({name: entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    tensors(folder / "a.safetensors", bytes(40 * PAGE))
    tensors(folder / "b.safetensors", b"b" * 100)
    return folder


@pytest.mark.parametrize("full", [False, True])
def test_what_a_model_is_made_of_counts_and_not_where_it_is(
    model: Path, tmp_path: Path, *, full: bool
) -> None:
    found = {weights_digest(model, full=full)}
    shutil.copytree(model, tmp_path / "copy")
    assert {weights_digest(tmp_path / "copy", full=full)} == found
    for name in ("config.json", "params.json"):
        (model / name).write_text('{"rope_theta": 10000}')
        found.add(weights_digest(model, full=full))
    tensors(model / "b.safetensors", b"b" * 100, name="v")
    found.add(weights_digest(model, full=full))
    (model / "b.safetensors").rename(model / "c.safetensors")
    found.add(weights_digest(model, full=full))
    (model / "c.safetensors").unlink()
    found.add(weights_digest(model, full=full))
    assert len(found) == 6


def test_one_changed_byte_is_seen_by_the_full_digest_wherever_it_is(model: Path) -> None:
    """The sampled one looks at eight pages of a tensor of a safetensors file."""
    before = weights_digest(model), weights_digest(model, full=True)
    content = bytearray((model / "a.safetensors").read_bytes())
    content[-1] ^= 1  # the last page of 40 is not among the eight
    (model / "a.safetensors").write_bytes(content)
    after = weights_digest(model), weights_digest(model, full=True)
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


@pytest.mark.parametrize("name", ["w.bin", "w.pt", "w.pth", "w.gguf", "no_header.safetensors"])
def test_a_file_that_does_not_say_where_its_tensors_are_is_read_whole(
    name: str, tmp_path: Path
) -> None:
    """Eight pages of such a file would be of a few of its layers."""
    content = bytearray(b"\xff" * (40 * PAGE))
    found = set()
    for page in range(41):
        (tmp_path / name).write_bytes(content)
        found.add(weights_digest(tmp_path))
        content[(page % 40) * PAGE] ^= 1
    assert len(found) == 41


@given(content=st.binary(max_size=200))
def test_whatever_a_weight_file_holds_it_has_a_digest(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    (folder / "w.safetensors").write_bytes(content)
    assert weights_digest(folder) != weights_digest(folder, full=True)


def test_a_folder_below_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ada").mkdir()
    assert local_folder("~/ada", None) == tmp_path / "ada"
    assert local_folder("s3://bucket/model", None) is None
