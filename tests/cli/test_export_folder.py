"""Where an export goes: a folder that is its own, others may not read, and that it can go on in."""

import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from objkv.codec.payload import Claim, LayerSpec, Provenance, encode
from objkv.index.sqlite.index import SqliteIndex
from objkv.keys.prefix import token_digest
from objkv.ops.backends_view import HANDOFF_LAYOUT
from objkv.ops.export.manifest import ManifestWriter, read_head, read_lines
from objkv.stores.base import Buffer
from objkv.stores.local import LocalStore
from tests.cli.conftest import Machine, Run
from tests.cli.test_export import exported
from tests.ops.world import CHUNK, IDENTITY, NAMESPACE, TOKENS, save, save_identity
from tests.support.servers.redis import wait_until

OBJKV = Path(sys.executable).with_name("objkv")
PROMPTS = 120
"""Far more chunks than an export takes between its first file and the end of an interrupt."""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


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
    assert (ran.code, "others may enter" in ran.err) == (0, True)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*")}
    assert modes == {0o600, 0o700}
    again = run("export", "--out", f"{out}2", "--namespace", NAMESPACE)
    assert (again.code, again.err) == (0, "")


def save_many(machine: Machine) -> None:
    """Many chunks at once: no file is synced, and no record is asked for."""
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
    assert run("import", str(out), "--dry-run").code == 2

    second = run(*arguments[:5], "--json").document
    assert (second["ending"], second["kept"]) == ("complete", there)
    assert second["kept"] + second["exported"] == PROMPTS == second["manifest"]["payloads"]
    assert not (out / "manifest.jsonl.part").exists()
