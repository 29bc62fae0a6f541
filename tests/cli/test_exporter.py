"""``objkv exporter``: one page for Prometheus, whatever the ends do; and an orderly end."""

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from objkv.errors import StoreUnavailable
from objkv.stores.base import Entry
from objkv.stores.local import LocalStore
from tests.cli.conftest import Machine, Run
from tests.support.samples import IDENTITY, NAMESPACE

UNREACHABLE = "redis://127.0.0.1:1/0"
OURS = (IDENTITY.model, NAMESPACE, IDENTITY.tenant)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels, these in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_once_prints_the_page_and_scans_only_where_it_is_asked_to(
    machine: Machine, run: Run
) -> None:
    machine.fill()
    ran = run("exporter", "--once")
    found = samples(ran.out)
    assert ran.code == 0
    assert found["objkv_stored_payloads", *OURS] == 6
    assert found["objkv_up", "bulk"] == found["objkv_up", "index"] == 1
    assert not [name for name, *_ in found if name.startswith("objkv_scan_")]

    found = samples(run("exporter", "--once", "--scan-every", "3600").out)
    assert found["objkv_scan_payloads", *OURS] == 6


def test_an_index_that_is_gone_is_told_on_the_page_and_is_3(machine: Machine, run: Run) -> None:
    machine.fill()
    ran = run("exporter", "--once", "--index-url", UNREACHABLE)
    found = samples(ran.out)
    assert ran.code == 3
    assert (found["objkv_up", "index"], found["objkv_up", "hot"]) == (0, 0)
    assert found["objkv_up", "bulk"] == 1


def test_a_scan_that_failed_is_3_although_store_and_index_answer(
    machine: Machine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.fill()

    def broken(store: LocalStore, prefix: str) -> Iterator[Entry]:
        raise StoreUnavailable("the disk is gone")
        yield

    monkeypatch.setattr(LocalStore, "scan", broken)
    ran = run("exporter", "--once", "--scan-every", "1h")
    found = samples(ran.out)
    assert ran.code == 3
    assert found["objkv_up", "bulk"] == found["objkv_up", "index"] == 1
    assert found["objkv_scan_failures_total",] == 1


def test_looking_makes_no_folder(home: Path, run: Run) -> None:
    ran = run("exporter", "--once")
    assert (ran.code, samples(ran.out)["objkv_up", "bulk"]) == (0, 1), "nothing was saved yet"
    assert not (home / "objkv" / "chunks").exists()


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "objkv.cli", "exporter", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().removeprefix("serving ").strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(
    machine: Machine, run: Run, number: signal.Signals
) -> None:
    machine.fill()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with serving() as (process, url):
        assert url.startswith("http://127.0.0.1:")
        with opener.open(url, timeout=60) as response:
            found = samples(response.read().decode())
        assert run("exporter", "--port", url.rpartition(":")[2].partition("/")[0]).code == 2
        assert "process_resident_memory_bytes" in {name for name, *_ in found}
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
