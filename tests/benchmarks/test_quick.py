"""The benchmarks that need no engine, small: they measure what they say."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.codec import bench_codec, bench_payload_codec
from benchmarks.far import bench_far
from benchmarks.s3 import bench_s3
from objkv.codec.compress import CODECS
from objkv.errors import ConfigError, PayloadError
from objkv.ops.bench.sample import Shape, make_samples
from tests.ops.bench.setting import quick
from tests.support.servers import ROOT


def test_s3_is_measured_against_its_limits(tmp_path: Path) -> None:
    section = bench_s3(quick(tmp_path))
    kinds = [row.name.split(" ")[:2] for row in section.rows if row.target is not None]
    assert kinds == [["S3", "GET"], ["S3", "PUT"]] * 2
    assert all(row.ours > 0 and row.limit and row.ratio for row in section.rows)
    assert {row.limit_name for row in section.rows} == {"plain recv_into", "plain sendall"}


def test_every_codec_is_measured_on_one_core(tmp_path: Path) -> None:
    section = bench_codec(quick(tmp_path))
    names = {row.name.split(":")[0] for row in section.rows}
    seals = {"signed", "encrypted", "signed, encrypted"}
    assert names == {*CODECS, *seals}
    sealed = [row for row in section.rows if row.name.split(":")[0] in seals]
    assert {row.limit_name for row in sealed} == {"not sealed"}
    assert len(sealed) == 2 * len(seals)
    decoded = [row for row in section.rows if row.name == "blosc: decode"]
    assert [row.target is not None for row in decoded] == [True]


def test_a_payload_of_the_users_is_verified_before_its_pages_are_measured(tmp_path: Path) -> None:
    (sample,) = make_samples(Shape("32 KiB", layers=2, layer_bytes=16 << 10), 1)
    file = tmp_path / "chunk.safetensors"
    file.write_bytes(sample.payload)
    section = bench_payload_codec(quick(tmp_path), file)
    assert "chunk.safetensors" in section.notes[0]
    file.write_bytes(bytes(sample.payload[:-1]) + b"?")
    with pytest.raises(PayloadError):
        bench_payload_codec(quick(tmp_path), file)
    with pytest.raises(ConfigError, match="No such file"):
        bench_payload_codec(quick(tmp_path), tmp_path / "nothing")


def test_a_far_bucket_is_measured_through_the_same_distance_as_its_limit(tmp_path: Path) -> None:
    section = bench_far(quick(tmp_path))
    names = [row.name for row in section.rows]
    assert names[:2] == ["far GET 1 MiB, 1 connection", "far GET 1 MiB, 4 connections"]
    first = next(row for row in section.rows if "layer 0" in row.name)
    assert first.ratio is not None
    assert first.ratio <= 1


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_schedulers_steps_are_measured(tmp_path: Path) -> None:
    from benchmarks.steps import bench_steps

    section = bench_steps(quick(tmp_path))
    assert [row.target is not None for row in section.rows] == [True] * 3


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_what_a_load_and_many_requests_cost_the_scheduler_is_measured(tmp_path: Path) -> None:
    from benchmarks.scheduler import bench_scheduler

    section = bench_scheduler(quick(tmp_path))
    assert [row.target is not None for row in section.rows] == [False] * 4 + [True] * 4


def test_a_benchmark_is_a_command_with_the_options_of_objkv_bench() -> None:
    command = [sys.executable, "-m", "benchmarks.codec", "--quick", "--rounds", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (section,) = json.loads(done.stdout)["sections"]
    assert all(row["ours"] > 0 for row in section["rows"])
