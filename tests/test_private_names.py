"""Names of other libraries that objkv uses without being promised them: one table per backend.

A failure names the version that no longer has one.
"""

import ast
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lz4.block
import pytest
import redis
from botocore.response import StreamingBody
from urllib3.connectionpool import HTTPConnectionPool

from objkv.codec import compress
from objkv.net import resp
from objkv.stores.s3 import client as s3
from tests.support.servers.s3_stores import s3_client

OBJKV = Path(__file__).parents[1] / "objkv"
FOLDERS = {
    "codec": compress.PRIVATE_NAMES,
    "net": resp.PRIVATE_NAMES,
    "stores": s3.PRIVATE_NAMES,
    "index": {},
    "keys": {},
    "config": {},
}
"""Tables by the packages they are for."""


def a_session() -> Any:
    return s3_client("http://127.0.0.1:1")._endpoint.http_session


OWNERS: list[tuple[str, dict[str, tuple[str, ...]], str, Callable[[], Any]]] = [
    ("lz4", compress.PRIVATE_NAMES, "lz4.block", lambda: lz4.block),
    ("redis", resp.PRIVATE_NAMES, "connection", redis.Connection),
    ("redis", resp.PRIVATE_NAMES, "connection class", lambda: redis.Connection),
    ("redis", resp.PRIVATE_NAMES, "pool", redis.BlockingConnectionPool),
    ("botocore", s3.PRIVATE_NAMES, "client", lambda: s3_client("http://127.0.0.1:1")),
    ("botocore", s3.PRIVATE_NAMES, "session", a_session),
    ("urllib3", s3.PRIVATE_NAMES, "pool", lambda: HTTPConnectionPool("127.0.0.1")),
    ("urllib3", s3.PRIVATE_NAMES, "connection", lambda: HTTPConnectionPool("::1")._new_conn()),
    ("botocore", s3.PRIVATE_NAMES, "body", lambda: StreamingBody(None, 0)),
]


@pytest.mark.parametrize(
    ("library", "table", "owner", "make"), OWNERS, ids=[f"{row[0]} {row[2]}" for row in OWNERS]
)
def test_the_installed_version_has_every_name(
    library: str, table: dict[str, tuple[str, ...]], owner: str, make: Callable[[], Any]
) -> None:
    found = make()
    missing = [name for name in table[owner] if not hasattr(found, name)]
    assert not missing, f"{library} {version(library)}: {owner} has no {missing}"


def test_every_owner_is_looked_at() -> None:
    for table in FOLDERS.values():
        assert set(table) <= {owner for _, of, owner, _ in OWNERS if of is table}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_other_private_name_is_used(folder: str) -> None:
    """A name with an underscore that no module of the folder defines is another library's."""
    trees = [ast.parse(path.read_text()) for path in (OBJKV / folder).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    ours = {"_replace", *(node.id for node in nodes if isinstance(node, ast.Name))}
    ours |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    ours |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {
        str(node.args[1].value)
        for node in nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr")
        and isinstance(node.args[1], ast.Constant)
    }
    named = {name for names in FOLDERS[folder].values() for name in names}
    private = {name for name in used - ours if name.startswith("_") and not name.startswith("__")}
    assert private <= named
