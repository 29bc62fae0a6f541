"""Loads within a step are only planned where vLLM handles their failure."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from objkv.config import Config, LoadMode
from objkv.connector.model.groups import Geometry
from objkv.connector.model.identity import safe_load_mode
from objkv.keys.identity import GroupIdentity

GROUP = GroupIdentity("full", None, ("l0",), heads=1, content=8, block_size=32)


def mode(wish: LoadMode, *, batches: int, groups: int = 1, stages: int = 1) -> str:
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    engine = cast("Any", SimpleNamespace(max_concurrent_batches=batches, parallel_config=parallel))
    geometry = Geometry((GROUP,) * groups, 32, 32, tp_size=1)
    return safe_load_mode(engine, geometry, Config(load_mode=wish)).load_mode


@pytest.mark.parametrize("wish", ["layerwise", "auto"])
def test_with_steps_in_flight_loads_are_between_steps(
    wish: LoadMode, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM believes the token of a step that was scheduled before the failure was known."""
    assert mode(wish, batches=2) == "async"
    assert "--no-async-scheduling" in caplog.text


def test_in_a_pipeline_loads_are_between_steps(caplog: pytest.LogCaptureFixture) -> None:
    assert mode("layerwise", batches=2, stages=2) == "async"
    assert "--no-async-scheduling" not in caplog.text


def test_with_several_groups_loads_are_between_steps() -> None:
    """vLLM cannot be told which blocks of which group failed within a step."""
    assert mode("layerwise", batches=1, groups=2) == "async"


def test_one_step_at_a_time_may_load_within_it(caplog: pytest.LogCaptureFixture) -> None:
    assert mode("layerwise", batches=1) == "layerwise"
    assert mode("async", batches=2) == "async"
    assert not caplog.text
