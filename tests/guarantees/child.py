"""Runs pytest in a process of its own. Imported by that process, not by what it tests."""

import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest

PRINTED = "printed.txt"
"""File in the tree with what pytest has printed."""


def run_tests(tree: Path, tests: list[str]) -> NoReturn:
    """Run pytest with the objkv and the tests of ``tree``, and exit with its status."""
    os.chdir(tree)
    with open(PRINTED, "w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("objkv", "tests"):
            del sys.modules[name]
    sys.path[0] = os.environ["PYTHONPATH"] = str(tree)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
