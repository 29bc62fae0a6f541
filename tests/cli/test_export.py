"""``objkv export`` and ``objkv import``: from one cache to another."""

import json
import secrets
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from objkv.codec.payload import read_header
from objkv.index.shapes import SHAPES_HASH
from objkv.index.sqlite.index import SqliteIndex
from objkv.keys.identity import identity_path
from objkv.stores.local import LocalStore
from tests.cli.conftest import Machine, Run, refused
from tests.contracts.damage import main as damage
from tests.support.samples import (
    CHUNK,
    IDENTITY,
    NAMESPACE,
    TOKENS,
    save,
    save_identity,
)


@pytest.fixture
def elsewhere(tmp_path: Path) -> tuple[str, str, str, str]:
    """Return the options of another, empty cache."""
    (tmp_path / "other").mkdir()
    index = f"sqlite://{tmp_path}/other.sqlite"
    return ("--bulk-url", f"file://{tmp_path}/other", "--index-url", index)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def exported(run: Run, out: Path, *options: str, stdin: str = "") -> dict[str, object]:
    ran = run("export", "--out", str(out), "--json", *options, stdin=stdin)
    assert ran.code == 0, ran.err
    document = ran.document
    assert isinstance(document, dict)
    return document


def test_a_namespace_is_exported_as_files_that_any_safetensors_reader_opens(
    run: Run, machine: Machine, out: Path
) -> None:
    hashes = machine.fill()
    document = exported(run, out, "--namespace", NAMESPACE[:6])
    assert (document["exported"], document["complete"]) == (6, True)
    files = sorted(out.rglob("*.safetensors"))
    assert {file.parent.name for file in files} == set(hashes)
    for file in files:
        with safe_open(file, framework="np") as opened:
            assert opened.keys() == ["l.0", "l.1"]
            metadata = opened.metadata()
            assert metadata["format"] == "objkv/1"
            assert int(metadata["token_end"]) - int(metadata["token_start"]) == CHUNK
        assert read_header(file.read_bytes()).codec == "none"
    assert (out / identity_path(NAMESPACE)).read_bytes() == IDENTITY.canonical()
    head, *lines = [json.loads(line) for line in (out / "manifest.jsonl").open()]
    assert (head["payloads"], len(lines)) == (6, 6)
    assert out.stat().st_mode & 0o077 == 0


def test_what_is_exported_comes_back_byte_for_byte(
    run: Run, machine: Machine, out: Path, tmp_path: Path, elsewhere: tuple[str, ...]
) -> None:
    machine.fill()
    exported(run, out, "--namespace", NAMESPACE)
    ran = run("import", str(out), "--apply", "--json", *elsewhere)
    assert (ran.code, ran.document["added"], ran.document["new_namespaces"]) == (0, 6, 1)
    assert "is new in this cache" in ran.err
    there = LocalStore(tmp_path / "other")
    for file in out.rglob("*.safetensors"):
        assert there.get(str(file.relative_to(out))) == file.read_bytes()
    stdin = " ".join(map(str, TOKENS))
    assert run("match", "--json", *elsewhere, stdin=stdin).document["usable_tokens"] == 3 * CHUNK
    assert run("verify", "--all", *elsewhere).code == 0
    [shapes] = SqliteIndex(tmp_path / "other.sqlite").lookup(NAMESPACE, [SHAPES_HASH])
    assert shapes is not None
    assert len(shapes.shards) == 2
    again = run("import", str(out), "--apply", "--json", *elsewhere)
    assert (again.code, again.document["present"], again.document["added"]) == (0, 6, 0)


def test_a_corrupt_payload_is_not_exported_and_is_told(
    run: Run, machine: Machine, out: Path
) -> None:
    machine.fill()
    [entry, *_] = [e for e in machine.bulk.scan(NAMESPACE) if e.key.endswith(".safetensors")]
    payload = bytearray(machine.bulk.get(entry.key) or b"")
    payload[-1] ^= 1
    machine.bulk.put(entry.key, bytes(payload))
    ran = run("export", "--out", str(out), "--namespace", NAMESPACE)
    assert ran.code == 1
    assert f"corrupt  {entry.key}" in ran.out
    assert not (out / entry.key).exists()
    assert len(list(out.rglob("*.safetensors"))) == 5


def test_what_was_changed_on_the_way_is_refused_and_the_rest_is_brought_in(
    run: Run, machine: Machine, out: Path, elsewhere: tuple[str, ...]
) -> None:
    machine.fill()
    exported(run, out, "--namespace", NAMESPACE)
    first, second, *_ = sorted(out.rglob("*.safetensors"))
    changed = bytearray(first.read_bytes())
    changed[-1] ^= 1
    first.write_bytes(changed)
    second.unlink()
    ran = run("import", str(out), "--apply", "--json", *elsewhere)
    assert ran.code == 1
    told = {kind: ran.document[kind] for kind in ("added", "refused", "missing")}
    assert told == {"added": 4, "refused": 1, "missing": 1}
    assert any("SHA-256" in finding["detail"] for finding in ran.document["findings"])


