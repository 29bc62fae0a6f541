"""Fixtures of tests that patch vLLM's classes in this process."""

from collections.abc import Iterator
from importlib import import_module

import pytest


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
