"""What turns bytes into code is nowhere in objkv; exceptions from the scan have reasons."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "objkv").rglob("*.py"))
SCANNED = [
    *MODULES,
    *(path for name in ("benchmarks", "scripts", "tests") for path in (ROOT / name).rglob("*.py")),
]
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
BANNED_CALLS = {
    "__import__",
    "compile",
    "eval",
    "exec",
    "numpy.load",
    "np.load",
    "os.popen",
    "os.system",
    "torch.load",
    "torch.jit.load",
}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func)


def found_in(source: str) -> set[str]:
    tree = ast.parse(source)
    names = {name.split(".")[0] for name in imported(tree)} & BANNED_MODULES
    return names | ({*imported(tree), *called(tree)} & BANNED_CALLS)


def test_no_module_turns_bytes_into_code() -> None:
    found = {str(path.relative_to(ROOT)): found_in(path.read_text()) for path in MODULES}
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import numpy as np, pickle as p",
        "from pickle import loads",
        "from multiprocessing import shared_memory\nimport marshal",
        "from torch import load\nx = 1\nfrom numpy import load",
        "import torch\ntorch.load('x')",
        "def f(x):\n    return eval(x)",
        "exec('1')",
        "import yaml",
        "import os\nos.system('ls')",
    ],
)
def test_what_would_is_found(source: str) -> None:
    assert found_in(source)


def test_every_exception_from_the_scan_has_a_reason() -> None:
    bare = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SCANNED
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := re.search(r"#\s*noqa:[ A-Z0-9,]*\bS[0-9]+(.*)", line))
        and not re.match(r" +# \S+ \S+", found[1])
    ]
    assert not bare


def test_the_scan_covers_all_code() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    select = re.search(r"^select = \[(.*)\]$", settings, re.MULTILINE)
    assert select is not None
    assert '"S"' in select[1]
    assert "lint" in re.search(r"^check: (.*?) ##", (ROOT / "Makefile").read_text(), re.M)[1]  # type: ignore[index]
