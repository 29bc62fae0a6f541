"""``objkv diff``."""

from dataclasses import replace
from pathlib import Path

import pytest

from objkv.keys.identity import Identity, identity_path
from tests.cli.conftest import Machine, Run, refused
from tests.support.samples import IDENTITY, NAMESPACE, save_identity

OTHER = replace(IDENTITY, tenant="other", chunk_tokens=32)
NOWHERE = "redis://127.0.0.1:1"


@pytest.fixture
def two(machine: Machine) -> Machine:
    """Store the documents of two replicas; only one of them has saved chunks."""
    machine.fill()
    save_identity(machine.bulk, OTHER)
    return machine


def written(identity: Identity, path: Path) -> str:
    path.write_bytes(identity.canonical())
    return str(path)


def test_two_namespaces_are_compared_by_their_beginnings(run: Run, two: Machine) -> None:
    ran = run("diff", NAMESPACE[:8], OTHER.namespace()[:8])
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert NAMESPACE in lines[1]
    assert OTHER.namespace() in lines[2]
    for words in ("tenant", "chunk_tokens", "they do not share: chunk_tokens and tenant differ"):
        assert words in ran.out
    assert "tenants never share" in ran.out
    whole = run("diff", NAMESPACE, OTHER.namespace(), "--index-url", NOWHERE)
    assert whole.code == 1, "whole names need no index"


def test_files_logs_and_standard_input_need_no_store(run: Run, tmp_path: Path) -> None:
    ends = ("--index-url", NOWHERE)
    file = written(IDENTITY, tmp_path / "identity.json")
    log = f"INFO objkv identity namespace=x document={OTHER.canonical().decode()}\n"
    (tmp_path / "replica.log").write_text(log)
    assert run("diff", file, str(tmp_path / "replica.log"), *ends).code == 1
    assert run("diff", "-", file, *ends, stdin=log).code == 1
    assert run("diff", file, "-", *ends, stdin=IDENTITY.canonical().decode()).code == 0


def test_a_namespace_that_is_not_there_is_2(run: Run, two: Machine) -> None:
    far = run("diff", NAMESPACE, "0123456789abcdef" * 2)
    assert (far.code, far.err.count("\n")) == (2, 1)
    assert "give the replica's log, which has its identity" in far.err


def test_files_that_are_no_documents_are_2(run: Run, tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\xff\xd8")
    (tmp_path / "some.log").write_text("nothing\n")
    for name, words in (("image.png", "not UTF-8"), ("some.log", "no identity document")):
        refused(run("diff", str(tmp_path / name), NAMESPACE), words)


@pytest.mark.parametrize("content", [b"{}", b"not json", OTHER.canonical()])
def test_a_document_that_is_not_the_namespace_s_is_1(
    run: Run, machine: Machine, content: bytes
) -> None:
    machine.bulk.put(identity_path(NAMESPACE), content)
    refused(run("diff", NAMESPACE, NAMESPACE), f"{NAMESPACE}/identity.json", code=1)
