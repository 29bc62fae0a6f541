"""Every command takes a namespace by its model, its tenant and model, or a beginning of its hash,
and a chunk by a beginning of its hash."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from objkv.cli.app import all_commands
from objkv.keys.identity import Identity
from tests.cli.conftest import Machine, Run
from tests.support.samples import IDENTITY, NAMESPACE, TOKENS, save_identity

NAMES = ("acme/tiny", "default/ti", NAMESPACE[:3])
OTHER = replace(IDENTITY, model="Qwen/Qwen3-0.6B", tenant="blue")
PROMPT = json.dumps(list(TOKENS))
COMMANDS = {
    "admission": "admission -n {name} --json",
    "audit": "audit -n {name} --json",
    "diff": "diff {name} {name} --json",
    "ls": "ls {name} --json",
    "ls -n": "ls -n {name} --json",
    "ls --bulk": "ls --bulk {name} --json",
    "ls --tree": "ls --tree {name} --json",
    "match": "match -n {name} --json",
    "pin": "pin {leaf} -n {name} --json",
    "pin --list": "pin --list -n {name} --json",
    "unpin": "unpin {leaf} -n {name} --json",
    "rebuild": "rebuild -n {name} --json",
    "show": "show {leaf} -n {name} --json",
    "sweep": "sweep -n {name} --json",
    "verify": "verify -n {name} --json",
    "warm": "warm - --check -n {name} --json",
}

NAMED = ("audit", "diff", "ls", "ls --bulk", "match", "pin", "show", "unpin")
"""Commands whose documents name the namespace."""


@pytest.fixture
def leaf(machine: Machine) -> str:
    """The first digits of a stored chunk. Its namespace is not the only one."""
    save_identity(machine.bulk, OTHER)
    return machine.fill()[2][:5]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_namespace_has_its_names_in_every_command(run: Run, leaf: str, command: str) -> None:
    for name in NAMES:
        if command == "unpin":
            assert run("pin", leaf).code == 0
        words = COMMANDS[command].format(name=name, leaf=leaf)
        ran = run(*words.split(), stdin=PROMPT)
        assert (ran.code, ran.err) == (0, ""), name
        if command in NAMED:
            assert NAMESPACE in ran.out
        assert OTHER.namespace() not in ran.out


def test_every_command_with_a_namespace_has_the_short_option() -> None:
    found = set()
    for path, command in all_commands():
        for parameter in command.params:
            if "--namespace" in parameter.opts:
                assert "-n" in parameter.opts, path
                found.add(path.removeprefix("objkv "))
    with_agents = {"prefetch"}  # its names are tested with an agent, in test_prefetch.py
    named = {line.split()[0] for line in COMMANDS.values() if "-n" in line.split()}
    assert found == named | with_agents


def test_diff_takes_a_model_for_a_model_and_a_file_for_a_file(
    run: Run, leaf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen3-0.6B", "Qwen/Qwen3-0.6B", "blue/Qwen3-0.6B"):
        document = run("diff", name, "acme/tiny", "--json").document
        assert [document[side]["namespace"] for side in "ab"] == [OTHER.namespace(), NAMESPACE]
    identity: Identity = replace(IDENTITY, tenant="red")
    Path("Qwen3-0.6B").write_bytes(identity.canonical())
    document = run("diff", "Qwen3-0.6B", "acme/tiny", "--json").document
    assert document["a"]["namespace"] == identity.namespace()
