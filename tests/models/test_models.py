"""vLLM's recorded answers are whole, those of the installed vLLM, and what they come to."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import vllm

from objkv.connector.model.groups import Geometry
from objkv.errors import ConfigError
from objkv.ops.models.layers import read_layers
from objkv.ops.models.verdict import judge
from tests.models.recorded import HERE, answers, geometry, models

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


def told(name: str, case: str) -> Geometry | str:
    return geometry(answers(name)["0.32"][case], models()[name].cases()[case])


@pytest.mark.slow
def test_a_refusal_names_a_fix() -> None:
    for model in models().values():
        for version, found in answers(model.name).items():
            for case, answer in found.items():
                said = geometry(answer, model.cases()[case])
                if isinstance(said, str) and not said.startswith("vLLM: "):
                    assert ": run it without the objkv connector, or " in said, (version, said)


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
    found = told("kimi-k2", "eagle3")
    assert isinstance(found, Geometry)
    shares = [[found.topology(group).held(rank) for rank in range(8)] for group in (0, 1)]
    assert {str(share.shard) for share in shares[0] if share} == {"L0-61_H0-1"}
    divided = [f"L0-1_H{8 * rank}-{8 * rank + 8}" for rank in range(8)]
    assert [str(share.shard) for share in shares[1] if share] == divided
    draft = found.groups[1]
    assert (draft.kind, draft.heads, draft.content, draft.page) == ("full", 64, 256, None)


@pytest.mark.parametrize("name", models())
def test_layers_have_the_caches_that_vllm_gives_them(name: str) -> None:
    found = told(name, "plain")
    mine = read_layers(HERE / name).layers
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


@pytest.mark.parametrize("name", models())
def test_the_verdict_is_the_connectors(name: str) -> None:
    found = told(name, "plain")
    verdict = judge(HERE / name)
    if isinstance(found, Geometry):
        assert (verdict.refused, verdict.use) == (None, "connector")
    else:
        assert (verdict.refused, verdict.use) == (found, "tier")


def test_float32_weights_have_a_sentence_and_are_computed_with_in_two_bytes(tmp_path: Path) -> None:
    document = json.loads((HERE / "llama-3.1-8b" / "config.json").read_text())
    plain = judge(HERE / "llama-3.1-8b")
    assert plain.note is None
    for name in ("torch_dtype", "dtype"):
        other = {key: document[key] for key in document if key not in ("dtype", "torch_dtype")}
        (tmp_path / "config.json").write_text(json.dumps({**other, name: "float32"}))
        found = judge(tmp_path)
        assert (found.kv_dtype, found.chunk_bytes) == ("bfloat16", plain.chunk_bytes)
        assert "--dtype auto computes with them in bfloat16" in str(found.note)


@pytest.mark.parametrize("name", models())
def test_a_chunk_has_the_bytes_of_its_layers(name: str) -> None:
    found = told(name, "plain")
    verdict = judge(HERE / name)
    if isinstance(found, Geometry) and all(group.kind == "full" for group in found.groups):
        cells = sum(len(group.layers) * group.heads * group.content for group in found.groups)
        assert verdict.token_bytes == 2 * cells
        assert verdict.chunk_bytes == 256 * 2 * cells
    if isinstance(found, Geometry) and verdict.state_bytes:
        # vLLM rounds up to what its kernels want, 128 tokens on a CPU.
        assert verdict.chunk_tokens <= found.chunk_tokens < verdict.chunk_tokens + 256


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


def test_a_wrong_wish_says_what_to_choose() -> None:
    with pytest.raises(ConfigError, match="8 KV heads among 3 ranks"):
        judge(HERE / "llama-3.1-8b", tp=3)
    with pytest.raises(ConfigError, match="--kv-dtype int3: choose auto"):
        judge(HERE / "llama-3.1-8b", kv_dtype="int3")


def test_configurations_of_earlier_versions_list_no_layers(tmp_path: Path) -> None:
    for name in ("gemma-2-27b", "gemma-3-27b", "gpt-oss-20b", "olmo-3-32b", "command-a-03-2025",
                 "qwen3-next-80b-a3b", "llama-4-scout", "qwen3.5"):  # fmt: skip
        document = json.loads((HERE / name / "config.json").read_text())
        text = document.get("text_config", document)
        del text["layer_types"]
        (tmp_path / "config.json").write_text(json.dumps(document))
        assert read_layers(tmp_path).layers == read_layers(HERE / name).layers, name
