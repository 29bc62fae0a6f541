"""Fixtures of tests of the connector: replicas end, and what is patched in vLLM is mended."""

import sys
from collections.abc import Iterator
from importlib import import_module

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
