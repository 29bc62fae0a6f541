"""Which weights these are: digests of files, and how they are remembered."""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.background import at_once
from objkv.connector.model import weights as module
from objkv.connector.model.weights import (
    DigestCache,
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


LONG_AGO = (1_000_000_000, 1_000_000_000)


class Computed:
    """Counts how often somebody had to compute."""

    times = 0

    def __call__(self) -> str:
        self.times += 1
        return "d"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    os.utime(path, LONG_AGO)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DigestCache:
    """Files of a test are new; to this cache they are as old as those of a model."""
    monkeypatch.setattr(module, "_SETTLED_NS", -1)
    return DigestCache(tmp_path / "made" / "digests")


def remembered(
    cache: DigestCache, kind: str, paths: list[Path], compute: Callable[[], str]
) -> str | None:
    return at_once(cache.remembered(kind, paths, compute))


def test_what_was_computed_once_is_remembered_by_every_process(
    cache: DigestCache, weights: Path, tmp_path: Path
) -> None:
    """Unless by another recipe or of other files."""
    compute, beside = Computed(), tmp_path / "config.json"
    for one in (cache, cache, DigestCache(tmp_path / "made" / "digests")):
        assert remembered(one, "k", [weights], compute) == "d"
    assert compute.times == 1
    beside.write_text("{}")
    remembered(cache, "l", [weights], compute)
    remembered(cache, "k", [weights, beside], compute)
    assert compute.times == 3


def test_a_file_that_changed_is_read_again_though_size_and_time_are_kept(
    cache: DigestCache, weights: Path
) -> None:
    """It was exchanged, and then written in place."""
    compute = Computed()
    remembered(cache, "k", [weights], compute)
    other = weights.with_suffix(".new")
    other.write_bytes(b"WEIGHTS")
    os.utime(other, LONG_AGO)
    other.rename(weights)
    remembered(cache, "k", [weights], compute)
    assert compute.times == 2
    time.sleep(0.02)  # a tick of the file system's clock: within one, ``_SETTLED_NS`` protects
    with weights.open("r+b") as file:
        file.write(b"w")
    os.utime(weights, LONG_AGO)
    remembered(cache, "k", [weights], compute)
    assert compute.times == 3


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    cache: DigestCache, weights: Path
) -> None:
    def compute() -> str:
        weights.write_bytes(b"longer than it was")
        return "mixed"

    assert remembered(cache, "k", [weights], compute) == "mixed"
    assert remembered(cache, "k", [weights], Computed()) == "d"


@pytest.mark.parametrize(
    "content", [b"\xff", b"null", b'{"digest": "e"}', b'{"digest": 7}', b"[" * 100_000]
)
def test_a_damaged_entry_is_none_and_is_replaced(
    cache: DigestCache, weights: Path, tmp_path: Path, content: bytes
) -> None:
    compute = Computed()
    remembered(cache, "k", [weights], compute)
    [entry] = (tmp_path / "made" / "digests").iterdir()
    entry.write_bytes(content)
    assert remembered(cache, "k", [weights], compute) == "d"
    assert remembered(cache, "k", [weights], compute) == "d"
    assert compute.times == 2


def test_what_is_somebody_elses_just_written_or_cannot_be_kept_is_computed_again(
    cache: DigestCache, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Computed()
    remembered(cache, "k", [weights], compute)
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: 424_242)
        remembered(cache, "k", [weights], compute)
    assert compute.times == 2
    (tmp_path / "file").write_text("no folder")
    for _ in range(2):
        assert remembered(DigestCache(tmp_path / "file"), "k", [weights], compute) == "d"
    assert compute.times == 4
    monkeypatch.setattr(module, "_SETTLED_NS", 3600 * 10**9)
    weights.write_bytes(b"new")
    for _ in range(2):
        remembered(cache, "k", [weights], compute)
    assert compute.times == 6
