"""Which weights these are: digests of files."""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.background import Steps
from objkv.connector.model import weights
from objkv.connector.model.weights import (
    Adapters,
    UnknownAdapterError,
    adapter_digest,
    adapter_files,
    local_folder,
    weights_digest,
)
from tests.support.sides import Jobs
from tests.support.steps import complete

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


# Which LoRA adapter a request uses.


class World:
    """Adapters of one replica, whose background jobs run when a test wants it, and the first."""

    def __init__(self, folder: Path) -> None:
        self.jobs = Jobs()
        self.known = Adapters(self.jobs.submit)
        self.ada = folder / "ada"
        self.ada.mkdir()
        (self.ada / "adapter_config.json").write_text('{"r": 8}')
        (self.ada / "adapter_model.safetensors").write_bytes(b"ada")

    def ask(self, name: str, request: Any) -> bytes | None:
        """The digest once it was looked for, None if it is unknown."""
        assert self.known.digest(name, request) is None
        self.jobs.run()
        try:
            found = self.known.digest(name, request)
            assert found is not None
            return found
        except UnknownAdapterError:
            return None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def lora(folder: Path, number: int = 1, **more: Any) -> Any:
    """vLLM's ``LoRARequest``."""
    plain = {"lora_path": str(folder), "lora_int_id": number, "load_inplace": False}
    return SimpleNamespace(**(plain | {"is_3d_lora_weight": False} | more))


def read_as(digest: bytes, *, then: Callable[[], object] = lambda: None) -> Any:
    def read(files: list[Path]) -> Steps[str]:
        yield None
        then()
        return digest.hex()

    return read


def exchange(folder: Path, content: bytes) -> None:
    """Other weights at the same path, as ``mv`` puts them there."""
    other = folder / "new"
    other.write_bytes(content)
    other.rename(folder / "adapter_model.safetensors")


def copied(folder: Path, name: str, content: bytes | None = None) -> Path:
    shutil.copytree(folder, other := folder.parent / name)
    if content is not None:
        exchange(other, content)
    return other


def test_an_adapter_is_what_it_holds_wherever_it_lies(world: World) -> None:
    moved, other = copied(world.ada, "moved"), copied(world.ada, "other", b"other")
    (moved / "README.md").write_text("moved")
    (moved / "subfolder.json").mkdir()
    first = world.ask("a", lora(world.ada))
    assert first is not None
    assert world.ask("b", lora(moved, 2)) == first
    assert world.ask("c", lora(other, 3)) not in (None, first)
    assert world.ask("d", lora(world.ada, 4, is_3d_lora_weight=True)) not in (None, first)


def test_it_is_read_once_and_every_request_looks_by_stat_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.ask("a", lora(world.ada))
    monkeypatch.setattr(weights, "adapter_digest", lambda files: pytest.fail("read again"))
    assert first is not None
    assert world.ask("b", lora(world.ada)) == first


CHANGES: dict[str, Callable[[Path], object]] = {
    "exchanged": lambda ada: exchange(ada, b"ben"),
    "written": lambda ada: (ada / "adapter_model.safetensors").write_bytes(b"longer"),
    "added": lambda ada: (ada / "new_embeddings.safetensors").write_bytes(b""),
    "removed": lambda ada: (ada / "adapter_config.json").unlink(),
    "gone": shutil.rmtree,
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_adapter_that_changed_beneath_its_name_is_unknown_from_then_on(
    world: World, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may have loaded it before, or load it again now: nobody can tell which."""
    assert world.ask("a", lora(world.ada))
    CHANGES[change](world.ada)
    assert [world.ask(name, lora(world.ada)) for name in "bc"] == [None, None]
    assert caplog.text.count("adapter changed in place") <= 2


def test_after_it_was_put_away_it_is_read_anew(world: World) -> None:
    first = world.ask("a", lora(world.ada))
    exchange(world.ada, b"ben")
    world.known.unloaded(2)
    assert world.ask("b", lora(world.ada)) is None
    world.known.unloaded(1)
    assert world.ask("c", lora(world.ada)) not in (None, first)


def test_it_is_read_when_vllm_loads_it_so_that_later_changes_are_seen(world: World) -> None:
    world.known.loaded(lora(world.ada))
    world.known.loaded(lora(world.ada))
    assert len(world.jobs) == 1
    world.jobs.run()
    exchange(world.ada, b"ben")
    assert world.ask("a", lora(world.ada)) is None


def test_a_number_with_another_path_is_unknown_because_vllm_goes_by_the_number(
    world: World,
) -> None:
    ben = copied(world.ada, "ben", b"ben")
    first = world.ask("a", lora(world.ada))
    with pytest.raises(UnknownAdapterError):
        world.known.digest("b", lora(ben))
    world.known.unloaded(1)
    assert world.ask("c", lora(ben)) not in (None, first)


@pytest.mark.parametrize("name", ["nowhere", "", "s3://bucket/adapter"])
def test_what_is_not_there_is_unknown_and_asked_for_once(
    world: World, tmp_path: Path, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    request = lora(tmp_path / "empty", lora_path=name or str(tmp_path / "empty"))
    assert world.ask("a", request) is None
    with pytest.raises(UnknownAdapterError):
        world.known.digest("a", request)
    assert not world.jobs


def test_one_that_cannot_be_read_for_any_reason_keeps_nobody_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "adapter_digest", read_as(b"", then=lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        world.ask("a", lora(world.ada))
    with pytest.raises(UnknownAdapterError):
        world.known.digest("a", lora(world.ada))


def test_a_digest_that_was_being_read_when_adapters_changed_is_not_believed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "adapter_digest", read_as(b"before"))
    assert world.known.digest("a", lora(world.ada)) is None
    world.known.forget()
    world.jobs.run()
    monkeypatch.setattr(weights, "adapter_digest", read_as(b"after"))
    assert world.ask("a", lora(world.ada)) == b"after"


def test_a_file_that_changes_while_it_is_read_makes_it_unknown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = read_as(b"mixed", then=lambda: exchange(world.ada, b"ben"))
    monkeypatch.setattr(weights, "adapter_digest", changing)
    assert world.ask("a", lora(world.ada)) is None


def test_others_need_not_wait_until_an_adapter_is_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups share the thread. Its digest is that of all of it nevertheless."""
    files = adapter_files(world.ada)
    whole = complete(adapter_digest(files))
    monkeypatch.setattr(weights, "_PIECE", 2)
    assert len(list(adapter_digest(files))) >= 3
    assert complete(adapter_digest(files)) == whole
    due = hashlib.sha256(b"objkv-adapter-1")
    for path in files:
        for value in (path.name.encode(), path.read_bytes()):
            due.update(len(value).to_bytes(8, "little") + value)
    assert whole == due.hexdigest()
