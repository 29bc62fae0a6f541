"""vLLM's recorded answers are whole, and those of the installed vLLM."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from objkv.connector.model.groups import Geometry
from tests.models.recorded import VERSIONS, answers, geometry, models

ROOT = Path(__file__).parents[2]
INSTALLED = ".".join(vllm.__version__.split(".")[:2])
ASKED_ANEW = ("llama-3.1-8b", "gpt-oss-20b", "qwen3-next-80b-a3b")
# The recorded answers are of a processor with AVX-512 BF16, for which vLLM keeps other states.
ASK = """
import json, sys, torch
torch.cpu._is_avx512_bf16_supported = lambda: True
from tests.models.record import record
from tests.models.recorded import models
found = {name: record(models()[name].folder, {"max_model_len": 4096}) for name in sys.argv[1:]}
print("ANSWERS", json.dumps(found))
"""


@pytest.mark.parametrize("name", models())
def test_every_model_has_a_configuration_and_an_answer_to_every_case(name: str) -> None:
    model = models()[name]
    assert json.loads((model.folder / "config.json").read_text())["architectures"]
    assert "0.32" in answers(name)
    for version, found in answers(name).items():
        assert version in VERSIONS
        assert set(found) == set(model.cases()), version


def test_no_folder_is_left_out() -> None:
    folders = {path.parent.name for path in Path(__file__).parent.glob("*/config.json")}
    assert folders == set(models())
    assert len(folders) >= 30


def test_a_refusal_names_a_fix() -> None:
    for model in models().values():
        for version, found in answers(model.name).items():
            for case, answer in found.items():
                told = geometry(answer, model.cases()[case])
                if isinstance(told, str) and not told.startswith("vLLM: "):
                    assert ": run it without the objkv connector, or " in told, (version, told)


def test_the_installed_vllm_answers_as_recorded() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", ASK, *ASKED_ANEW],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert asked.returncode == 0, asked.stderr
    [line] = [line for line in asked.stdout.splitlines() if line.startswith("ANSWERS ")]
    for name, found in json.loads(line.removeprefix("ANSWERS ")).items():
        assert INSTALLED in answers(name), INSTALLED
        assert found == answers(name)[INSTALLED]["plain"], name


def test_heads_of_a_draft_are_divided_among_ranks_though_its_target_has_latents() -> None:
    model = models()["kimi-k2"]
    found = geometry(answers("kimi-k2")["0.32"]["eagle3"], model.cases()["eagle3"])
    assert isinstance(found, Geometry)
    assert found.fields(0) == {"0.L0-61_H0-1"}
    number = found.number(1)
    assert found.fields(1) == {f"{number}.L0-1_H{8 * rank}-{8 * rank + 8}" for rank in range(8)}
    draft = found.groups[1]
    assert (draft.kind, draft.heads, draft.content, draft.page) == ("full", 64, 256, None)
