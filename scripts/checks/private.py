"""Names of other libraries that objkv uses without being promised them are listed in one table per
library, and the installed version has each of them. Tests of one floor use no private names of
another one."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lz4.block
import redis

from objkv.codec import compress
from objkv.net import resp
from scripts.checks import ROOT, name_of, tracked

REDIS = {
    "connection": redis.Connection(),
    "connection class": redis.Connection,
    "pool": redis.BlockingConnectionPool(),
}
USED: dict[str, tuple[dict[str, tuple[str, ...]], dict[str, Any]]] = {
    "codec": (compress.PRIVATE_NAMES, {"lz4.block": lz4.block}),
    "net": (resp.PRIVATE_NAMES, REDIS),
    **dict.fromkeys(("stores", "index", "keys", "config"), ({}, {})),
}
"""By the packages that use them: the table of names, and what has those of each row."""
OTHERS = {
    ("tests/engine/endings.py", "_finalizer"): "vLLM's",
    ("tests/engine/preloaded.py", "_threads"): "torch's",
    ("tests/support/nursery.py", "_shutdown"): "Python's",
}
"""Names in tests that are private names of objkv as well, and here whose they are."""


def findings() -> Iterator[str]:
    """Each name that is gone or not listed."""
    for folder, (table, things) in USED.items():
        for owner, names in table.items():
            if owner not in things:
                yield f"scripts/checks/private.py:1: look at {owner} of objkv/{folder}, too"
            elif gone := [name for name in names if not hasattr(things[owner], name)]:
                yield f"objkv/{folder}:1: the {owner} has no {', '.join(gone)}"
        listed = {name for names in table.values() for name in names}
        for name in sorted(unlisted(folder) - listed):
            yield f"objkv/{folder}:1: {name} is not ours: list it in PRIVATE_NAMES"
    yield from reached()


def reached() -> Iterator[str]:
    """Each private name that a test takes from another floor's objects."""
    floors = defaultdict[str, set[str]](set)
    for path in tracked("objkv/*.py"):
        for name in defined(ast.parse(path.read_text())):
            floors[name].add(_floor(path))
    for path in tracked("tests/*.py"):
        file, tree = name_of(path), ast.parse(path.read_text())
        foreign = {name for name, own in floors.items() if _floor(path) not in own} - defined(tree)
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    pass
                case ast.Attribute(attr=name) if name in foreign and (file, name) not in OTHERS:
                    where = f"{file}:{node.lineno}"
                    yield f"{where}: {name} is private to {min(floors[name])}: use what is public"


def _floor(path: Path) -> str:
    return name_of(path).split("/")[1].removeprefix("test_").removesuffix(".py")


def defined(tree: ast.AST) -> set[str]:
    """The private names that a module gives to something, or uses by themselves."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def unlisted(folder: str) -> set[str]:
    """The names with an underscore that a package uses, and that no module of it defines."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "objkv" / folder).rglob("*.py")]
    used, ours = set[str](), {"_replace"}.union(*map(defined, trees))
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Attribute(attr=name):
                used.add(name)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                used.add(name)
    return {n for n in used - ours if n.startswith("_") and not n.startswith("__")}
