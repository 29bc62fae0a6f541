"""``objkv bench`` measures what is configured, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from objkv.assembly.agent import NodeAgent
from objkv.assembly.backends import Backends
from objkv.config import load_config
from objkv.errors import PayloadError, StoreDenied
from objkv.ops.bench.sample import NAMESPACE
from objkv.ops.listing import find_namespace
from objkv.stores.local import LocalStore
from objkv.telemetry import MemoryRecorder
from tests.cli.conftest import Machine, Run, refused
from tests.contracts.memory_index import MemoryIndex
from tests.support.agents import agent_folder
from tests.support.samples import NAMESPACE as FLEETS
from tests.support.samples import save_identity
from tests.support.waiting import wait_until


@pytest.fixture
def mine(ends: Backends, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Something of the user's is stored, and nothing else is at the end."""
    monkeypatch.setenv("OBJKV_AGENT", "private")
    ends.bulk.put("ns/one", b"mine")
    yield
    assert [entry.key for entry in ends.bulk.scan("")] == ["ns/one"]
    assert ends.index.namespaces() == []


@pytest.mark.usefixtures("mine")
def test_stores_and_index_are_measured(run: Run) -> None:
    ran = run("bench", "--quick")
    assert ran.code == 0
    names = ("bulk put 256 KiB ", "bulk get 256 KiB, 4 at once", "index lookup of 128 chunks")
    assert all(name in ran.out for name in names)
    assert "too small for meaningful figures" in ran.out
    assert all(row["p50"] > 0 for row in run("bench", "--quick", "--json").document["rows"])


@pytest.mark.usefixtures("mine")
def test_an_agent_is_measured_where_one_listens(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({"agent_memory_bytes": 16 << 20})
    with agent_folder() as folder:
        monkeypatch.setenv("OBJKV_AGENT", f"unix://{folder}/s")
        ran = run("bench", "--quick")
        assert (ran.code, "agent load" in ran.out) == (0, False)
        assert "no agent listens at" in ran.err
        with NodeAgent(config, folder / "s", MemoryRecorder()):
            document = run("bench", "--quick", "--json").document
    rows = {row["name"].partition(",")[0] for row in document["rows"]}
    assert {"agent load from the store", "agent load from memory", "copy"} <= rows
    assert "agent lookup of 128 chunks" in rows


def test_a_writer_may_measure_though_it_deletes_nothing(
    run: Run, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise StoreDenied("403")

    monkeypatch.setenv("OBJKV_AGENT", "private")
    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "delete", refuse)
        assert run("bench", "--quick").code == 0
    assert any(machine.bulk.scan(NAMESPACE)), "they could not be deleted"
    save_identity(machine.bulk)
    found = find_namespace(machine.bulk, MemoryIndex(), None)
    assert found == FLEETS, "it is no choice for commands"
    swept = run("sweep", "--apply", "--force", "--grace", "0", "--json").document
    assert swept["findings"] is not None
    assert not [entry for entry in machine.bulk.scan("") if entry.key.endswith("safetensors")]
    for role in ("reader", "sweeper"):
        monkeypatch.setenv("OBJKV_ROLE", role)
        refused(run("bench", "--quick"), "set OBJKV_ROLE=writer")


@pytest.mark.usefixtures("mine")
def test_nothing_is_left_either_when_it_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PayloadError("corrupt")

    monkeypatch.setattr("objkv.ops.bench.measure.get_verified", fail)
    assert run("bench", "--quick").code != 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_it_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    chunks = tmp_path / "objkv" / "chunks"
    with subprocess.Popen(
        [sys.executable, "-m", "objkv", "bench"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OBJKV_AGENT": "private"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            wait_until(lambda: any(chunks.rglob("*.safetensors")), "a payload")
            process.send_signal(number)
            process.wait(120)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert not list(chunks.rglob("*.safetensors"))
