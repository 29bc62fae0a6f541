"""Commands that change or delete stored data or write the index do so only with ``--apply``."""

from pathlib import Path
from typing import Any

import pytest

from objkv.cli.app import all_commands
from tests.cli.conftest import Machine, Run, refused
from tests.support.samples import NAMESPACE

DRY = {
    "import": ("nothing was imported: add --apply to import", ("import", "{out}")),
    "rebuild": ("nothing was written: add --apply to write the index", ("rebuild",)),
    "sweep": ("nothing was deleted: add --apply to delete", ("sweep", "--grace-s", "0", "--force")),
    "verify": (
        "nothing was changed: --apply would quarantine 1 payload, remove 1 record of missing",
        ("verify", "--all", "--quarantine"),
    ),
}
"""Each command with what it says of work that is left."""


@pytest.fixture
def damaged(run: Run, machine: Machine, tmp_path: Path) -> Path:
    """Something to do for every command: the folder of an export."""
    hashes = machine.fill()
    out = tmp_path / "out"
    assert run("export", "--out", str(out), "-n", "tiny").code == 0
    paths = sorted(entry.key for entry in machine.bulk.scan(NAMESPACE) if hashes[0] in entry.key)
    machine.bulk.delete(paths[0])
    machine.bulk.put(paths[1], b"not a payload")
    machine.index.drop(NAMESPACE, bytes.fromhex(hashes[2]))
    return out


def state(machine: Machine) -> tuple[dict[str, bytes | None], list[Any]]:
    """Everything in store and index."""
    entries = {entry.key: machine.bulk.get(entry.key) for entry in machine.bulk.scan("")}
    records = machine.index.scan(NAMESPACE)
    return entries, sorted(records, key=lambda record: record.prefix_hash)


@pytest.mark.parametrize("command", DRY)
def test_nothing_changes_without_apply(
    run: Run, machine: Machine, damaged: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says, words = DRY[command]
    given = [word.format(out=damaged) for word in words]
    before = state(machine)
    for role in ("sweeper", "reader"):
        monkeypatch.setenv("OBJKV_ROLE", role)
        looked = run(*given)
        assert (looked.code, looked.err) == (1, "")
        assert says in looked.out
        document = run(*given, "--json").document
        assert document["applied"] is False
        assert state(machine) == before
    role = "writer" if command == "import" else "sweeper"
    refused(run(*given, "--apply"), f"set role to {role}")
    assert state(machine) == before
    monkeypatch.setenv("OBJKV_ROLE", "writer")
    assert run(*given, "--apply", "--json").document["applied"] is True
    assert state(machine) != before


def test_a_second_look_finds_nothing_left(run: Run, damaged: Path) -> None:
    assert run("import", str(damaged), "--apply").code == 0
    assert run("import", str(damaged)).code == 0
    assert run("rebuild", "--apply").code == 0
    assert run("rebuild").code == 0


def test_apply_of_verify_needs_quarantine(run: Run, machine: Machine) -> None:
    refused(run("verify", "--apply"), "--apply needs --quarantine")


def test_a_look_says_when_apply_would_be_refused(run: Run, machine: Machine) -> None:
    machine.fill()
    for entry in list(machine.bulk.scan(f"{NAMESPACE}/")):
        if entry.key.endswith(".safetensors"):
            machine.bulk.delete(entry.key)
    looked = run("verify", "--all", "--quarantine")
    assert looked.code == 1
    assert "--apply would be refused: the bulk store has none of the payloads" in looked.out
    refused(run("verify", "--all", "--quarantine", "--apply"), "none of the payloads")


def test_every_command_with_a_dry_look_calls_it_the_same() -> None:
    found = {
        path.removeprefix("objkv ")
        for path, command in all_commands()
        for parameter in command.params
        if "--apply" in parameter.opts
    }
    assert found == DRY.keys()
