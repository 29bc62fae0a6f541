"""The command, its figures and its costs."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import run as command
from benchmarks.fleet.costs import COSTS_FILE, read_costs
from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.report import quantile, summarise
from tests.benchmarks.worlds import COSTS, SMALL, run, with_settings

ROOT = Path(__file__).parents[2]
QUICK = ["--load", "0.005", "--simulated", "2", "--json"]


@pytest.mark.parametrize("how", [["benchmarks/fleet/run.py"], ["-m", "benchmarks.fleet.run"]])
def test_it_runs_as_a_script_and_as_a_module(how: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *how, *QUICK], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["trace_requests"] == 399
    names = [case["name"] for case in found["cases"]]
    assert len(names) == len(set(names)) > 20
    for case in found["cases"]:
        assert case["gpu"] + case["hot"] + case["bulk"] + case["computed"] == pytest.approx(1)


def test_the_table_has_a_row_for_each_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *QUICK[:-1]])
    monkeypatch.setattr(command, "cases", lambda *_: list(one_case()))
    command.main()
    assert "what: it is" in capsys.readouterr().out


def one_case() -> Any:
    from benchmarks.fleet.sweep import Case

    yield Case("what", "it is", replace(SMALL, load=0.005))


@pytest.mark.parametrize("wrong", [["--model", "no"], ["--bulk", "no"], ["--replicas", "0"]])
def test_what_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *wrong])
    with pytest.raises(SystemExit):
        command.main()


def test_plots_say_how_to_get_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(sys, "argv", ["run", "--plots", str(tmp_path / "plots")])
    with pytest.raises(SystemExit, match=r"objkv\[plot\]"):
        command.main()
    assert not (tmp_path / "plots").exists()


def test_prefill_of_parts_adds_up() -> None:
    model = COSTS.models["llama-3.1-8b"]
    parts = model.prefill_s(0, 5000) + model.prefill_s(5000, 9000)
    assert parts == pytest.approx(model.prefill_s(0, 9000))
    assert model.prefill_s(8000, 9000) > model.prefill_s(0, 1000), "attention is quadratic"


@pytest.mark.parametrize(
    ("model", "kib"),
    [("llama-3.1-8b", 128), ("llama-3.1-70b", 320), ("qwen3-32b", 256), ("deepseek-v3", 68.625)],
)
def test_kv_bytes_follow_from_published_shapes(model: str, kib: float) -> None:
    assert COSTS.models[model].token_bytes == kib * 1024


def test_a_costs_file_with_unknown_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(COSTS_FILE.read_text() + "surprise = 1\n")
    with pytest.raises(SystemExit, match="surprise"):
        read_costs(path)


def test_money_is_requests_storage_and_egress_at_the_prices_given() -> None:
    done = run(with_settings(SMALL, save_threads=16, s3_ranges_max=56, ttl_s=7200))
    counts, bulk = done.world.counts, replace(COSTS.bulk["s3-standard"], egress_gb_usd=0.09)
    done.world.bulk = bulk
    summary = summarise("it", done, run(replace(SMALL, shared=False)))
    hours = done.span_s / 3600
    assert summary.request_usd * hours == pytest.approx(
        counts.puts * bulk.put_usd + counts.gets * bulk.get_usd
    )
    assert summary.egress_usd * hours == pytest.approx(counts.bytes_bulk / 1e9 * 0.09)
    stored = summary.stored_bytes / 1e9
    assert summary.storage_usd == pytest.approx(stored * bulk.gb_month_usd / 730)
    assert summary.stored_bytes == pytest.approx(counts.bytes_saved / done.span_s * 7200)
    assert summary.gpu_usd_saved > 0
    assert counts.bytes_saved == counts.saved * done.world.chunk_bytes
    assert counts.puts == counts.saved * 4, "one for each shard"


def test_memory_and_bytes_of_a_short_life_are_those_that_were_seen() -> None:
    done = run(with_settings(SMALL, ttl_s=60))
    summary = summarise("it", done)
    peak = done.world.store.chunks_peak * done.world.chunk_bytes
    assert summary.stored_bytes == peak < done.world.counts.bytes_saved
    assert summary.redis_bytes > 0


def test_ten_times_the_replicas_ask_for_ten_times_as_much() -> None:
    fleet = Fleet(replicas=2, simulated_max=2, load=0.3)
    small, large = (
        summarise("it", run(replace(fleet, replicas=n, redis_primaries=9))) for n in (2, 20)
    )
    assert large.redis_ops_s == pytest.approx(10 * small.redis_ops_s, rel=0.05)
    assert large.puts_s == pytest.approx(10 * small.puts_s, rel=0.05)
    assert large.nic_send == pytest.approx(small.nic_send, rel=0.2)


def test_quantiles() -> None:
    values = [3.0, 1.0, 2.0, 4.0]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 3.0, 4.0, 4.0]
    assert quantile([], 0.5) == 0.0
