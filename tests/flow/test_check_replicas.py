"""The replicas of ``objkv gpu-check``: three real ones on the CPU, one after the other."""

import importlib.util
import os
from pathlib import Path

import pytest

from objkv.ops.bench.harness import BenchRow
from objkv.ops.gpu_check.replicas import Sharing
from objkv.ops.gpu_check.report import GpuCase

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3_600),
    pytest.mark.wide,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None and not os.environ.get("CI"),
        reason="vLLM is not installed",
    ),
]


def test_loaded_documents_give_the_answers_of_a_replica_without_objkv(tmp_path: Path) -> None:
    cases: list[GpuCase] = []
    figures: list[BenchRow] = []
    stages = set[str]()
    Sharing(None, tmp_path, tmp_path / "models", lambda name, _: stages.add(name), on_cpu=True).run(
        cases, figures
    )
    assert not [case for case in cases if case.ok is False]
    loaded = [case for case in cases if case.name.endswith("the document is loaded")]
    assert len(loaded) == 4
    assert all(row.limit_name == "recompute" and row.ours > 0 for row in figures)
    assert {name.partition(" (")[0] for name in stages} == {
        "replica R", "replica A", "replica B",
    }  # fmt: skip
