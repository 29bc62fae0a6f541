"""``objkv export`` and ``objkv import``: from one cache to another."""

import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from objkv.codec.payload import Claim, LayerSpec, Provenance, encode, read_header
from objkv.errors import StoreDenied
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.index.shapes import SHAPES_HASH
from objkv.index.sqlite.index import SqliteIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import identity_path
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.ops.backends_view import HANDOFF_LAYOUT
from objkv.ops.export.manifest import ManifestWriter, read_head, read_lines
from objkv.stores.base import Buffer
from objkv.stores.local import LocalStore
from objkv.testing.damage import main as damage
from tests.cli.conftest import Machine, Run, refused
from tests.support.samples import (
    CHUNK,
    IDENTITY,
    NAMESPACE,
    TOKENS,
    WHOLE,
    payload_of,
    record_of,
    save,
    save_identity,
)
from tests.support.servers.redis import wait_until


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


def test_an_export_is_a_cache_of_its_own(run: Run, machine: Machine, out: Path) -> None:
    machine.fill()
    exported(run, out, "--namespace", NAMESPACE)
    stdin = " ".join(map(str, TOKENS))
    ran = run("match", "--json", "--bulk-url", f"file://{out}", stdin=stdin)
    assert ran.document["usable_tokens"] == 3 * CHUNK


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


def test_a_record_that_was_lost_comes_back_with_an_import(
    run: Run, machine: Machine, out: Path
) -> None:
    machine.fill()
    exported(run, out, "--namespace", NAMESPACE)
    machine.index.drop(NAMESPACE, prefix_hashes(NAMESPACE, TOKENS, CHUNK)[1])
    document = run("import", str(out), "--apply", "--json").document
    assert (document["present"], document["indexed"]) == (4, 2)
    stdin = " ".join(map(str, TOKENS))
    assert run("match", "--json", stdin=stdin).document["usable_tokens"] == 3 * CHUNK


def test_payloads_can_be_compressed_on_their_way_in(
    run: Run, machine: Machine, out: Path, tmp_path: Path, elsewhere: tuple[str, ...]
) -> None:
    machine.fill()
    exported(run, out, "--namespace", NAMESPACE)
    assert run("import", str(out), "--apply", "--codec", "zstd", *elsewhere).code == 0
    files = list((tmp_path / "other").rglob("*.safetensors"))
    assert {read_header(file.read_bytes()).codec for file in files} == {"zstd"}
    assert run("verify", "--all", *elsewhere).code == 0
    assert run("import", str(out), "--apply", "--codec", "best", *elsewhere).code == 2


def test_a_prompt_exports_what_of_it_would_be_served(run: Run, machine: Machine, out: Path) -> None:
    machine.fill()
    prompt = [*TOKENS[: 2 * CHUNK], *range(9_000, 9_000 + CHUNK)]
    document = exported(run, out, "--tokens", "-", stdin=json.dumps(prompt))
    assert document["exported"] == 4
    ran = run("export", "--out", str(out) + "2", "--tokens", "-", stdin="1 2 3")
    assert ran.code == 1
    assert "no part of this prompt would be served" in ran.err


def test_a_prefix_exports_all_before_it_and_on_demand_all_below_it(
    run: Run, machine: Machine, out: Path
) -> None:
    save_identity(machine.bulk)
    for end in (500, 700):
        save(machine.bulk, machine.index, [*TOKENS[: 2 * CHUNK], *range(end, end + CHUNK)])
    second = prefix_hashes(NAMESPACE, TOKENS, CHUNK)[1].hex()
    assert exported(run, out, "--prefix", second[:12])["exported"] == 2
    assert exported(run, Path(f"{out}2"), "--prefix", second, "--below")["exported"] == 4
    ran = run("export", "--out", f"{out}3", "--prefix", "0" * 40)
    assert (ran.code, "no chunk starts with" in ran.err) == (1, True)


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


