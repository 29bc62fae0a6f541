"""The command as users run it, on a folder and an SQLite file of their own."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from objkv.assembly.backends import Backends, open_backends
from objkv.cli.app import app
from objkv.config import load_config
from objkv.index.sqlite.index import SqliteIndex
from objkv.stores.local import LocalStore
from objkv.telemetry import NullRecorder
from tests.support.documents import DOCUMENTS
from tests.support.json_documents import faults_of
from tests.support.samples import LEFT, RIGHT, save, save_identity

Run = Callable[..., "Ran"]


class Ran:
    """What became of one command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def document(self) -> Any:
        """The JSON document, which must be all of standard output."""
        return json.loads(self.out)


def refused(ran: Ran, *words: str, code: int = 2) -> None:
    """The command printed no result, and one sentence with these words."""
    assert (ran.code, ran.out) == (code, "")
    for told in words:
        assert told in ran.err


class Machine:
    """The default folder of one user."""

    def __init__(self, home: Path) -> None:
        self.bulk = LocalStore(home / "objkv" / "chunks")
        self.index = SqliteIndex(home / "objkv" / "index.sqlite")

    def fill(self) -> list[str]:
        """Three chunks in two shards each; their prefix hashes."""
        save_identity(self.bulk)
        keys = save(self.bulk, self.index, shards=(LEFT, RIGHT), codec="blosc")
        return list(dict.fromkeys(key.prefix_hash.hex() for key in keys))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def machine(home: Path) -> Machine:
    return Machine(home)


@pytest.fixture
def ends(home: Path) -> Iterator[Backends]:
    """Stores and index of the default settings, which ``run`` uses, too."""
    with open_backends(load_config({}), NullRecorder()) as opened:
        yield opened


@pytest.fixture
def run(home: Path) -> Run:
    def run(*arguments: str, stdin: str = "") -> Ran:
        result = CliRunner().invoke(app, list(arguments), input=stdin)
        is_json = {"--json", "json"} & set(arguments) and "table" not in arguments
        if is_json and result.stdout:
            command = next(word for word in arguments if word in DOCUMENTS)
            assert faults_of(command, json.loads(result.stdout)) == []
        assert "Traceback (most" not in result.stderr + result.stdout or "--debug" in arguments
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run
