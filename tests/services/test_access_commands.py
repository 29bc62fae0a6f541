"""Every command with the printed rights of every role, on a real Valkey and a real S3 server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import objkv
from objkv.cli.app import app
from objkv.config import Resolved, Role
from objkv.ops.backends_view import read_identity
from objkv.ops.doctor.access import COMMAND_ROLES, ROLES
from tests.services.access_fleet import Fleet
from tests.support.samples import NAMESPACE, TOKENS, save, save_identity
from tests.support.servers.ceph import S3Server
from tests.support.servers.redis import valkey_server

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("ceph")]

LINES = {
    "access": "access --role reader",
    "diff": f"diff acme/tiny {NAMESPACE}",
    "export": "export --out {out} -n acme/tiny",
    "exporter": "exporter --once",
    "import --apply": "import {exported} --apply",
    "import": "import {exported}",
    "ls NAMESPACE": "ls default/tiny",
    "match": "match --tokens {tokens}",
    "pin": "pin {leaf:.6}",
    "show": "show {leaf:.6} -n tiny",
    "size": "size --layers 2 --kv-heads 2 --head-size 8",
    "sweep --apply": "sweep --apply --force --grace-s 0",
    "top": "top --once --every 0.2 --endpoint http://127.0.0.1:9",
    "unpin": "unpin {leaf:.6} -n tiny",
    "verify": f"verify --all -n {NAMESPACE[:6]}",
    "verify --quarantine": "verify --all --quarantine",
    "verify --quarantine --apply": "verify --all --quarantine --apply --force",
}
"""Command lines that differ from the name of the command."""
FOUND = {"import": 1, "top": 3, "verify --quarantine": 1}
"""Exit codes other than 0 of commands that work: no replica answers, or something is left to do."""
CHANGES = (
    *("admission never", "import", "import --apply", "pin", "rebuild --apply", "sweep --apply"),
    *("unpin", "verify --quarantine", "verify --quarantine --apply"),
)
"""Commands that need stores of their own."""
SHOWN = dict.fromkeys(("ls", "ls NAMESPACE", "ls --prefixes", "ls --tree", "audit"), NAMESPACE[:8])


@pytest.fixture(scope="module")
def fleet(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as redis:
        yield Fleet(s3_server, redis)


def prepare(fleet: Fleet, command: str) -> str:
    """Save a chain with what the command is to remove; the hash of its last chunk."""
    with fleet.everything() as ends:
        for entry in list(ends.bulk.scan("")):
            ends.bulk.delete(entry.key)
        for name in ends.index.namespaces():
            for record in list(ends.index.scan(name)):
                ends.admin.drop(name, record.prefix_hash)
        if command.startswith("import"):
            return ""
        save_identity(ends.bulk)
        keys = save(ends.bulk, ends.index)
        if command == "sweep --apply":
            ends.admin.drop(NAMESPACE, keys[2].prefix_hash)
        if command.startswith("verify --quarantine"):
            ends.bulk.put(keys[2].path(), b"not a payload")
        if command == "rebuild --apply":
            ends.admin.drop(NAMESPACE, keys[0].prefix_hash)
    return keys[2].prefix_hash.hex()


@pytest.mark.parametrize("role", ROLES)
def test_every_command_works_or_names_the_role_that_it_needs(
    fleet: Fleet, role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tokens, exported = tmp_path / "tokens.json", tmp_path / "exported"
    tokens.write_text(str(list(TOKENS)), encoding="utf-8")
    runner, wrong = CliRunner(), list[str]()
    leaf = prepare(fleet, "export")
    line = f"export --out {exported} --namespace {NAMESPACE}"
    runner.invoke(app, line.split(), env=fleet.environment("sweeper"))
    for command, roles in COMMAND_ROLES.items():
        if command in CHANGES or not leaf:
            leaf = prepare(fleet, command)
        if command == "unpin":
            runner.invoke(app, ["pin", leaf], env=fleet.environment("sweeper"))
        places = {"tokens": tokens, "leaf": leaf, "exported": exported, "out": tmp_path / "out"}
        words = LINES.get(command, command).format(**places).split()
        ran = runner.invoke(app, words, env=fleet.environment(role))
        if role in roles:
            fine = ran.exit_code == FOUND.get(command, 0) and SHOWN.get(command, "") in ran.stdout
        else:
            fine = ran.exit_code == 2 and roles[-1] in ran.stderr
        if not fine:
            wrong.append(
                f"{role} {command}: {ran.exit_code} {ran.stderr[-300:]} {ran.stdout[-200:]}"
            )
    assert wrong == []


def test_a_router_finds_prompts_with_the_rights_of_a_reader(fleet: Fleet) -> None:
    leaf = prepare(fleet, "match")
    with fleet.opened("reader") as ends:
        assert ends.index.namespaces() == [NAMESPACE]
        assert read_identity(ends.bulk, NAMESPACE) is not None
        [record] = ends.index.lookup(NAMESPACE, [bytes.fromhex(leaf)])
        assert record is not None
        [found] = ends.index.find(NAMESPACE, [record.prefix_hash], list(record.shards))
        assert found is not None


def test_a_client_needs_the_rights_of_a_reader_for_all_but_pins(fleet: Fleet) -> None:
    leaf = prepare(fleet, "match")
    config = fleet.config(**fleet.settings["reader"])
    with objkv.Client(Resolved(config, {}), fleet.opened("reader")) as client:
        assert [one.model for one in client.namespaces()] == ["acme/tiny"]
        assert client.match(TOKENS, namespace="acme/tiny").end == "complete"
        assert client.explain(TOKENS[:-1]).cause == "nothing"
        assert {chunk.prefix_hash for chunk in client.chunks()} >= {leaf}
        assert client.audit().totals.chunks == 3
        assert client.warm([list(TOKENS)], check=True).is_complete
        assert client.pins() == []
        with pytest.raises(objkv.StoreDenied, match="set role to sweeper"):
            client.pin(TOKENS)
    config = fleet.config(**fleet.settings["sweeper"])
    with objkv.Client(Resolved(config, {}), fleet.opened("sweeper")) as client:
        assert client.unpin(client.pin(leaf=leaf)).chunks == 3