def test_an_export_that_was_interrupted_goes_on(run: Run, machine: Machine, out: Path) -> None:
    machine.fill()
    exported(run, out, "--namespace", NAMESPACE)
    (out / "manifest.jsonl").rename(out / "manifest.jsonl.part")
    files = sorted(out.rglob("*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    document = exported(run, out, "--namespace", NAMESPACE)
    assert (document["kept"], document["exported"]) == (4, 2)
    ran = run("export", "--out", str(out), "--namespace", NAMESPACE)
    assert (ran.code, "already contains a complete export" in ran.err) == (2, True)


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


def test_layers_that_the_model_does_not_have_are_refused(
    run: Run, machine: Machine, out: Path, elsewhere: tuple[str, ...]
) -> None:
    group = replace(IDENTITY.groups[0], layers=("x.0", "x.1"))
    other = replace(IDENTITY, groups=(group,))
    name = other.namespace()
    machine.bulk.put(identity_path(name), other.canonical())
    [digest] = prefix_hashes(name, TOKENS[:CHUNK], CHUNK)
    chunk = ChunkEntry(name, digest, root_hash(name), 0, CHUNK)
    key = ChunkKey(name, digest, 0, WHOLE)
    payload = payload_of(key, chunk, TOKENS, "none")
    machine.bulk.put(key.path(), payload)
    machine.index.publish(chunk, {key.field: record_of(read_header(payload))}, ttl_s=60)
    exported(run, out, "--namespace", name)
    ran = run("import", str(out), "--apply", "--json", *elsewhere)
    assert (ran.code, ran.document["refused"]) == (1, 1)
    assert "its layers differ from those of group 0" in ran.document["findings"][0]["detail"]


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "--out", "x"), "give --namespace, --prefix or a prompt"),
        (("export", "--out", "x", "--prefix", "zz"), "4 to 40 hex digits"),
        (("export", "--out", "x", "--namespace", "a", "--below"), "--below needs --prefix"),
        (("import", "/nowhere"), "not a complete export"),
    ],
)
def test_wrong_usage_is_2_and_a_sentence(
    run: Run, machine: Machine, arguments: tuple[str, ...], words: str
) -> None:
    refused(run(*arguments), words)


def test_the_bulk_store_itself_is_no_place_for_an_export(
    run: Run, machine: Machine, home: Path
) -> None:
    machine.fill()
    inside = home / "objkv" / "chunks" / "out"
    ran = run("export", "--out", str(inside), "--namespace", NAMESPACE)
    assert (ran.code, "inside the bulk store" in ran.err) == (2, True)
    assert not inside.exists()


