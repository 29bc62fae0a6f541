"""The examples in docstrings say what happens."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "objkv").rglob("*.py")
    if ">>> " in path.read_text()
)


def test_there_are_examples_to_run() -> None:
    assert {"objkv.keys.prefix", "objkv.keys.topology", "objkv.config.urls"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_print_what_they_say(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module), report=True)
    assert tried > 0
    assert failed == 0
