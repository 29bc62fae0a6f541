"""``objkv ls``."""

from pathlib import Path

import pytest

from objkv.keys.identity import identity_path
from tests.cli.conftest import Machine, Run
from tests.support.samples import CHUNK, NAMESPACE, save, save_identity


def test_namespaces_and_what_tenants_have_of_their_quota_are_listed(
    run: Run, machine: Machine
) -> None:
    machine.fill()
    ran = run("ls")
    assert ran.code == 0
    header, row, tenant = ran.out.splitlines()
    assert header.split()[:2] == ["namespace", "model"]
    assert row.split()[:3] == [NAMESPACE, "acme/tiny", "default"]
    assert tenant.startswith("tenant default: ")
    assert "6 payloads; counted 0 s ago" in tenant
    document = run("ls", "--json").document
    [tenant] = document["tenants"]
    assert list(tenant) == ["tenant", "namespaces", "nbytes", "payloads", "counted_s"]
    assert (tenant["tenant"], tenant["payloads"]) == ("default", 6)
    assert tenant["nbytes"] == document["namespaces"][0]["nbytes"]
    assert document["quota_bytes"] > 0, "of the user's own folder"
    machine.bulk.delete(identity_path(NAMESPACE))
    assert run("ls", "--json").document["tenants"][0]["tenant"] is None
    assert "\nunknown tenant: " in run("ls").out


def test_prefixes_are_named_alike_in_a_tree_and_in_an_audit(run: Run, machine: Machine) -> None:
    leaf = machine.fill()[-1]
    for index in ((), ("--index-url", "bulk:")):
        [branch] = run("ls", "--tree", "--json", *index).document["branches"]
        [prefix] = run("ls", "--prefixes", "--json", *index).document["prefixes"]
        [root] = run("audit", "--json", *index).document["tree"]
        assert branch["hash"] == prefix["leaf"] == root["hash"] == leaf
        assert (branch["chunks"], prefix["chunks"], root["tree_chunks"]) == (3, 3, 3)
        hits = None if index else 0  # a folder that is its own index counts none
        assert branch["hits"] == prefix["hits"] == root["hits"] == hits


def test_an_index_without_records_is_noted_if_payloads_are_stored(
    run: Run, machine: Machine, home: Path
) -> None:
    machine.fill()
    for words in ("ls", "ls --tree", "ls --prefixes --json"):
        ran = run(*words.split(), "--index-url", f"sqlite://{home}/typo.sqlite")
        assert (
            "no records, but the bulk store has payloads of 1 namespace, which expired" in ran.err
        )
    for leaf in machine.index.scan(NAMESPACE):
        machine.index.drop(NAMESPACE, leaf.prefix_hash)
    assert f"the index has no records of {NAMESPACE}, but" in run("ls", NAMESPACE).err


def test_a_bulk_store_without_the_namespaces_of_the_index_is_noted(
    run: Run, machine: Machine, home: Path
) -> None:
    machine.fill()
    (home / "other").mkdir()
    urls = (
        "--bulk-url",
        f"file://{home}/other",
        "--index-url",
        f"sqlite://{home}/objkv/index.sqlite",
    )
    assert "the bulk store has none of the namespaces in the index" in run("ls", *urls).err


def test_rows_over_the_limit_are_counted(run: Run, machine: Machine) -> None:
    machine.fill()
    machine.bulk.put("ab" * 16 + "/identity.json", b"{}")
    document = run("ls", "--bulk", "--limit", "1", "--json").document
    assert (len(document["namespaces"]), document["omitted"]) == (1, 1)
    assert "1 more; raise --limit to list them" in run("ls", "--bulk", "--limit", "1").out


def test_the_bulk_store_is_counted_although_the_index_is_down(run: Run, machine: Machine) -> None:
    machine.fill()
    for given in ((), (NAMESPACE,)):
        ran = run("ls", "--bulk", *given, "--index-url", "redis://127.0.0.1:1", "--json")
        [found] = ran.document["namespaces"]
        assert (found["chunks"], found["payloads"], found["tokens"]) == (3, 6, 3 * CHUNK)
        assert found["nbytes"] == sum(e.nbytes for e in machine.bulk.scan("") if "/0." in e.key)


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
