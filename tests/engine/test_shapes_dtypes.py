"""Caches of every dtype and every codec: what one replica writes the others read, bit for bit.

The codec belongs to a payload and not to the identity, so replicas with different settings share;
the cache's dtype does, so fp8 and bfloat16 replicas do not, nor do the two kinds of fp8.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from objkv.codec.payload import read_header
from tests.engine import model
from tests.engine.cache import Values, scenario
from tests.engine.fleet import NUMBERS_TOLD, SAVED, SharedStore
from tests.engine.fp8_kernels import FP8_ENGINE
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Job, Prompt, ResetPrefixCache, Step
from tests.engine.pages import LOADED_PAGES
from tests.engine.prompts import prompt_of, tokens_of

CODECS = ("blosc", "zstd", "lz4")
LENGTHS = (300, 600, 1100)
"""The prompt that the replica with each codec writes."""
LOADED = [256, 512, 1024]
PROMPTS = tuple(prompt_of(n, seed=n, max_tokens=12) for n in LENGTHS)
# One at a time: the sums of bfloat16 products depend on how many tokens a step has.
ALL = tuple(Generate(prompts=(prompt,)) for prompt in PROMPTS)
OTHER_ENDS = tuple(
    Generate(
        prompts=(Prompt(tokens=prompt.tokens[:loaded] + tokens_of(len(prompt.tokens))[loaded:]),)
    )
    for prompt, loaded in zip(PROMPTS, LOADED, strict=True)
)
"""With these in vLLM's own prefix cache, it computes exactly what a replica that loads does."""
LOOK_FIRST = Call(
    function=LOADED_PAGES,
    arguments={"prompts": [tokens_of(LENGTHS[0], seed=LENGTHS[0])[: LOADED[0] + 1]]},
)
LOOK = Call(
    function=LOADED_PAGES,
    arguments={
        "prompts": [
            tokens_of(length, seed=length)[: loaded + 1]
            for length, loaded in zip(LENGTHS, LOADED, strict=True)
        ]
    },
)


@scenario
def three_codecs_one_store(folder: Path) -> Values:
    store = SharedStore(folder / "store")

    def replica(*steps: Step, **settings: Any) -> Job:
        engine = {"dtype": "bfloat16"}
        return store.job(*steps, engine=engine, chunk_tokens=256, **settings)

    alone = replica(*ALL, LOOK, ResetPrefixCache(), *OTHER_ENDS, *ALL)
    alone = alone.model_copy(update={"connector": None})
    runs: Values = {"alone": run_replica(alone, folder)}
    steps: tuple[Step, ...]
    for number, codec in enumerate(CODECS):
        mode = "layerwise" if codec == "lz4" else "async"
        steps = (*ALL[: number + 1], SAVED)
        runs[codec] = run_replica(
            replica(*steps, NUMBERS_TOLD, codec=codec, load_mode=mode), folder
        )
    steps = (*ALL, LOOK, ResetPrefixCache(), *ALL)
    runs["reader"] = run_replica(replica(*steps), folder)
    return runs


def test_each_replica_loads_what_the_others_wrote_with_another_codec() -> None:
    runs = three_codecs_one_store()
    for number, codec in enumerate(CODECS):
        assert runs[codec].cached[: number + 1] == [*LOADED[:number], 0], codec
    assert runs["reader"].cached == LOADED * 2


def test_the_tokens_are_those_of_vllm_alone() -> None:
    runs = three_codecs_one_store()
    count = len(PROMPTS)
    computed, cached = runs["alone"].tokens[:count], runs["alone"].tokens[-count:]
    assert runs["alone"].cached == [0] * 2 * count + LOADED
    assert runs["reader"].tokens == cached * 2
    for number, codec in enumerate(CODECS):
        assert runs[codec].tokens[: number + 1] == [*cached[:number], computed[number]], codec


def test_every_loaded_page_is_what_vllm_alone_computes() -> None:
    runs = three_codecs_one_store()
    assert runs["reader"].answers[0] == runs["alone"].answers[0]
    assert all(all(digests) for page in runs["alone"].answers[0] for digests in page.values())


def test_payloads_of_the_shuffling_codecs_are_smaller() -> None:
    runs = three_codecs_one_store()
    raw = 2 * 3 * 4 * 64 * 2  # K and V, layers, heads, content, bytes of bfloat16, per token
    for codec, tokens in (("blosc", 256), ("zstd", 512)):
        assert runs[codec].metrics["vllm:objkv_save_bytes"] < 0.98 * raw * tokens, codec


