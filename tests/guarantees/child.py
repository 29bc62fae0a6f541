"""Runs pytest in a process of its own. Imported by that process, not by what it tests."""

import os
import sys
from pathlib import Path
from typing import NoReturn

import hypothesis
import pytest

PRINTED = "printed.txt"
"""File in the tree with what pytest has printed."""
ONCE = hypothesis.settings(
    deadline=None,
    derandomize=True,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
"""The same examples in every run, and none of them is shrunk."""


def run_tests(tree: Path, tests: list[str]) -> NoReturn:
    """Run pytest with the objkv and the tests of ``tree``, and exit with its status."""
    os.setsid()
    os.chdir(tree)
    with open(PRINTED, "w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("objkv", "tests"):
            del sys.modules[name]
    os.environ.pop("CI", None)  # there a test that takes long fails, whatever it found
    sys.path[0] = os.environ["PYTHONPATH"] = str(tree)
    hypothesis.settings.register_profile("once", ONCE)
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=once"]
    sys.exit(pytest.main([*options, *tests]))
