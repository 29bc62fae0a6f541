"""The replicas of ``objkv gpu-check``: three real ones on the CPU, one after the other."""

import importlib.util
import os
from pathlib import Path

import pytest

from objkv.ops.gpu_check import GpuCase, GpuCheck

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None and not os.environ.get("CI"),
        reason="vLLM is not installed",
    ),
]


def test_loaded_documents_give_the_answers_of_a_replica_without_objkv(tmp_path: Path) -> None:
    cases: list[GpuCase] = []
    check = GpuCheck(
        None, tmp_path, tmp_path / "models", lambda name, stage: None, (1024, 2048), repeats=1
    )
    check.cases(cases)
    assert not [case for case in cases if not case.ok]
    loaded = [case for case in cases if case.name.endswith("the document is loaded")]
    assert len(loaded) == 4
