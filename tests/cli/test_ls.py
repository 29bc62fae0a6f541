"""``objkv ls``."""

from pathlib import Path

import pytest

from objkv.keys.identity import identity_path
from tests.cli.conftest import Machine, Run
from tests.support.samples import CHUNK, NAMESPACE, save, save_identity


def test_namespaces_are_listed_for_people(run: Run, machine: Machine) -> None:
    machine.fill()
    ran = run("ls")
    assert ran.code == 0
    header, row, tenant = ran.out.splitlines()
    assert header.split()[:2] == ["namespace", "model"]
    assert row.split()[:3] == [NAMESPACE, "acme/tiny", "default"]
    assert tenant.startswith("tenant default: ")
    assert "6 payloads; counted 0 s ago" in tenant


def test_what_tenants_have_is_told_with_their_quota(run: Run, machine: Machine) -> None:
    machine.fill()
    document = run("ls", "--json").document
    [tenant] = document["tenants"]
    assert list(tenant) == ["tenant", "namespaces", "nbytes", "payloads", "counted_s"]
    assert (tenant["tenant"], tenant["payloads"]) == ("default", 6)
    assert tenant["nbytes"] == document["namespaces"][0]["nbytes"]
    assert document["quota_bytes"] > 0, "of the user's own folder"
    machine.bulk.delete(identity_path(NAMESPACE))
    assert run("ls", "--json").document["tenants"][0]["tenant"] is None
    assert "\nunknown tenant: " in run("ls").out


@pytest.mark.parametrize("options", [(NAMESPACE,), (NAMESPACE[:6],), ("--prefixes",)])
def test_prefixes_are_listed(run: Run, machine: Machine, options: tuple[str, ...]) -> None:
    hashes = machine.fill()
    document = run("ls", "--json", *options).document
    assert list(document) == ["prefixes", "omitted"]
    [prefix] = document["prefixes"]
    assert (prefix["root"], prefix["leaf"]) == (hashes[0], hashes[2])
    assert hashes[2] in run("ls", *options).out


def test_a_chain_without_its_beginning_is_marked(run: Run, machine: Machine) -> None:
    hashes = machine.fill()
    machine.index.drop(NAMESPACE, bytes.fromhex(hashes[0]))
    assert "unusable: tokens before 16 are gone" in run("ls", NAMESPACE).out


def test_rows_over_the_limit_are_counted(run: Run, machine: Machine) -> None:
    machine.fill()
    machine.bulk.put("ab" * 16 + "/identity.json", b"{}")
    document = run("ls", "--bulk", "--limit", "1", "--json").document
    assert (len(document["namespaces"]), document["omitted"]) == (1, 1)
    assert "1 more; raise --limit to list them" in run("ls", "--bulk", "--limit", "1").out


def test_the_bulk_store_is_counted_although_the_index_is_down(run: Run, machine: Machine) -> None:
    machine.fill()
    assert run("ls", "--bulk", "--index-url", "redis://127.0.0.1:1").code == 0
    assert run("ls", "--bulk", NAMESPACE, "--index-url", "redis://127.0.0.1:1").code == 0


def test_a_document_that_cannot_be_read_is_told(run: Run, machine: Machine) -> None:
    machine.fill()
    machine.bulk.put(f"{NAMESPACE}/identity.json", b"\x1b[31m")
    ran = run("ls")
    assert ran.code == 0
    assert "not an identity document" in ran.out


def test_a_tree_shows_what_prompts_share_and_where_they_part(run: Run, machine: Machine) -> None:
    save_identity(machine.bulk)
    shared = list(range(2 * CHUNK))
    for end in (500, 700):
        save(machine.bulk, machine.index, [*shared, *range(end, end + CHUNK)])
    ran = run("ls", "--tree")
    assert ran.code == 0
    head, name, root, first, second = ran.out.splitlines()
    assert head.split()[:3] == ["prefix", "tokens", "chunks"]
    assert name == NAMESPACE
    assert root.startswith("└─ ")
    assert root.split()[2:4] == ["0-32", "2"]
    assert first.startswith("   ├─ ")
    assert second.startswith("   └─ ")
    document = run("ls", "--tree", "--json", "--limit", "2").document
    assert (len(document["branches"]), document["omitted"]) == (2, 1)
    assert document["branches"][0]["leaves"] == 2
    assert run("ls", "--tree", "--prefixes").code == 2


@pytest.mark.parametrize(
    "words", [("ls",), ("ls", "--bulk"), ("audit",), ("verify",), ("match", "--tokens", "1 2 3")]
)
def test_a_command_that_reads_creates_no_index(
    run: Run, machine: Machine, home: Path, words: tuple[str, ...]
) -> None:
    save_identity(machine.bulk)
    save(machine.bulk, None)
    run(*words)
    assert [file.name for file in (home / "objkv").iterdir() if "index" in file.name] == []
