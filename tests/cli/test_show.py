"""``objkv show``."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Machine, Run
from tests.support.samples import CHUNK, NAMESPACE, save, save_identity


def path_of(home: Path, digest: str) -> Path:
    folder = home / "objkv" / "chunks" / NAMESPACE / digest[:2] / digest
    return folder / "0.L0-2_H0-1.safetensors"


def test_a_chunk_is_shown_with_all_its_payloads(run: Run, machine: Machine) -> None:
    digest = machine.fill()[0]
    ran = run("show", digest[:8])
    assert ran.code == 0
    for words in ("0.L0-2_H0-1.safetensors", "0.L0-2_H1-2.safetensors", "host-1:4242", "0-16"):
        assert words in ran.out
    whole = ("--namespace", NAMESPACE, "--index-url", "redis://127.0.0.1:1")
    assert run("show", digest[:12], *whole).code == 0, "it needs no index"


def test_a_payload_without_a_shard_is_shown_to_have_all_of_the_group(
    run: Run, machine: Machine
) -> None:
    save_identity(machine.bulk)
    (key,) = save(machine.bulk, None, range(CHUNK))
    ran = run("show", key.path())
    assert [line for line in ran.out.splitlines() if line.startswith("shard")] == [
        "shard            all of the group"
    ]
    assert "group.safetensors" in run("show", "a/b").err, "the form of its name"


def test_what_is_missing_is_1_and_told(run: Run, machine: Machine, home: Path) -> None:
    digest = machine.fill()[0]
    path_of(home, digest).unlink()
    document = run("show", digest, "--json").document
    assert document["verdict"] == "missing"
    assert [payload["verdict"] for payload in document["payloads"]] == ["missing", "ok"]
    ran = run("show", "ffff")
    assert (ran.code, ran.out) == (1, "ffff is not in the bulk store\n")


def test_a_beginning_of_several_lists_what_can_be_given_instead(
    run: Run, machine: Machine, home: Path
) -> None:
    digest = machine.fill()[0]
    other = digest[:4] + "f" * 36
    path = path_of(home, other)
    path.parent.mkdir(parents=True)
    path.write_bytes(path_of(home, digest).read_bytes())
    ran = run("show", digest[:4])
    assert (ran.code, ran.out) == (2, "")
    choices = ran.err.strip().partition("; give one of ")[2].split(", ")
    assert sorted(choices) == sorted([digest, other])
    assert run("show", other).code == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda own, other: own[:200] + bytes([own[200] ^ 1]) + own[201:], "header: "),
        (lambda own, other: own[:-1] + bytes([own[-1] ^ 1]), "the checksum of layer 'l.1'"),
        *((lambda own, other, n=n: own[:n], "") for n in (0, 1, 100, 4096, -1)),
        (lambda own, other: own + b"x", "but the header states"),
        (lambda own, other: other, "claims to be "),
    ],
)
def test_every_damage_is_told(
    run: Run, machine: Machine, change: Callable[..., bytes], problem: str
) -> None:
    save_identity(machine.bulk)
    one, other, _ = save(machine.bulk, None)
    machine.bulk.put(
        one.path(), change(machine.bulk.get(one.path()), machine.bulk.get(other.path()))
    )
    ran = run("show", one.path(), "--json")
    [payload] = ran.document["payloads"]
    assert (ran.code, payload["verdict"], problem in payload["problem"]) == (1, "corrupt", True)
    assert payload["problem"] in " ".join(run("show", one.path()).out.split())
