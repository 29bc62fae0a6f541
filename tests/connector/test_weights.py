"""Which weights a folder holds: told by what lies there, the same everywhere."""

import json
import logging
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.connector.model import weights as digests
from objkv.connector.model import weights as module
from objkv.connector.model.weights import (
    DigestCache,
    adapter_digest,
    adapter_files,
    local_folder,
    weights_digest,
)

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
@pytest.mark.parametrize("name", ["config.json", "params.json"])
def test_another_configuration_makes_another_model(
    name: str, tmp_path: Path, *, full: bool
) -> None:
    (tmp_path / "consolidated.safetensors").write_bytes(b"weights")
    found = {weights_digest(tmp_path, full=full)}
    for theta in (10_000, 500_000):
        (tmp_path / name).write_text(f'{{"rope_theta": {theta}}}')
        found.add(weights_digest(tmp_path, full=full))
    assert len(found) == 3


def test_the_digest_says_what_was_read_so_that_the_two_kinds_never_share(model: Path) -> None:
    sampled, full = weights_digest(model), weights_digest(model, full=True)
    assert sampled is not None
    assert full is not None
    assert (sampled[:8], full[:5]) == ("sampled:", "full:")
    assert sampled.partition(":")[2] != full.partition(":")[2]


@pytest.mark.parametrize("full", [False, True])
def test_a_copy_elsewhere_has_the_same_digest(model: Path, tmp_path: Path, *, full: bool) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert weights_digest(tmp_path / "copy", full=full) == weights_digest(model, full=full)


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


def test_weights_in_two_formats_are_each_read_in_their_way(model: Path) -> None:
    (model / "c.bin").write_bytes(bytes(40 * PAGE))
    found = {weights_digest(model)}
    for name in ("c.bin", "b.safetensors"):
        content = bytearray((model / name).read_bytes())
        content[-1] ^= 1
        (model / name).write_bytes(content)
        found.add(weights_digest(model))
    assert len(found) == 3


@pytest.mark.parametrize("full", [False, True])
def test_names_shapes_and_files_count(model: Path, tmp_path: Path, *, full: bool) -> None:
    found = {weights_digest(model, full=full)}
    tensors(model / "b.safetensors", b"b" * 100, name="v")
    found.add(weights_digest(model, full=full))
    (model / "b.safetensors").rename(model / "c.safetensors")
    found.add(weights_digest(model, full=full))
    (model / "c.safetensors").unlink()
    found.add(weights_digest(model, full=full))
    assert len(found) == 4


@given(content=st.binary(max_size=200))
def test_whatever_a_weight_file_holds_it_has_a_digest(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    (folder / "w.safetensors").write_bytes(content)
    assert weights_digest(folder) != weights_digest(folder, full=True)


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert weights_digest(tmp_path) is None


def test_both_kinds_are_remembered_apart(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_SETTLED_NS", -1)
    cache = DigestCache(tmp_path / "digests")
    known = [weights_digest(model, full=full, cache=cache) for full in (False, True)]
    monkeypatch.setattr(module, "_sample", lambda path, spans: pytest.fail(f"read {path}"))
    monkeypatch.setattr(module, "_read_whole", lambda path, tell: pytest.fail(f"read {path}"))
    assert [weights_digest(model, full=full, cache=cache) for full in (False, True)] == known


def test_reading_all_weights_tells_how_far_it_is(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", PAGE)
    monkeypatch.setattr(module, "_TELL_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, logger=module.__name__):
        weights_digest(model, full=True)
    told = [record for record in caplog.records if "hashing all weights" in record.message]
    assert len(told) > 40
    done, total = told[-1].args  # type: ignore[misc]
    assert done == total


def test_an_adapter_is_all_its_files_and_not_its_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text('{"r": 8}')
        (folder / "README.md").write_text(name)
        (folder / "subfolder.json").mkdir()
        tensors(folder / "adapter_model.safetensors", b"x" * 10)
    one, two = (adapter_digest(adapter_files(tmp_path / name)) for name in ("one", "two"))
    assert one == two
    (tmp_path / "two" / "adapter_config.json").write_text('{"r": 4}')
    assert adapter_digest(adapter_files(tmp_path / "two")) != one
    (tmp_path / "one" / "adapter_model.safetensors").unlink()
    assert adapter_digest(adapter_files(tmp_path / "one")) is None


def test_a_folder_below_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ada").mkdir()
    assert local_folder("~/ada", None) == tmp_path / "ada"
    assert local_folder("s3://bucket/model", None) is None
