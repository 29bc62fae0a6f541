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
from tests.support.samples import LEFT, RIGHT, save, save_identity

Run = Callable[..., "Ran"]
RUN = "command ending complete findings omitted"
JSON_KEYS = {
    "access": ["role settings iam acl commands"],
    "agent": ["socket arena_bytes"],
    "admission": ["orders"],
    "audit": [
        "command format verdict html made_s begun_s version bulk_url index_url totals namespaces"
        " tenants tree cost findings namespace savings pins lifecycle problems is_doubted"
    ],
    "bench": ["objkv quick bulk index agent rows"],
    "demo": [
        "engine device rows load_failures stored notices speed_up_median identical served fine"
    ],
    "diff": ["share reason a b differences"],
    "doctor": [
        "verdict summary objkv python settings checks",
        "model model_type kv_dtype layers use refused token_bytes state_bytes chunk_tokens"
        " chunk_bytes shared_with note",
    ],
    "exporter": ["name labels value", "url metrics"],
    "gpu-check": ["objkv model gpu cases failure passed"],
    "ls": ["source namespaces omitted tenants quota_bytes", "prefixes omitted", "branches omitted"],
    "match": [
        "namespace model chunk_tokens prompt_tokens usable_tokens stored_chunks chunks"
        " memory? explanation?"
    ],
    "pin": ["namespace leaf tokens chunks until_s nbytes missing by created_s", "pins problems"],
    "prefetch": [
        "chunks stored started resident refused started_bytes resident_bytes refused_bytes"
        " namespace prompt_tokens waited arrived arrived_bytes seconds"
    ],
    "rebuild": [
        f"{RUN} applied own_index namespaces left_out restored corrected present written corrupt"
        " pins",
        "command ending complete own_index",
    ],
    "show": ["key verdict payloads"],
    "size": ["sizing layout load prices", "models"],
    "sweep": [f"{RUN} applied categories removed removed_bytes kept doubts"],
    "top": ["rows total hit_rate stored problem agents"],
    "unpin": ["namespace leaf tokens chunks until_s nbytes missing by created_s"],
    "verify": [
        f"{RUN} every quarantine applied refusal chosen_of part checked checked_bytes"
        " missing_seen ok missing corrupt mismatch hot orphan expired unidentified changed"
        " quarantined forgotten mended"
    ],
    "warm": [
        "command complete mode namespace model ending prompts stored_before short warmed failed"
        " left asked_tokens cached_tokens saved_chunks saved_bytes retries seconds endpoints"
        " failures why"
    ],
}
"""What programs read: the keys of each document that a command prints. ``?``: not in every one."""


def is_documented(command: str, document: Any) -> bool:
    """Whether the document, or each of a list, has the keys of one of the command's documents."""
    if isinstance(document, list):
        return all(is_documented(command, item) for item in document)
    every = [keys.split() for keys in JSON_KEYS[command]]
    return any(
        {key for key in keys if "?" not in key}
        <= set(document)
        <= {key.rstrip("?") for key in keys}
        for keys in every
    )


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
            command = next(word for word in arguments if word in JSON_KEYS)
            assert is_documented(command, json.loads(result.stdout)), result.stdout
        assert "Traceback (most" not in result.stderr + result.stdout or "--debug" in arguments
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run
