"""``objkv verify``, ``sweep`` and ``rebuild`` on stores whose defects are known: they find exactly
these, mend them, and harm nothing else."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from objkv.assembly.backends import Backends, open_backends
from objkv.assembly.seal import open_seal
from objkv.cache.pins import Pin
from objkv.cli import upkeep
from objkv.cli.app import all_commands
from objkv.config import load_config
from objkv.errors import StoreDenied
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.index.sqlite.index import SqliteIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import identity_path
from objkv.ops.inventory.walk import Walk
from objkv.ops.runs import Unit
from objkv.telemetry import NullRecorder
from tests.cli.conftest import Machine, Run, refused
from tests.contracts.damage import IDENTITY, DamagedStore, Defects
from tests.support.samples import CHUNK, save, save_identity, save_in_format
from tests.support.samples import NAMESPACE as TINY
from tests.support.upkeep import (
    NAMESPACE,
    check_that_a_wiped_index_is_restored,
    check_that_all_is_found_and_mended,
    found,
    planted_as,
    records,
)

REMOVE = ("--quarantine", "--apply")


@pytest.mark.slow
def test_all_defects_are_found_and_mended(run: Run, ends: Backends) -> None:
    check_that_all_is_found_and_mended(run, ends)
    check_that_a_wiped_index_is_restored(run, ends)


@contextmanager
def own_index(home: Path) -> Iterator[tuple[Backends, tuple[str, ...]]]:
    """A folder that is its own index, and the options that name it."""
    urls = {"bulk_url": f"file://{home}/own", "index_url": "bulk:"}
    with open_backends(load_config(urls), NullRecorder()) as opened:
        yield opened, ("--bulk-url", urls["bulk_url"], "--index-url", "bulk:")


def test_a_folder_that_is_its_own_index_is_verified_and_swept(run: Run, home: Path) -> None:
    with own_index(home) as (ends, urls):
        planted = DamagedStore(ends).plant(
            Defects(good=10, header=1, frame=1, short=1, foreign=1, old_epoch=2)
        )
        wrong = planted_as(planted, corrupt=("header", "frame", "short", "foreign"))
        for options in (("--all",), ("--sample", "50")):
            assert found(run("verify", "--json", *options, *urls).document) == wrong
        old = {"old_epoch": planted["old_epoch"]}
        assert found(run("sweep", "--json", "--grace", "0", *urls).document) == old
        run("verify", "--all", *REMOVE, *urls)
        run("sweep", "--apply", "--grace", "0", *urls)
        left = [entry.key for entry in ends.bulk.scan("")]
        assert sorted(left) == sorted([*planted["good"], identity_path(NAMESPACE)])
        assert run("verify", "--all", *urls).code == 0
        assert run("rebuild", "--apply", "--json", *urls).document["own_index"] is True
        said = run("rebuild", "--apply", *urls).out
        assert said == "the bulk folder is its own index; no rebuild is needed\n"


@pytest.mark.parametrize("how", [("--all",), ("--sample", "10")])
def test_few_payloads_are_not_taken_out_of_use_because_keys_are_wrong(
    run: Run, ends: Backends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    monkeypatch.setenv("OBJKV_SIGNING_KEYS_FILE", str(tmp_path / "keys"))

    def write(secret: str) -> None:
        (tmp_path / "keys").write_text(f"key-1 * {secret}\n")
        (tmp_path / "keys").chmod(0o600)

    right = os.urandom(32).hex()
    write(right)
    config = load_config({})
    maker = DamagedStore(ends, seal=open_seal(config), seals=config.seal_kinds)
    good = maker.plant(Defects(good=10, frame=1))["good"]
    before = records(ends, NAMESPACE)
    write(os.urandom(32).hex())
    why = "payloads are sealed with keys other than the configured ones (signing ['key-1'])"
    refused(run("verify", *how, *REMOVE), why, "nothing was quarantined")
    assert records(ends, NAMESPACE) == before
    assert not list(ends.bulk.scan("quarantine/"))
    write(right)
    mended = run("verify", "--all", *REMOVE, "--json").document
    assert (mended["ok"], mended["quarantined"]) == (10, 1)
    write(os.urandom(32).hex())
    assert run("verify", *how, *REMOVE, "--force", "--json").document["quarantined"] == 10
    write(right)
    chunks = tmp_path / "objkv" / "chunks"
    for path in good:  # the way back
        (chunks / path).parent.mkdir(parents=True, exist_ok=True)
        (chunks / "quarantine" / path).rename(chunks / path)
    assert run("rebuild", "--apply", "--json").document["restored"] == 10
    assert run("verify", "--all", "--json").document["ok"] == 10


def test_nothing_is_taken_out_of_use_before_all_is_judged(run: Run, ends: Backends) -> None:
    DamagedStore(ends).plant(Defects(good=3, frame=25))
    before = records(ends, NAMESPACE)
    refused(run("verify", "--all", *REMOVE), "nothing was quarantined")
    assert records(ends, NAMESPACE) == before
    assert not list(ends.bulk.scan("quarantine/"))
    assert run("verify", "--all", *REMOVE, "--force", "--json").document["quarantined"] == 25


def test_each_payload_is_in_one_part_of_a_verification(run: Run, ends: Backends) -> None:
    planted = DamagedStore(ends).plant(Defects(good=40, frame=6, missing=2))
    checked, bad = 0, []
    for part in ("1/3", "2/3", "3/3"):
        document = run("verify", "--all", "--part", part, "--json").document
        assert (document["part"], document["checked"] < 48) == (part, True)
        checked += document["checked"]
        bad += [one["key"] for one in document["findings"]]
    assert (checked, sorted(bad)) == (48, sorted(planted["frame"] + planted["missing"]))
    assert " payloads of part 2/3, " in run("verify", "--all", "--part", "2/3").out


def test_a_verification_counts_recorded_payloads_of_lost_documents_once(
    run: Run, ends: Backends
) -> None:
    """Without its namespace's identity document, a payload may still have a record."""
    namespace = DamagedStore(ends).plant(Defects(good=4)).namespace
    ends.bulk.delete(identity_path(namespace))
    ran = run("verify", "--all")
    assert "checked 4 payloads" in ran.out
    assert "no record" not in ran.out
    assert "no record" not in run("verify", "--all", "--index-url", "bulk:").out


