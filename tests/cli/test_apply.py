"""Commands that change or delete stored data or write the index do so only with ``--apply``."""

from typing import Any

import pytest

from objkv.cli.app import all_commands
from tests.cli.conftest import Machine, Run, refused
from tests.support.samples import NAMESPACE

DRY = {
    "rebuild": ("nothing was written: add --apply to write the index", ("rebuild",)),
    "sweep": ("nothing was deleted: add --apply to delete", ("sweep", "--grace", "0", "--force")),
    "verify": (
        "nothing was changed: --apply would quarantine 1 payload, remove 1 record of missing",
        ("verify", "--all", "--quarantine"),
    ),
}
"""Each command with what it says of work that is left."""


@pytest.fixture
def damaged(machine: Machine) -> None:
    """Something to do for every command."""
    hashes = machine.fill()
    paths = sorted(entry.key for entry in machine.bulk.scan(NAMESPACE) if hashes[0] in entry.key)
    machine.bulk.delete(paths[0])
    machine.bulk.put(paths[1], b"not a payload")
    machine.index.drop(NAMESPACE, bytes.fromhex(hashes[2]))


def state(machine: Machine) -> tuple[dict[str, bytes | None], list[Any]]:
    """Everything in store and index."""
    entries = {entry.key: machine.bulk.get(entry.key) for entry in machine.bulk.scan("")}
    records = machine.index.scan(NAMESPACE)
    return entries, sorted(records, key=lambda record: record.prefix_hash)


@pytest.mark.usefixtures("damaged")
@pytest.mark.parametrize("command", DRY)
def test_nothing_changes_without_apply(
    run: Run, machine: Machine, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says, given = DRY[command]
    before = state(machine)
    for role in ("sweeper", "reader"):
        monkeypatch.setenv("OBJKV_ROLE", role)
        looked = run(*given)
        assert (looked.code, looked.err) == (1, "")
        assert says in looked.out
        document = run(*given, "--json").document
        assert document["applied"] is False
        assert state(machine) == before
    right = "writer" if command == "rebuild" else "sweeper"
    for role in ("reader", "writer")[: 1 if command == "rebuild" else 2]:
        monkeypatch.setenv("OBJKV_ROLE", role)
        refused(run(*given, "--apply"), f"set OBJKV_ROLE={right}")
    assert state(machine) == before
    monkeypatch.setenv("OBJKV_ROLE", right)
    assert run(*given, "--apply", "--json").document["applied"] is True
    assert state(machine) != before


def test_every_command_with_a_dry_look_calls_it_the_same() -> None:
    found = {
        path.removeprefix("objkv ")
        for path, command in all_commands()
        for parameter in command.params
        if "--apply" in parameter.opts
    }
    assert found == DRY.keys()
