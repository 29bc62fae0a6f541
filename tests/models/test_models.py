"""vLLM's recorded answers are whole, those of the installed vLLM, and what they come to."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import vllm

from objkv.connector.model import drafts, parts
from objkv.connector.model.groups import Geometry
from objkv.errors import ConfigError
from objkv.ops.models.layers import read_layers
from objkv.ops.models.verdict import KINDS_FROM, WITH_KV, WITHOUT_KV, VllmOptions, judge
from tests.models.recorded import HERE, Model, answers, geometry, models

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


@pytest.mark.slow
def test_a_refusal_names_a_fix() -> None:
    for model in models().values():
        for version, found in answers(model.name).items():
            for case, answer in found.items():
                told = geometry(answer, model.cases()[case])
                if isinstance(told, str) and not told.startswith("vLLM: "):
                    assert ": run it without the objkv connector, or " in told, (version, told)


@pytest.mark.slow
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
    shares = [[found.topology(group).held(rank) for rank in range(8)] for group in (0, 1)]
    assert {str(share.shard) for share in shares[0] if share} == {"L0-61_H0-1"}
    divided = [f"L0-1_H{8 * rank}-{8 * rank + 8}" for rank in range(8)]
    assert [str(share.shard) for share in shares[1] if share] == divided
    draft = found.groups[1]
    assert (draft.kind, draft.heads, draft.content, draft.page) == ("full", 64, 256, None)


CASES = [(model, case) for model in models().values() for case in model.cases()]
VARIABLE = re.compile(
    r", \[[^]]*\](?=:)| \(\[\[.*\]\] of \d+\)| \(\d+ instead of \d+\)"
    r"|\S+(?= \((?:mamba|[a-z_]+)\):)"
)
"""Names and numbers of layers in a sentence, which vLLM gives."""


def wish(model: Model, case: str) -> VllmOptions:
    asked = model.cases()[case]
    draft = asked.get("draft")
    return VllmOptions(
        tp=asked.get("tp", 1),
        pp=asked.get("pp", 1),
        dcp=asked.get("dcp", 1),
        kv_dtype=asked.get("kv_dtype", "auto"),
        draft=draft,
    )


@pytest.mark.parametrize("name", models())
def test_layers_have_the_caches_that_vllm_gives_them(name: str) -> None:
    model = models()[name]
    found = geometry(answers(name)["0.32"]["plain"], model.cases()["plain"])
    mine = read_layers(model.folder).layers
    if isinstance(found, str) or any(group.page for group in found.groups):
        assert any(layer.kind in ("cross", "indexed", "compressed") for layer in mine)
        return
    theirs: Counter[tuple[object, ...]] = Counter()
    states = 0
    for group in found.groups:
        if group.kind == "mamba":  # stored in units, which repeat what every rank has
            theirs["mamba", 0, 0, None] += len(group.layers)
            states += len(group.layers) * group.heads * group.content
        else:
            theirs[group.kind, group.heads, group.content, group.window] += len(group.layers)
    counted: Counter[tuple[object, ...]] = Counter()
    for one in mine:
        sizes = (0, 0) if one.kind == "mamba" else (one.heads, one.content)
        counted[one.kind, *sizes, one.window] += 1
    assert counted == theirs
    assert states >= 0.9 * sum(one.content for one in mine if one.kind == "mamba")


@pytest.mark.parametrize(("model", "case"), CASES, ids=lambda one: getattr(one, "name", one))
def test_the_verdict_is_the_connectors(model: Model, case: str) -> None:
    if (asked := wish(model, case)).tp % asked.dcp:
        pytest.skip("vLLM refuses it")
    found = geometry(answers(model.name)["0.32"][case], model.cases()[case])
    verdict = judge(model.folder, asked)
    if isinstance(found, Geometry):
        assert verdict.refused is None
        assert verdict.use == "connector"
    elif not found.startswith("vLLM: "):
        assert VARIABLE.sub("", str(verdict.refused).replace("some ", "")) == VARIABLE.sub(
            "", found
        )
        assert verdict.use == "tier"


@pytest.mark.parametrize("name", models())
def test_a_chunk_has_the_bytes_of_its_layers(name: str) -> None:
    model = models()[name]
    found = geometry(answers(name)["0.32"]["plain"], model.cases()["plain"])
    verdict = judge(model.folder, VllmOptions())
    if isinstance(found, Geometry) and all(group.kind == "full" for group in found.groups):
        cells = sum(len(group.layers) * group.heads * group.content for group in found.groups)
        assert verdict.token_bytes == 2 * cells
        assert verdict.chunk_bytes == 256 * 2 * cells
    if isinstance(found, Geometry) and verdict.state_bytes:
        # vLLM rounds up to what its kernels want, 128 tokens on a CPU.
        assert verdict.chunk_tokens <= found.chunk_tokens < verdict.chunk_tokens + 256


def test_methods_are_those_of_the_connector() -> None:
    assert WITHOUT_KV == drafts.WITHOUT_KV
    assert tuple(parts.SOURCES) == KINDS_FROM
    assert set(WITH_KV) == {"draft_model", *drafts.LIKE_EAGLE}


@pytest.mark.parametrize(
    ("folder", "method"),
    [
        ("llama-3.1-8b-eagle3", "eagle3"),
        ("qwen3-32b-dflash", "dflash"),
        ("qwen3-0.6b", "draft_model"),
    ],
)
def test_the_folder_of_a_draft_says_its_method(folder: str, method: str) -> None:
    from objkv.ops.models.verdict import read_method

    model = read_layers(HERE / "llama-3.1-8b")
    assert read_method(model, str(HERE / "drafts" / folder)) == method


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "give the folder of a model"),
        ("{", "not JSON"),
        ("[]", "download its config.json"),
        ('{"model_type": "lama"}', r"unknown to objkv \(similar: llama\)"),
        ('{"model_type": "zzz"}', "start vLLM with the connector"),
        ('{"model_type": "llama"}', "no num_hidden_layers"),
        ('{"model_type": "olmo3", "num_hidden_layers": true}', "no num_hidden_layers"),
        ('{"model_type": "exaone4", "num_hidden_layers": 2, "sliding_window": 9}', "layer_types"),
    ],
)
def test_what_cannot_be_read_says_what_to_do(tmp_path: Path, text: str | None, what: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=what):
        read_layers(tmp_path)


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (VllmOptions(tp=3), "8 KV heads among 3 ranks"),
        (VllmOptions(pp=99), "only 32 layers"),
        (VllmOptions(tp=2, dcp=4), "divisor of --tp 2"),
        (VllmOptions(kv_dtype="int3"), "--kv-dtype int3: choose auto"),
        (VllmOptions(draft="mtp"), "no layers for mtp"),
        (VllmOptions(draft="magic"), "neither a folder nor one of"),
    ],
)
def test_a_wrong_wish_says_what_to_choose(asked: VllmOptions, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        judge(HERE / "llama-3.1-8b", asked)


def test_configurations_of_earlier_versions_list_no_layers(tmp_path: Path) -> None:
    for name in ("gemma-2-27b", "gemma-3-27b", "gpt-oss-20b", "olmo-3-32b", "command-a-03-2025",
                 "qwen3-next-80b-a3b", "llama-4-scout", "qwen3.5"):  # fmt: skip
        document = json.loads((HERE / name / "config.json").read_text())
        text = document.get("text_config", document)
        del text["layer_types"]
        (tmp_path / "config.json").write_text(json.dumps(document))
        assert read_layers(tmp_path).layers == read_layers(HERE / name).layers, name