@scenario
def half_precision(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    job = store.job(*ALL[:2], SAVED, LOOK, engine={"dtype": "float16"}, chunk_tokens=256)
    runs: Values = {"first": run_replica(job, folder), "second": run_replica(job, folder)}
    header = read_header(store.payloads()[0].read_bytes())
    return runs | {"kinds": sorted({layer.dtype for layer in header.frames.layers})}


@pytest.mark.wide
def test_float16_is_float16_on_both_sides() -> None:
    runs = half_precision()
    assert runs["kinds"] == ["F16"]
    assert (runs["first"].cached, runs["second"].cached) == ([0, 0], LOADED[:2])
    assert runs["first"].tokens == runs["second"].tokens
    assert runs["first"].answers[-1] == runs["second"].answers[-1]


OTHER_KIND = {"fp8": "fp8_e5m2", "fp8_e5m2": "fp8"}
QUANTISED = (
    pytest.param("float32", "fp8"),
    ("bfloat16", "fp8_e5m2"),
)
"""What the model computes in, and its cache: one process writes it, another one loads it."""


@scenario
def quantised_caches(folder: Path, dtype: str, kv: str) -> Values:
    """Between the two a replica with the other kind of fp8 uses the same store."""
    store = SharedStore(folder / "store")

    def replica(kind: str, *steps: Step) -> Job:
        engine = {"dtype": dtype, "kv_cache_dtype": kind} | FP8_ENGINE
        return store.job(*steps, engine=engine, chunk_tokens=256)

    steps: tuple[Step, ...] = (*ALL[:2], SAVED, LOOK)
    runs: Values = {"first": run_replica(replica(kv, *steps), folder)}
    headers = [read_header(path.read_bytes()) for path in store.payloads()]
    layers = {layer for header in headers for layer in header.frames.layers}
    runs["kinds"] = sorted({(layer.dtype, layer.scales) for layer in layers})
    runs["other"] = run_replica(replica(OTHER_KIND[kv], *steps), folder)
    runs["again"] = run_replica(replica(kv, *steps), folder)
    runs["namespaces"] = len(store.namespaces())
    return runs


@pytest.mark.wide
@pytest.mark.parametrize(("dtype", "kv"), QUANTISED)
def test_an_fp8_cache_is_loaded_bit_for_bit_by_its_own_kind(dtype: str, kv: str) -> None:
    runs = quantised_caches(dtype, kv)
    first, again = runs["first"], runs["again"]
    assert first.cached == [0, 0]
    assert again.cached == LOADED[:2]
    assert first.tokens == again.tokens
    assert first.answers[-1] == again.answers[-1]
    assert all(all(page.values()) for page in first.answers[-1][:2])


@pytest.mark.wide
@pytest.mark.parametrize(("dtype", "kv"), QUANTISED)
def test_one_kind_of_fp8_is_not_taken_for_the_other(dtype: str, kv: str) -> None:
    runs = quantised_caches(dtype, kv)
    assert runs["namespaces"] == 2
    assert runs["other"].cached == [0, 0]
    assert runs["other"].answers[-1][0] != runs["first"].answers[-1][0]


@pytest.mark.wide
@pytest.mark.parametrize(("dtype", "kv"), QUANTISED)
def test_payloads_say_what_their_bytes_are(dtype: str, kv: str) -> None:
    kind = {"fp8": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}[kv]
    assert [list(one) for one in quantised_caches(dtype, kv)["kinds"]] == [[kind, "1.0 1.0"]]


SCALES = ((0.5, 2.0), (0.25, 2.0))
"""Of K and V, in two checkpoints whose weights are the same."""


def scaled_model(folder: Path, scales: tuple[float, float]) -> Path:
    """The tiny Llama as llm-compressor leaves it when it calibrates the KV cache only."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model.make("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme | {"symmetric": True},
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for name, scale in zip("kv", scales, strict=True):
            weights[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor(scale)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@scenario
def scaled(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    runs: Values = {}
    for number, scales in enumerate(SCALES):
        made = scaled_model(folder / f"model-{number}", scales)
        steps: tuple[Step, ...] = (*ALL[:1], SAVED, LOOK_FIRST)
        # The KV dtype is the checkpoint's own: nobody sets it.
        engine = {"model": str(made)} | FP8_ENGINE
        job = store.job(*steps, engine=engine, chunk_tokens=256, model_id="scaled")
        runs[f"first {number}"] = run_replica(job, folder)
    runs["second 1"] = run_replica(job, folder)
    headers = [read_header(path.read_bytes()) for path in store.payloads()]
    layers = {layer for header in headers for layer in header.frames.layers}
    runs["kinds"] = sorted({(layer.dtype, layer.scales) for layer in layers})
    runs["namespaces"] = len(store.namespaces())
    return runs


@pytest.mark.wide
def test_the_scales_of_a_checkpoint_are_in_its_payloads() -> None:
    runs = scaled()
    wanted = sorted(["F8_E4M3", f"{k} {v}"] for k, v in SCALES)
    assert [list(kind) for kind in runs["kinds"]] == wanted


@pytest.mark.wide
def test_checkpoints_that_differ_in_their_scales_alone_share_nothing() -> None:
    runs = scaled()
    assert runs["namespaces"] == len(SCALES)
    first, other, second = (runs[name] for name in ("first 0", "first 1", "second 1"))
    assert (first.cached, other.cached, second.cached) == ([0], [0], LOADED[:1])
    assert second.tokens == other.tokens
    assert second.answers[-1] == other.answers[-1] != first.answers[-1]
