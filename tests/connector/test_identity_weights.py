"""Which name the weights get in the identity document, by the settings."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from objkv.config import Config
from objkv.connector.model.identity import read_weights
from objkv.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def name_of(folder: Path | None, *, load_format: str = "auto", **more: Any) -> str:
    model = SimpleNamespace(model="org/model", seed=3, revision=more.pop("revision", None))
    load = SimpleNamespace(load_format=load_format)
    vllm_config = SimpleNamespace(model_config=model, load_config=load)
    return read_weights(cast("Any", vllm_config), Config(**more), folder)


def test_weights_are_sampled_unless_all_bytes_are_wanted(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"w" * 100)
    assert name_of(tmp_path).startswith("sampled:")
    assert name_of(tmp_path, weights_digest="full").startswith("full:")


def test_without_files_a_revision_is_their_name() -> None:
    assert name_of(None, revision="abc") == "revision:abc"
    with pytest.raises(ConfigError, match="--revision"):
        name_of(None)


def test_weights_of_nobody_are_named_by_their_seed() -> None:
    assert name_of(None, load_format="dummy") == "dummy:seed=3"
