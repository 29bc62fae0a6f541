"""Fixtures of tests of the connectors: replicas end, and what is patched in vLLM is mended."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def replicas_are_closed() -> Iterator[None]:
    """Those that a test opened, at its end, and sides of them."""
    yield
    if sides := sys.modules.get("tests.support.sides"):
        while sides.OPENED:
            sides.OPENED.pop().close()
    if replicas := sys.modules.get("tests.support.paged_cache"):
        for worker in list(replicas.Worker.opened):
            worker.close()
    if world := sys.modules.get("tests.connector.handoff.world"):
        while world.OPENED:
            world.OPENED[-1].close()
    if inside := sys.modules.get("tests.support.inside"):
        for agent in list(inside.InsideAgent.opened):
            agent.close(1.0)


@pytest.fixture
def vllm_as_before() -> Iterator[None]:
    """What objkv patches in vLLM is as it was when the test is over."""
    from objkv.connector.hooks import PATCHED

    methods = []
    for name, (module, owner_name) in PATCHED.items():
        owner = getattr(import_module(module), owner_name)
        methods.append((owner, name, owner.__dict__[name]))
    yield
    for owner, name, method in methods:
        setattr(owner, name, method)


@pytest.fixture
def place() -> Any:
    """Stores that replicas with an encoder cache share."""
    from tests.connector.encoder.world import Place

    return Place()


@pytest.fixture
def second(place: Any) -> Iterator[Any]:
    from tests.connector.encoder.world import replica

    with replica(place) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the engines of hand-offs have a model and stores."""
    from tests.connector.handoff.world import model_folder

    model_folder(tmp_path)
    return tmp_path


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    """Makes replicas with a tier that share one folder, and closes them."""
    from tests.connector.tier.world import Engine, init_hashes

    init_hashes()
    made: list[Engine] = []

    def make(tier: dict[str, Any] | None = None, **changes: Any) -> Engine:
        made.append(Engine(tmp_path, tier, **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