def test_a_payload_under_another_name_is_refused(
    run: Run, machine: Machine, out: Path, elsewhere: tuple[str, ...]
) -> None:
    """The manifest has its correct SHA-256, but its header claims another name."""
    machine.fill()
    exported(run, out, "--namespace", NAMESPACE)
    first, second, *_ = sorted(out.rglob("*.safetensors"))
    lines = (out / "manifest.jsonl").read_text().splitlines()
    shutil.copy(first, second)
    sums = {json.loads(line)["key"]: json.loads(line)["sha256"] for line in lines[1:]}
    old, new = (str(file.relative_to(out)) for file in (second, first))
    text = "\n".join(lines).replace(sums[old], sums[new]) + "\n"
    (out / "manifest.jsonl").write_text(text)
    document = run("import", str(out), "--apply", "--json", *elsewhere).document
    assert document["refused"] == 1
    assert "claims to be" in document["findings"][0]["detail"]


def test_a_foreign_namespace_is_refused_unless_its_identity_comes_along(
    run: Run, machine: Machine, out: Path, elsewhere: tuple[str, ...], tmp_path: Path
) -> None:
    machine.fill()
    exported(run, out, "--namespace", NAMESPACE)
    document = out / identity_path(NAMESPACE)
    other = replace(IDENTITY, tenant="other")
    for wrong in (None, other.canonical(), b"{}"):
        document.unlink(missing_ok=True)
        if wrong is not None:
            document.write_bytes(wrong)
        refused(run("import", str(out), "--apply", *elsewhere), "a foreign namespace")
        assert list((tmp_path / "other").rglob("*.safetensors")) == []
    LocalStore(tmp_path / "other").put(identity_path(NAMESPACE), IDENTITY.canonical())
    document.unlink(missing_ok=True)
    assert run("import", str(out), "--apply", *elsewhere).code == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("objkv-export-1", "objkv-export-9"),
        lambda text: text.replace(NAMESPACE, "../../etc", 3),
        lambda text: "[]\n",
        lambda text: text + text.splitlines()[1] + "\n",
    ],
    ids=["cut short", "another version", "a way out", "no object", "one too many"],
)
def test_a_spoilt_manifest_is_refused_before_anything_is_touched(
    run: Run,
    machine: Machine,
    out: Path,
    elsewhere: tuple[str, ...],
    spoil: Callable[[str], str],
) -> None:
    machine.fill()
    exported(run, out, "--namespace", NAMESPACE)
    manifest = out / "manifest.jsonl"
    manifest.write_text(spoil(manifest.read_text()))
    refused(run("import", str(out), "--apply", *elsewhere), "manifest.jsonl: ")


def test_a_sealed_namespace_is_exported_plain_and_sealed_anew(
    run: Run, out: Path, home: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: tuple[str, ...]
) -> None:
    for kind in ("signing", "encryption"):
        keys = home / kind
        keys.write_text(f"one * {secrets.token_hex(32)}\n")
        keys.chmod(0o600)
        monkeypatch.setenv(f"OBJKV_{kind.upper()}_KEYS_FILE", str(keys))
    bulk, index = home / "objkv" / "chunks", home / "objkv" / "index.sqlite"
    bulk.mkdir(parents=True)
    damage(["--bulk-url", f"file://{bulk}", "--index-url", f"sqlite://{index}", "--good", "8"])
    [name] = {entry.key[:32] for entry in LocalStore(bulk).scan("")}
    exported(run, out, "--namespace", name)
    plain = [read_header(file.read_bytes()) for file in out.rglob("*.safetensors")]
    assert {(h.marks.signed_by, h.marks.encrypted_by) for h in plain} == {("", "")}
    (out / "manifest.jsonl").rename(out / "manifest.jsonl.part")
    assert exported(run, out, "--namespace", name)["kept"] == len(plain) > 0
    assert run("import", str(out), "--apply", *elsewhere).code == 0
    there = [read_header(f.read_bytes()) for f in (home / "other").rglob("*.safetensors")]
    assert {(h.marks.signed_by, h.marks.encrypted_by) for h in there} == {("one", "one")}
    assert run("verify", "--all", *elsewhere).code == 0
    monkeypatch.delenv("OBJKV_ENCRYPTION_KEYS_FILE")
    assert run("import", str(out), "--apply", *elsewhere).code == 2


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_a_live_cache_is_no_place_for_an_export(
    run: Run, machine: Machine, tmp_path: Path, out: Path
) -> None:
    machine.fill()
    save_identity(LocalStore(out))
    save(LocalStore(out), SqliteIndex(tmp_path / "live.sqlite"), codec="zstd")
    before = files(out)
    ran = run("export", "--out", str(out), "--namespace", NAMESPACE)
    assert (ran.code, "is not empty" in ran.err) == (2, True)
    assert files(out) == before


def test_what_is_written_is_for_nobody_else_and_an_open_folder_is_told(
    run: Run, machine: Machine, out: Path
) -> None:
    machine.fill()
    out.mkdir()
    out.chmod(0o755)
    ran = run("export", "--out", str(out), "--namespace", NAMESPACE)
    assert (ran.code, "other users can access" in ran.err) == (0, True)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*")}
    assert modes == {0o600, 0o700}
    again = run("export", "--out", f"{out}2", "--namespace", NAMESPACE)
    assert (again.code, again.err) == (0, "")