def test_more_than_the_quota_allows_is_not_brought_in(
    run: Run,
    machine: Machine,
    out: Path,
    elsewhere: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.fill()
    exported(run, out, "--namespace", NAMESPACE)
    monkeypatch.setenv("OBJKV_QUOTA_BYTES", "10000")
    planned = run("import", str(out), "--json", *elsewhere)
    assert (planned.code, planned.err.count("refuse")) == (1, 0)
    assert "would exceed quota_bytes" in planned.document["refusal"]
    assert "--apply would be refused: tenant default" in run("import", str(out), *elsewhere).out
    ran = run("import", str(out), "--apply", *elsewhere)
    assert (ran.code, "would exceed quota_bytes" in ran.err) == (2, True)


def test_an_import_that_goes_on_believes_the_cache_and_not_what_it_did_before(
    run: Run,
    machine: Machine,
    out: Path,
    elsewhere: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sweep ran between the export and the import."""
    machine.fill()
    exported(run, out, "--namespace", NAMESPACE)
    monkeypatch.setattr("objkv.ops.export.import_._LINES_AT_ONCE", 1)
    put, left = LocalStore.put_if_absent, iter(range(4))

    def put_some(store: LocalStore, key: str, value: bytes) -> bool:
        if next(left, None) is None:
            raise StoreDenied("the disk is full")
        return put(store, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put_if_absent", put_some)
        assert run("import", str(out), "--apply", "--workers", "1", *elsewhere).code != 0
    there = list((tmp_path / "other").rglob("*.safetensors"))
    assert len(there) == 3
    for file in there:
        file.unlink()
    (tmp_path / "other.sqlite").unlink()
    ran = run("import", str(out), "--apply", "--workers", "1", "--json", *elsewhere)
    assert (ran.code, ran.document["added"]) == (0, 6)
    assert len(list((tmp_path / "other").rglob("*.safetensors"))) == 6


def test_what_is_stored_already_does_not_count_twice_against_a_quota(
    run: Run,
    machine: Machine,
    out: Path,
    elsewhere: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.fill()
    document = exported(run, out, "--namespace", NAMESPACE)
    nbytes = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
    assert document["exported"] == 6
    other = replace(IDENTITY, tenant="another")
    there = LocalStore(tmp_path / "other")
    there.put(identity_path(other.namespace()), other.canonical())
    huge = ShardRecord(10 * nbytes, 10 * nbytes, "none", False, "0" * 32, 1)
    chunk = ChunkEntry(other.namespace(), bytes(20), bytes(20), 0, CHUNK)
    SqliteIndex(tmp_path / "other.sqlite").publish(chunk, {"0.L0-2_H0-2": huge}, ttl_s=600)
    monkeypatch.setenv("OBJKV_QUOTA_BYTES", str(nbytes))
    for added in (6, 0):
        ran = run("import", str(out), "--apply", "--json", *elsewhere)
        assert (ran.code, ran.document["added"]) == (0, added), ran.err
    monkeypatch.setenv("OBJKV_QUOTA_BYTES", str(nbytes - 1))
    assert run("import", str(out), "--apply", *elsewhere).code == 0, "nothing is added"


OBJKV = Path(sys.executable).with_name("objkv")
PROMPTS = 120
"""Far more chunks than an export takes between its first file and the end of an interrupt."""


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


def test_two_exports_into_one_folder_are_one_too_many(
    run: Run, machine: Machine, out: Path
) -> None:
    machine.fill()
    out.mkdir()
    first = ManifestWriter(out)
    ran = run("export", "--out", str(out), "--namespace", NAMESPACE)
    assert (ran.code, "another export" in ran.err) == (2, True)
    head = first.finish("1", 1)
    first.close()
    assert list(read_lines(out, read_head(out))) == []
    assert head.payloads == 0


def test_a_file_of_the_same_name_that_is_another_payload_is_replaced(
    run: Run, machine: Machine, out: Path
) -> None:
    save_identity(machine.bulk)
    first, second, *_ = save(machine.bulk, machine.index)
    exported(run, out, "--namespace", NAMESPACE)
    right = files(out)
    layers = [LayerSpec(name, "BF16", (2, 2, 8, 8)) for name in ("l.0", "l.1")]
    told = Provenance(token_digest(TOKENS[:CHUNK]), "host-1:4242", 1_700_000_000)
    for key, parent, content in ((first, b"\7" * 20, 0), (second, first.prefix_hash, 9)):
        start = 0 if key == first else CHUNK
        claim = Claim(key, parent, start, start + CHUNK)
        pages = [bytes([content]) * layer.nbytes for layer in layers]
        LocalStore(out).put(key.path(), encode(claim, layers, pages, codec="none", provenance=told))
    (out / "manifest.jsonl").rename(out / "manifest.jsonl.part")
    document = exported(run, out, "--namespace", NAMESPACE)
    assert (document["kept"], document["exported"]) == (1, 2)
    assert {name: files(out)[name] for name in right if name.endswith("s")} == {
        name: content for name, content in right.items() if name.endswith("s")
    }


def test_token_ids_are_left_out_also_of_what_was_there(
    run: Run, machine: Machine, out: Path
) -> None:
    machine.fill()
    exported(run, out, "--namespace", NAMESPACE)
    (out / "manifest.jsonl").rename(out / "manifest.jsonl.part")
    assert exported(run, out, "--namespace", NAMESPACE, "--without-tokens")["kept"] == 6


def test_hand_offs_are_not_exported(run: Run, machine: Machine, out: Path) -> None:
    other = replace(IDENTITY, page_layout=HANDOFF_LAYOUT)
    save_identity(machine.bulk, other)
    ran = run("export", "--out", str(out), "--namespace", other.namespace())
    assert (ran.code, "hand-offs" in ran.err) == (2, True)
    assert not out.exists()


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


def save_many(machine: Machine) -> None:
    """Many chunks at once: no file is synced, and no record is looked up."""
    save_identity(machine.bulk)
    assert list(machine.index.scan(NAMESPACE)) == []

    class Quick(LocalStore):
        def put_if_absent(self, key: str, value: Buffer) -> bool:
            path = Path(self._root, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(value)
            return True

    save(Quick(Path(machine.bulk._root)), None, range(PROMPTS * CHUNK))


def test_an_export_that_is_interrupted_keeps_what_it_has_and_goes_on(
    run: Run, machine: Machine, home: Path, out: Path
) -> None:
    save_many(machine)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OBJKV_")}
    arguments = ("export", "--out", str(out), "--namespace", NAMESPACE, "--workers", "1", "--json")
    with subprocess.Popen(
        [str(OBJKV), *arguments],
        env={**environ, "XDG_CACHE_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        wait_until(
            lambda: any(out.rglob("*.safetensors")) or process.poll() is not None,
            "the first file",
            bound_s=120,
        )
        process.send_signal(signal.SIGINT)
        told, err = process.communicate(timeout=280)
    first = json.loads(told)
    assert (process.returncode, err, first["ending"]) == (130, b"", "interrupted")
    assert not (out / "manifest.jsonl").exists()
    there = len(list(out.rglob("*.safetensors")))
    assert 0 < first["exported"] <= there < PROMPTS
    assert run("import", str(out)).code == 2

    second = run(*arguments[:5], "--json").document
    assert (second["ending"], second["kept"]) == ("complete", there)
    assert second["kept"] + second["exported"] == PROMPTS == second["manifest"]["payloads"]
    assert not (out / "manifest.jsonl.part").exists()
