"""Engines of which every rank schedules for itself are refused: their clocks would part them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from objkv.config import Config
from objkv.connector.encoder.identity import read_form
from objkv.connector.model.identity import read_geometry, refuse_external_launcher
from objkv.errors import ConfigError
from tests.connector.encoder_engine import engine, make_model


class Mine(ExecutorWithExternalLauncher):
    """Somebody's own."""


def ranks(backend: Any, world_size: int) -> Any:
    return SimpleNamespace(
        world_size=world_size, tensor_parallel_size=1, distributed_executor_backend=backend
    )


EXTERNAL = ("external_launcher", Mine, f"{__name__}.Mine")


@pytest.mark.parametrize("backend", EXTERNAL)
def test_kv_is_not_shared_by_ranks_that_schedule_for_themselves(backend: Any) -> None:
    vllm_config = cast("Any", SimpleNamespace(parallel_config=ranks(backend, 2)))
    with pytest.raises(ConfigError, match="--distributed-executor-backend mp"):
        read_geometry(vllm_config, cast("Any", None), Config())


@pytest.mark.parametrize("backend", EXTERNAL)
def test_encoder_outputs_are_not_either(backend: Any, tmp_path: Path) -> None:
    vllm_config = engine(make_model(tmp_path))
    vllm_config.parallel_config = ranks(backend, 2)
    with pytest.raises(ConfigError, match="--distributed-executor-backend mp"):
        read_form(vllm_config, item_bytes_max=1 << 20)


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("external_launcher", 1), (Mine, 1), ("mp", 2), ("ray", 2), ("uni", 1), (None, 1)],
)
def test_others_are_not_refused(backend: Any, world_size: int) -> None:
    refuse_external_launcher(
        cast("Any", SimpleNamespace(parallel_config=ranks(backend, world_size)))
    )
