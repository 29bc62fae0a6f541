"""Digests that are remembered on disk: right or not at all."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from objkv.connector.model import weights as module
from objkv.connector.model.weights import DigestCache, identify

LONG_AGO = (1_000_000_000, 1_000_000_000)


class Computed:
    """Counts how often somebody had to compute."""

    def __init__(self, digest: str = "d") -> None:
        self.times = 0
        self.digest = digest

    def __call__(self) -> str:
        self.times += 1
        return self.digest


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test are new; to these tests they are as old as those of a model."""
    monkeypatch.setattr(module, "_SETTLED_NS", -1)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    os.utime(path, LONG_AGO)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "made" / "digests")


def entry_of(tmp_path: Path) -> Path:
    [entry] = (tmp_path / "made" / "digests").iterdir()
    return entry


def test_what_was_computed_once_is_remembered_by_every_process(
    cache: DigestCache, weights: Path, tmp_path: Path
) -> None:
    compute = Computed()
    for one in (cache, cache, DigestCache(tmp_path / "made" / "digests")):
        assert one.remembered("k", [weights], compute) == "d"
    assert compute.times == 1


def test_another_recipe_and_other_files_are_computed(
    cache: DigestCache, weights: Path, tmp_path: Path
) -> None:
    compute, beside = Computed(), tmp_path / "config.json"
    beside.write_text("{}")
    cache.remembered("k", [weights], compute)
    cache.remembered("l", [weights], compute)
    cache.remembered("k", [weights, beside], compute)
    assert compute.times == 3


def test_a_file_that_was_exchanged_is_read_again_though_size_and_time_are_kept(
    cache: DigestCache, weights: Path
) -> None:
    compute = Computed()
    cache.remembered("k", [weights], compute)
    other = weights.with_suffix(".new")
    other.write_bytes(b"WEIGHTS")
    os.utime(other, LONG_AGO)
    other.rename(weights)
    cache.remembered("k", [weights], compute)
    assert compute.times == 2


def test_a_file_that_was_written_in_place_is_read_again(cache: DigestCache, weights: Path) -> None:
    compute = Computed()
    cache.remembered("k", [weights], compute)
    time.sleep(0.02)  # a tick of the file system's clock: within one, ``_SETTLED_NS`` protects
    with weights.open("r+b") as file:
        file.write(b"W")
    os.utime(weights, LONG_AGO)
    cache.remembered("k", [weights], compute)
    assert compute.times == 2


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    cache: DigestCache, weights: Path
) -> None:
    def compute() -> str:
        weights.write_bytes(b"longer than it was")
        return "mixed"

    assert cache.remembered("k", [weights], compute) == "mixed"
    again = Computed("whole")
    assert cache.remembered("k", [weights], again) == "whole"


def test_a_file_that_was_just_written_is_not_remembered(
    cache: DigestCache, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTLED_NS", 3600 * 10**9)
    compute = Computed()
    for _ in range(2):
        cache.remembered("k", [weights], compute)
    assert compute.times == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b'{"digest": "e"}',
        b'{"digest": 7}',
        b"[" * 100_000,
        b" " * (5 << 20),
    ],
)
def test_a_damaged_entry_is_none_and_is_replaced(
    cache: DigestCache, weights: Path, tmp_path: Path, content: bytes
) -> None:
    compute = Computed()
    cache.remembered("k", [weights], compute)
    entry_of(tmp_path).write_bytes(content)
    assert cache.remembered("k", [weights], compute) == "d"
    assert cache.remembered("k", [weights], compute) == "d"
    assert compute.times == 2


@pytest.mark.parametrize("name", ["kind", "files", "identity", "digest", "check"])
def test_an_entry_with_a_changed_value_is_none(
    cache: DigestCache, weights: Path, tmp_path: Path, name: str
) -> None:
    compute = Computed()
    cache.remembered("k", [weights], compute)
    entry = entry_of(tmp_path)
    content: dict[str, Any] = json.loads(entry.read_text())
    content[name] = "e"
    entry.write_text(json.dumps(content))
    cache.remembered("k", [weights], compute)
    assert compute.times == 2


def test_somebody_else_s_entry_is_none(
    cache: DigestCache, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Computed()
    cache.remembered("k", [weights], compute)
    monkeypatch.setattr(os, "geteuid", lambda: 424_242)
    cache.remembered("k", [weights], compute)
    assert compute.times == 2


def test_a_folder_that_cannot_be_written_costs_only_time(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    compute = Computed()
    for _ in range(2):
        assert DigestCache(tmp_path / "file").remembered("k", [weights], compute) == "d"
    assert compute.times == 2


def test_the_oldest_entries_go(
    cache: DigestCache, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ENTRIES_MAX", 2)
    folder = tmp_path / "made" / "digests"
    for number in range(4):
        before = set(folder.glob("*")) if folder.exists() else set()
        cache.remembered(f"k{number}", [weights], Computed())
        [entry] = set(folder.glob("*")) - before
        os.utime(entry, (number, number))
    compute = Computed()
    for kind in ("k3", "k2", "k1"):
        cache.remembered(kind, [weights], compute)
    assert len(list(folder.iterdir())) == 2
    assert compute.times == 1


def test_a_link_is_what_it_leads_to(weights: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(weights)
    assert identify([link]) == identify([weights])
