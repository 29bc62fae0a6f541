"""The table of vLLM's interfaces is complete, and what it names is there."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coverage.md"
ROW = re.compile(r"^\| (?P<vllm>.+?) \| (?P<objkv>.+?) \| (?P<test>.+?) \|$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"(?:\w+(?:\.\w+)*:|(?=(?:Encoder)?Connector\b))\w+(?:\.\w+)*")
TEST = re.compile(r"[\w/]+\.py::test_\w+")
SHORT = {
    "Connector": "connector.kv:ObjKVConnector",
    "EncoderConnector": "connector.encoder:ObjKVECConnector",
}
"""Names that the page abbreviates. Others are relative to ``objkv``, tests to ``tests``."""


def rows() -> list[tuple[str, str, str]]:
    found = [(m["vllm"], m["objkv"], m["test"]) for m in ROW.finditer(PAGE.read_text())]
    return [row for row in found if row[0] != "vLLM" and set(row[0]) != {"-"}]


def names(column: int, pattern: re.Pattern[str]) -> Iterator[str]:
    for row in rows():
        yield from filter(pattern.fullmatch, CODE.findall(row[column]))


@cache
def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_names_something_of_objkv_and_a_test() -> None:
    assert len(rows()) > 80
    for vllm, objkv, test in rows():
        assert CODE.search(vllm), vllm
        assert any(map(NAME.fullmatch, CODE.findall(objkv))), vllm
        assert [one for one in CODE.findall(test) if TEST.fullmatch(one)], vllm


@pytest.mark.parametrize("name", sorted(set(names(1, NAME))))
def test_what_a_row_names_is_there(name: str) -> None:
    first, dot, rest = name.partition(".")
    module, _, path = f"{SHORT.get(first, first)}{dot}{rest}".partition(":")
    found = importlib.import_module(f"objkv.{module}")
    for part in path.split("."):
        found = getattr(found, part)


@pytest.mark.parametrize("name", sorted(set(names(2, TEST))))
def test_the_test_of_a_row_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    assert function in functions(ROOT / "tests" / file)


def test_every_method_of_vllms_base_classes_has_a_row() -> None:
    kv = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    ec = importlib.import_module("vllm.distributed.ec_transfer.ec_connector.base")
    told = {word for row in rows() for word in re.findall(r"\w+", " ".join(CODE.findall(row[0])))}
    for base in (kv.KVConnectorBase_V1, kv.SupportsHMA, ec.ECConnectorBase):
        wanted = {
            name
            for name, value in vars(base).items()
            if not name.startswith(("__", "_abc"))
            and (inspect.isroutine(value) or isinstance(value, property))
        }
        assert wanted - told == set(), base.__name__


@pytest.mark.parametrize(
    ("mode", "between"), [("async", False), ("layerwise", True), ("auto", True)]
)
def test_python_runs_between_layers_only_where_layers_wait(mode: str, between: bool) -> None:
    """Else vLLM may capture the whole model in one graph."""
    from objkv.connector.kv.connector import ObjKVConnector

    asked = ObjKVConnector.requires_piecewise_for_cudagraph({"load_mode": mode})
    assert asked is between
