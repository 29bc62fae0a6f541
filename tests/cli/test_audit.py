"""``objkv audit`` as users run it: its output, its exit codes, and the keys for scripts."""

import os
import secrets
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from objkv.errors import StoreUnavailable
from objkv.index.base import Savings
from objkv.stores.base import Entry
from objkv.stores.local import LocalStore
from tests.cli.conftest import Machine, Run, refused
from tests.support.samples import NAMESPACE


def test_an_audit_of_a_sound_store_is_fine(run: Run, machine: Machine) -> None:
    machine.fill()
    ran = run("audit")
    assert ran.code == 0
    assert "3 chunks, 6 payloads" in ran.out
    assert NAMESPACE in ran.out
    assert "nothing is wrong; payload bytes were not checked (use objkv verify)" in ran.out
    machine.bulk.delete(next(e.key for e in machine.bulk.scan("") if "safetensors" in e.key))
    document = run("audit", "--json")
    assert (document.code, document.document["verdict"]) == (1, "faults")


@pytest.mark.parametrize(
    "lost", ["the index has no record of any payload", "the bulk store has none of the payloads"]
)
def test_backends_that_do_not_match_are_a_fault_and_the_settings_are_to_be_checked_first(
    run: Run, machine: Machine, lost: str
) -> None:
    machine.fill()
    if "bulk" in lost:
        for entry in [*machine.bulk.scan("")]:
            if entry.key.endswith(".safetensors"):
                machine.bulk.delete(entry.key)
    else:
        for record in [*machine.index.scan(NAMESPACE)]:
            machine.index.drop(NAMESPACE, record.prefix_hash)
    ran = run("audit")
    assert (ran.code, "nothing is wrong" in ran.out) == (1, False)
    assert lost in ran.out
    assert "check bulk_url, index_url and redis_prefix; if they are right, " in ran.out
    assert ("objkv rebuild" in ran.out) is ("index" in lost)
    assert run("audit", "--json").document["verdict"] == "faults"


def test_an_idle_fleet_whose_records_have_all_expired_is_fine(
    run: Run, machine: Machine, home: Path
) -> None:
    machine.fill()
    for record in [*machine.index.scan(NAMESPACE)]:
        machine.index.drop(NAMESPACE, record.prefix_hash)
    for payload in home.rglob("*.safetensors"):
        os.utime(payload, (1_700_000_000, 1_700_000_000))
    ran = run("audit")
    assert (ran.code, "all records have expired" in ran.out) == (0, True)


def test_wrong_options_are_told_before_anything_is_walked(
    run: Run, machine: Machine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.fill()
    monkeypatch.setattr(LocalStore, "scan", lambda *_: pytest.fail("walked"))
    for place in (f"{home}/none/report.html", str(home)):
        refused(run("audit", "--html", place), "--html")


def test_the_page_is_written_whole_or_not_at_all(
    run: Run, machine: Machine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.fill()
    page = home / "report.html"
    page.write_text("before")
    umask = os.umask(0)
    os.umask(umask)
    with monkeypatch.context() as patch:
        patch.setattr(secrets, "token_hex", lambda _: "0")
        others = home / ".report.html-0"
        others.write_text("of another audit")
        assert run("audit", "--html", str(page)).code == 2
        assert others.read_text() == "of another audit"
        others.unlink()
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
        assert run("audit", "--html", str(page)).code == 2
    assert page.read_text() == "before"
    ran = run("audit", "--html", str(page))
    assert f"HTML report: {page}" in ran.out
    assert page.stat().st_mode & 0o777 == 0o666 & ~umask
    assert page.read_text().lower().startswith("<!doctype html>")
    assert [one.name for one in home.iterdir() if "report" in one.name] == ["report.html"]


@pytest.mark.parametrize("command", ["audit", "verify", "sweep", "rebuild"])
def test_a_store_that_fails_in_the_middle_is_said_and_nothing_is_reported(
    run: Run, machine: Machine, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    machine.fill()
    scan = LocalStore.scan

    def broken(store: LocalStore, prefix: str) -> Iterator[Entry]:
        yield from islice(scan(store, prefix), 1)
        raise StoreUnavailable("the disk is gone")

    monkeypatch.setattr(LocalStore, "scan", broken)
    refused(run(command), "the disk is gone; objkv doctor shows what works", code=3)


def test_answers_to_auditors_are_a_few_lines(
    run: Run, machine: Machine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = machine.fill()[-1]
    machine.index.touch(NAMESPACE, [bytes.fromhex(leaf)], ttl_s=3_600)
    assert "saved: unknown, no replica has reported" in run("audit").out
    machine.index.credit(Savings(NAMESPACE, "2026-11", 3, 4_096, 4_096, 7_400_000_000, 200_000_000))
    run("pin", leaf, "--by", "ada")
    assert "of GPU time (computing" in run("audit").out, "a default price is a guess"
    monkeypatch.setenv("OBJKV_PRICE_GPU_HOUR", "2.5")
    ran = run("audit", "--html", f"{home}/p.html")
    assert ran.code == 0
    line = "saved: 4,096 tokens loaded since 2026-11: 2.0 h of GPU time, $5.00 "
    assert f"{line}(computing 2.1 h, loading 3.3 min)" in ran.out
    rows = [line for line in ran.out.splitlines() if line.startswith(leaf[:12])]
    assert "  ada  " in rows[-1]
    page = (home / "p.html").read_text()
    assert all(words in page for words in (">ada<", "$5.00"))