def test_what_is_young_is_left_alone(run: Run, ends: Backends) -> None:
    DamagedStore(ends).plant(Defects(good=4, orphan=2))
    document = run("sweep", "--apply", "--json").document
    assert (found(document), document["kept"]["young"]) == ({}, 2)


def make_old(home: Path, *paths: str) -> None:
    """Set the times of these payloads to ten days ago, longer than records live."""
    long_ago = time.time() - 10 * 86_400
    for path in paths:
        os.utime(home / "objkv" / "chunks" / path, (long_ago, long_ago))


def test_what_is_older_than_a_record_lives_has_expired(
    run: Run, ends: Backends, home: Path
) -> None:
    planted = DamagedStore(ends).plant(Defects(good=4, orphan=2))
    make_old(home, *planted["orphan"])
    swept = run("sweep", "--apply", "--json")
    assert found(swept.document) == {"expired": planted["orphan"]}
    assert swept.code == 0
    assert ends.bulk.head(planted["orphan"][0]) is None


def test_a_quota_that_pins_fill_is_said_until_there_is_room(
    run: Run, ends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = [key.prefix_hash for key in save(ends.bulk, ends.index)]
    save_identity(ends.bulk)
    monkeypatch.setenv("OBJKV_QUOTA_BYTES", "1000")
    assert "% of tenant default's quota" in run("audit").out
    assert "tenant default uses" in run("doctor").out
    assert run("pin", hashes[-1].hex()).code == 0
    ran = run("sweep", "--apply")
    assert (ran.code, "tenant default: pins alone fill the quota" in ran.out) == (1, True)
    assert run("unpin", hashes[-1].hex()).code == 0
    assert run("sweep", "--apply", "--grace", "0").code == 0


def test_pinned_payloads_are_not_swept_although_their_record_is_gone(
    run: Run, ends: Backends, home: Path
) -> None:
    planted = DamagedStore(ends).plant(Defects(good=6, orphan=1))
    key = ChunkKey.parse(planted["orphan"][0])
    pin = Pin(NAMESPACE, (key.prefix_hash,), 16, int(time.time()) + 1000, 0)
    ends.bulk.put(pin.path(), pin.document())
    make_old(home, *planted["orphan"])
    [count] = [one for one in run("audit", "--json").document["findings"]["counts"] if one["count"]]
    assert count["kind"] == "orphan", "what is pinned does not expire"
    assert count["remedy"].startswith("objkv rebuild --apply restores their records")
    assert count["remedy"].endswith("all are pinned, so a sweep keeps them until their pin ends")
    document = run("sweep", "--apply", "--grace", "0", "--json").document
    assert (found(document), document["kept"]["pinned"]) == ({}, 1)
    assert run("rebuild", "--apply", "--json").document["pins"] == 1
    [record] = ends.index.lookup(NAMESPACE, [key.prefix_hash])
    assert record is not None
    assert record.pinned_until_s == pin.until_s


def test_an_index_of_another_bucket_is_not_emptied(
    run: Run, ends: Backends, tmp_path: Path
) -> None:
    DamagedStore(ends).plant(Defects(good=8))
    (tmp_path / "other").mkdir()
    other = (
        "--bulk-url", f"file://{tmp_path}/other",
        "--index-url", f"sqlite://{tmp_path}/objkv/index.sqlite",
    )  # fmt: skip
    for command, code in (
        (("sweep", "--apply"), 1),
        (("verify", "--all", *REMOVE), 2),
    ):
        ran = run(*command, *other)
        assert ran.code == code, ran.out
    assert len(records(ends, NAMESPACE)) == 8


def wipe(ends: Backends) -> None:
    for record in list(ends.index.scan(NAMESPACE)):
        ends.admin.drop(NAMESPACE, record.prefix_hash)


@pytest.mark.parametrize("ending", ["broke off", "went on"])
def test_an_index_that_is_lost_while_it_is_rebuilt_is_rebuilt_all_the_same(
    run: Run, ends: Backends, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    DamagedStore(ends).plant(Defects(good=60, header=1))
    before = records(ends, NAMESPACE)
    wipe(ends)
    publish, left = SqliteIndex.publish, 25

    def lost(*told: Any, **ttl: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            wipe(ends)
        if left < 0 and ending == "broke off":
            raise StoreDenied("the index is not there")
        publish(*told, **ttl)

    monkeypatch.setattr(SqliteIndex, "publish", lost)
    monkeypatch.setattr(upkeep, "WORKERS", 1)
    first = run("rebuild", "--apply", "--json")
    monkeypatch.setattr(SqliteIndex, "publish", publish)
    if ending == "broke off":
        assert first.code == 2
        wipe(ends)
        again = run("rebuild", "--apply", "--json")
        assert again.document["corrupt"] == 1
    left_over = records(ends, NAMESPACE)
    assert len(before) - len(left_over) <= 1  # the one with an unreadable header
    assert all(left_over[key].shards == before[key].shards for key in left_over)
    swept = run("sweep", "--apply", "--grace", "0", "--json")
    assert swept.document["removed"] == 1


def test_records_are_not_forgotten_because_the_bulk_store_is_another_one(
    run: Run, ends: Backends
) -> None:
    planted = DamagedStore(ends).plant(Defects(good=60))
    before = len(records(ends, NAMESPACE))
    for count, why in (
        (50, "bulk_url and index_url belong together"),
        (60, "none of the payloads"),
    ):
        for path in planted["good"][:count]:
            ends.bulk.delete(path)
        for how in (("--all",), ("--sample", "60")):
            for options in ((), ("--quarantine",)):
                looked = run("verify", *how, *options)
                assert (looked.code, "--apply would be refused: " in looked.out) == (1, True)
            refused(run("verify", *how, *REMOVE, "--json"), why)
        assert len(records(ends, NAMESPACE)) > before // 2
    assert run("verify", "--all", *REMOVE, "--force", "--json").code == 0
    assert records(ends, NAMESPACE) == {}


def test_people_see_what_was_found(run: Run, ends: Backends) -> None:
    planted = DamagedStore(ends).plant(Defects(good=8, frame=1, orphan=1))
    said = run("verify", "--all").out
    assert "checked 9 payloads" in said
    assert f"corrupt  {planted['frame'][0]}" in said
    assert "nothing was changed: --quarantine --apply would quarantine 1 payload" in said
    assert f"orphan  {planted['orphan'][0]}" in run("sweep", "--grace", "0").out
    assert "deleted 1, " in run("sweep", "--grace", "0", "--apply").out
    assert "had a correct record" in run("rebuild", "--apply").out


@pytest.mark.parametrize("options", [("--all",), ()])
def test_an_index_that_knows_little_is_no_fine_one(
    run: Run, ends: Backends, options: tuple[str, ...]
) -> None:
    DamagedStore(ends).plant(Defects(good=8))
    assert run("verify", *options).code == 0
    for record in list(ends.index.scan(NAMESPACE)):
        ends.admin.drop(NAMESPACE, record.prefix_hash)
    ran = run("verify", *options)
    assert (ran.code, "objkv rebuild" in ran.out) == (1, True)
    assert "8 more have no record" in ran.out
    assert run("rebuild", "--apply").code == 0
    assert run("verify", *options).code == 0


@pytest.mark.parametrize("options", [("--sample", "5"), ("--all", "--part", "1/16")])
def test_an_index_that_knows_most_is_not_lost_because_few_were_checked(
    run: Run, ends: Backends, options: tuple[str, ...]
) -> None:
    DamagedStore(ends).plant(Defects(good=40, orphan=20))
    ran = run("verify", *options)
    assert (ran.code, "the index was lost" in ran.out) == (0, False)
    assert "20 more have no record" in ran.out


def test_what_is_saved_while_a_verification_walks_has_a_record(
    run: Run, ends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    DamagedStore(ends).plant(Defects(good=2, orphan=1))
    listed = Walk.payloads

    def payloads(walk: Walk) -> Iterator[Unit]:
        time.sleep(0.02)  # file times are some ms old
        DamagedStore(ends, seed=1).plant(Defects(good=8))
        return listed(walk)

    monkeypatch.setattr(Walk, "payloads", payloads)
    ran = run("verify", "--json")
    assert (ran.code, ran.document["ok"], ran.document["orphan"]) == (0, 2, 1)


def test_one_namespace_that_looks_wrong_does_not_stop_a_sweep(run: Run, ends: Backends) -> None:
    planted = DamagedStore(ends).plant(Defects(good=8, orphan=2, unidentified=6, old_epoch=1))
    other = replace(IDENTITY, tenant="other")
    ends.bulk.put(identity_path(other.namespace()), other.canonical())
    for path in planted["good"][:5]:  # whole payloads that the index does not know
        payload = ends.bulk.get(path)
        assert payload is not None
        ends.bulk.put(path.replace(NAMESPACE, other.namespace()), payload)
    one = next(ends.index.scan(NAMESPACE))  # and a record whose payload is in another bucket
    span = one.token_start, one.token_end
    gone = ChunkEntry(other.namespace(), bytes(20), one.parent_hash, *span)
    ends.index.publish(gone, dict(one.shards), ttl_s=3600)
    look = run("sweep", "--grace", "0", "--json")
    assert (look.code, len(look.document["doubts"])) == (1, 1)
    swept = run("sweep", "--apply", "--unidentified", "--grace", "0", "--json")
    assert found(swept.document) == {
        kind: planted[kind] for kind in ("orphan", "unidentified", "old_epoch")
    }
    assert (swept.code, swept.document["removed"], swept.document["kept"]["doubted"]) == (1, 9, 6)
    assert [*ends.index.scan(other.namespace())]
    assert swept.document["doubts"][0]["namespace"] == other.namespace()
    assert all(ends.bulk.head(path) for path in planted["good"])
    forced = run("sweep", "--apply", "--force", "--grace", "0", "--json")
    assert (forced.code, forced.document["removed"]) == (0, 6)


@pytest.mark.parametrize("lost", ["records", "payloads"])
def test_a_sweep_of_one_namespace_keeps_it_if_the_other_side_has_nothing_of_it(
    run: Run, ends: Backends, home: Path, lost: str
) -> None:
    """That another namespace is on both sides proves nothing: fleets with the same models have the
    same namespaces, and a sweep in another fleet's bucket would delete payloads that are used."""
    DamagedStore(ends).plant(Defects(good=8))
    save_identity(ends.bulk)
    keys = save(ends.bulk, None if lost == "records" else ends.index)
    for key in keys:
        if lost == "payloads":
            ends.bulk.delete(key.path())
        else:
            make_old(home, key.path())
    swept = run("sweep", "--apply", "--grace", "0", "-n", TINY, "--json")
    assert (swept.code, swept.document["removed"], len(swept.document["doubts"])) == (1, 0, 1)
    forced = run("sweep", "--apply", "--force", "--grace", "0", "-n", TINY, "--json")
    kind = {"records": "expired", "payloads": "missing"}[lost]
    assert (forced.code, found(forced.document)) == (0, {kind: sorted(k.path() for k in keys)})
    assert run("verify", "--all", "--json").document["checked"] == 8


def test_unidentified_payloads_are_seen_and_swept_when_named(run: Run, ends: Backends) -> None:
    planted = DamagedStore(ends).plant(Defects(good=4, unidentified=30))
    assert found(run("sweep", "--grace", "0", "--json").document) == {
        "unidentified": planted["unidentified"]
    }
    sweep = ("sweep", "--apply", "--grace", "0")
    kept = run(*sweep)
    told = "30 unidentified kept: a replica of that model writes the document again when it starts"
    assert (kept.code, told in kept.out) == (1, True)
    assert "sweep --apply --unidentified -n NS deletes those of" in kept.out
    name = planted["unidentified"][0].partition("/")[0]
    swept = run(*sweep, "--unidentified", "-n", name, "--json")
    assert (swept.code, swept.document["removed"]) == (0, 30)


def test_of_a_bucket_with_earlier_formats_alone_no_rebuild_is_advised(
    run: Run, ends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OBJKV_SWEEP_GRACE_S", "0")
    for tenant in "abcdef":
        save_in_format(ends.bulk, 1, tenant=tenant)
    for command in ("audit", "verify", "sweep", "doctor"):
        ran = run(command)
        assert "rebuild" not in ran.out
        assert "sweep --apply" in ran.out or command in ("verify", "sweep")
    swept = run("sweep", "--apply", "--json")
    assert (swept.code, swept.document["removed"], swept.document["doubts"]) == (0, 6, [])
    assert ends.bulk.folders("") == []


@pytest.mark.parametrize("is_own_index", [True, False])
def test_a_verification_leaves_out_payloads_of_an_earlier_format(
    run: Run, ends: Backends, home: Path, *, is_own_index: bool
) -> None:
    with own_index(home) if is_own_index else nullcontext((ends, ())) as (ends, urls):
        names = [save_in_format(ends.bulk, 1, tenant=tenant) for tenant in "ab"]
        shard = ShardRecord(9_000, 1, True, False, "", 1)
        entry = ChunkEntry(names[0], bytes(20), bytes(20), 0, 16)
        ends.index.publish(entry, {ChunkKey(names[0], bytes(20), 0).field: shard}, ttl_s=99)
        alone = run("verify", *urls)
        assert (alone.code, "nothing is stored" in alone.out) == (0, False)
        DamagedStore(ends).plant(Defects(good=3))
        for options in ((), ("--all",), ("--all", *REMOVE)):
            ran = run("verify", "--json", *options, *urls)
            assert (ran.code, ran.document["checked"], ran.document["findings"]) == (0, 3, [])
            assert "left out 2 namespaces of an earlier format" in ran.err
            assert "objkv sweep --apply" in ran.err
        assert all(ends.bulk.get(ChunkKey(name, bytes(20), 0).path()) for name in names)


def test_a_rebuild_leaves_out_what_nothing_reads(run: Run, ends: Backends) -> None:
    DamagedStore(ends).plant(Defects(good=4, unidentified=3))
    old = save_in_format(ends.bulk, 1)
    wipe(ends)
    ran = run("rebuild", "--apply", "--json")
    assert (ran.code, ran.document["restored"], ran.document["corrupt"]) == (0, 4, 0)
    assert old not in ends.index.namespaces()
    assert ran.document["left_out"] == {"5" * 32: "no identity document"}
    assert re.search("^[0-9a-f]{32} was left out: no identity document;", run("rebuild").out, re.M)


def advice(report: Any) -> dict[str, list[list[str]]]:
    """The commands that an audit advises, by the kind of finding."""
    commands = r"objkv ((?:sweep|verify|rebuild)(?: --[a-z]+)*(?: -n [0-9a-f]{32})?)"
    return {
        one["kind"]: [command.split() for command in re.findall(commands, one["remedy"])]
        for one in report["findings"]["counts"]
        if one["count"]
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "defects",
    [
        Defects(good=8, orphan=2, missing=2, old_epoch=2, unidentified=9, short=1, empty=1),
        Defects(good=0, orphan=3, unidentified=2),
        Defects(good=0, missing=5),
        Defects(good=0, unidentified=3),
    ],
)
def test_the_advice_of_an_audit_fixes_what_it_is_about(
    run: Run, ends: Backends, monkeypatch: pytest.MonkeyPatch, defects: Defects
) -> None:
    DamagedStore(ends).plant(defects)
    monkeypatch.setenv("OBJKV_SWEEP_GRACE_S", "0")
    for _ in range(4):  # what verify quarantines is found afterwards
        every = advice(run("audit", "--json").document)
        if not every:
            break
        kind, commands = next(iter(every.items()))
        assert commands, kind
        ran = run(*commands[-1])
        assert ran.code in (0, 1), ran.err
        assert kind not in advice(run("audit", "--json").document), ran.out
    else:
        assert set(advice(run("audit", "--json").document)) <= {"old_epoch", "quarantined"}


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 12])
def test_an_audit_advises_what_deletes_the_payloads_of_one_namespace_without_records(
    run: Run, ends: Backends, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    DamagedStore(ends).plant(Defects(good=12, orphan=others // 6))
    save_identity(ends.bulk)
    save(ends.bulk, None, tuple(range(20 * CHUNK)))
    monkeypatch.setenv("OBJKV_SWEEP_GRACE_S", "0")
    commands = advice(run("audit", "--json").document)["orphan"]
    assert commands[0] == ["rebuild", "--apply"]
    assert commands[-1] == ["sweep", "--apply", "--force", "-n", TINY]
    for command in commands[1:]:
        run(*command)
    assert advice(run("audit", "--json").document) == {}
    assert run("verify", "--all", "--json").document["checked"] == 12


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
    paths = sorted(entry.key for entry in machine.bulk.scan(TINY) if hashes[0] in entry.key)
    machine.bulk.delete(paths[0])
    machine.bulk.put(paths[1], b"not a payload")
    machine.index.drop(TINY, bytes.fromhex(hashes[2]))


def state(machine: Machine) -> tuple[dict[str, bytes | None], list[Any]]:
    """Everything in store and index."""
    entries = {entry.key: machine.bulk.get(entry.key) for entry in machine.bulk.scan("")}
    records = machine.index.scan(TINY)
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
