"""Calls go down: the contracts in ``pyproject.toml`` hold, and they bite."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = Path(sys.executable).with_name("lint-imports")
IMPORTS_WITH_TORCH_AND_VLLM_MISSING = """
import importlib, pkgutil, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing())
import objkv
for module in pkgutil.walk_packages(objkv.__path__, "objkv."):
    if module.name.split(".")[1] not in ("transfer", "connector"):
        importlib.import_module(module.name)
print(len(sys.modules))
"""


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LINT), "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / "objkv", tmp_path / "objkv", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_imports_only_go_down() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("keys/chunk.py", "import objkv.stores.base", "floors"),
        ("stores/base.py", "import objkv.index.base", "floors"),
        ("cache/match.py", "import vllm", "vllm is known"),
        ("codec/__init__.py", "import torch", "torch is known"),
        ("transfer/__init__.py", "import objkv.stores.local", "concrete stores"),
        ("utensils.py", "", "floors"),
    ],
)
def test_an_import_that_goes_elsewhere_is_found(
    copy: Path, module: str, statement: str, contract: str
) -> None:
    hidden = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {statement or 'pass'}\n"
    with (copy / "objkv" / module).open("a") as file:
        file.write(hidden)
    result = lint(copy)
    assert result.returncode == 1, result.stdout
    assert re.search(rf"{contract}.*BROKEN", result.stdout) or "exhaustive" in result.stdout


def test_everything_but_transfer_and_connector_works_without_torch_and_vllm() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORTS_WITH_TORCH_AND_VLLM_MISSING],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
