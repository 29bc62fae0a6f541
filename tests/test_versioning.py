"""docs/operations/upgrade.md keeps its promises, and the window of vLLM is the same everywhere."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

import objkv
from objkv import connector
from objkv.ops.doctor.doctor import VERSION_END, VERSION_MIN

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "operations" / "upgrade.md").read_text()
PUBLIC = re.findall(r"^\| `(objkv\.[\w.]+)` \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", PUBLIC)
def test_what_may_be_imported_is_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, str) or found.__doc__


def test_the_list_is_complete_for_what_packages_offer_themselves() -> None:
    offered = {f"objkv.{name}" for name in objkv.__all__}
    offered |= {f"objkv.connector.{name}" for name in connector.__all__}
    assert offered <= set(PUBLIC)
    assert len(PUBLIC) == len(set(PUBLIC)) > 20


def test_the_page_tells_the_version_that_this_is() -> None:
    assert f"objkv {objkv.__version__}\n" in PAGE


def test_the_window_of_vllm_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (least_major, least), (end_major, end) = VERSION_MIN, VERSION_END
    wanted = f"vllm>={least_major}.{least},<{end_major}.{end}"
    assert project["optional-dependencies"]["vllm"] == [wanted]
    assert least_major == end_major
    rows = re.findall(r"^\| (\d+\.\d+) \| yes \|", PAGE, re.MULTILINE)
    assert rows == [f"{least_major}.{minor}" for minor in range(least, end)]


def test_the_pythons_are_those_that_the_package_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least, end = re.findall(r"3\.(\d+)", project["requires-python"])
    assert f"3.{least} to 3.{int(end) - 1}. These names may be imported" in PAGE
    told = {text for text in project["classifiers"] if "Python :: 3." in text}
    wanted = {f"Programming Language :: Python :: 3.{n}" for n in range(int(least), int(end))}
    assert told == wanted
