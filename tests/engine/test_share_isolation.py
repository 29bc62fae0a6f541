"""Who shares with whom: salts, tenants, adapters, roles, and replicas that were reset."""

import json
import shutil
from pathlib import Path

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import CHUNK, SAVED, SharedStore, one_by_one
from tests.engine.harness import run_replica, run_replicas
from tests.engine.job import Generate, Job, Prompt, ResetPrefixCache, Result
from tests.engine.prompts import prompt_of

CHUNKS = 3
WHOLE = CHUNKS * CHUNK
PLAIN = prompt_of(WHOLE + 9)
UNKNOWN = prompt_of(WHOLE + 9, seed=1)
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


def salted(salt: str) -> Prompt:
    return PLAIN.model_copy(update={"cache_salt": salt})


def adapted(folder: Path) -> Prompt:
    return PLAIN.model_copy(update={"lora": folder})


def make_adapter(folder: Path, *, seed: int) -> Path:
    """An adapter of the tiny Llama that changes the values of every layer, and so its tokens."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name in ("q_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(8, 256) * 0.2
            weights[f"{stem}.lora_B.weight"] = torch.randn(256, 8) * 0.2
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def reading(job: Job) -> Job:
    """The same replica with the rights of a reader; vLLM would have it save as well."""
    connector = dict(job.connector or {})
    extra = connector["kv_connector_extra_config"] | {"role": "reader"}
    return job.model_copy(update={"connector": connector | {"kv_connector_extra_config": extra}})


@scenario
def sharing(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    ada, ben = (make_adapter(folder / name, seed=i) for i, name in enumerate(("ada", "ben")))
    cid = make_adapter(folder / "cid", seed=2)
    moved = folder / "elsewhere" / "ada-moved"
    shutil.copytree(ada, moved)
    exchanged = folder / "exchanged" / "ben"
    make_adapter(exchanged, seed=3)
    saved = [PLAIN, salted("red"), adapted(ada), adapted(ben)]
    asked = [
        *(PLAIN, salted("red"), salted("blue"), adapted(moved), adapted(ben), adapted(cid)),
        *(adapted(exchanged), UNKNOWN, UNKNOWN),
    ]
    alone, producer = run_replicas(
        [
            Job(steps=one_by_one(asked), engine=LORA),
            # Twice: who an adapter is may be known only when its first request is over.
            store.job(*one_by_one([*saved, *saved]), engine=LORA, role="kv_producer"),
        ],
        folder,
    )
    files = len(store.payloads())
    consumer, tenant, reader = run_replicas(
        [
            store.job(*one_by_one(asked), engine=LORA, role="kv_consumer"),
            store.copy(folder / "tenant").job(*one_by_one([PLAIN, PLAIN]), tenant="other"),
            reading(store.copy(folder / "read").job(*one_by_one([PLAIN, UNKNOWN, UNKNOWN]))),
        ],
        folder,
    )
    return {
        "alone": alone,
        "producer": producer,
        "consumer": consumer,
        "tenant": tenant,
        "reader": reader,
        "read files": len(SharedStore(folder / "read").payloads()),
        "files": [files, len(store.payloads())],
    }


def consumed() -> dict[str, int | None]:
    """Cached tokens of each prompt of the consumer."""
    names = (
        *("plain", "own salt", "other salt", "moved adapter", "adapter", "other adapter"),
        *("exchanged adapter", "unknown", "unknown again"),
    )
    return dict(zip(names, sharing()["consumer"].cached, strict=True))


def test_loaded_or_not_each_prompt_gets_the_tokens_of_its_adapter() -> None:
    tokens = sharing()["alone"].tokens
    assert sharing()["consumer"].tokens == tokens
    assert len(set(tokens)) == 6  # without an adapter, with each of four, and the unknown prompt


def test_equal_prompts_share_only_with_an_equal_salt() -> None:
    assert (consumed()["own salt"], consumed()["other salt"]) == (WHOLE, 0)


def test_an_adapter_is_known_by_its_weights_not_by_its_name_or_path() -> None:
    cached = consumed()
    assert (cached["adapter"], cached["moved adapter"]) == (WHOLE, WHOLE)
    assert (cached["other adapter"], cached["exchanged adapter"]) == (0, 0)


def test_a_consumer_loads_and_never_saves() -> None:
    before, after = sharing()["files"]
    assert consumed()["plain"] == WHOLE
    assert (consumed()["unknown"], consumed()["unknown again"]) == (0, 0)
    assert before == after == 4 * CHUNKS


def test_a_reader_loads_and_writes_nothing_though_vllm_would_have_it_save() -> None:
    run: Result = sharing()["reader"]
    assert run.cached == [WHOLE, 0, 0]
    assert run.tokens == [sharing()["alone"].tokens[i] for i in (0, -1, -1)]
    assert sharing()["read files"] == 4 * CHUNKS
    ours = [name for name, n in run.metrics.items() if n and name.startswith("vllm:objkv")]
    assert "vllm:objkv_loads" in ours
    assert not [name for name in ours if "error" in name or "save" in name]


def test_a_producer_saves_and_never_loads() -> None:
    run: Result = sharing()["producer"]
    assert run.cached == [0] * 8
    assert not run.metrics.get("vllm:objkv_loads")


def test_tenants_never_share_but_each_with_itself() -> None:
    assert sharing()["tenant"].cached == [0, WHOLE]
    assert sharing()["tenant"].tokens == [sharing()["alone"].tokens[0]] * 2


@scenario
def reset(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    steps = (
        *one_by_one([PLAIN, PLAIN]),
        ResetPrefixCache(connector=True),
        *one_by_one([PLAIN, PLAIN]),
        ResetPrefixCache(connector=True),
        Generate(prompts=(PLAIN, salted("red"))),
        SAVED,
    )
    alone, first = run_replicas([Job(steps=steps), store.job(*steps)], folder)
    values: Values = {"alone": alone, "first": first, "namespaces": len(store.namespaces())}
    epochs = [store.job(*one_by_one([PLAIN]), weights_epoch=epoch) for epoch in (1, 3)]
    after = run_replicas(epochs, folder)
    again = run_replica(epochs[1], folder)
    return values | {"epoch 1": after[0], "epoch 3": after[1], "epoch 3 again": again}


def test_a_reset_replica_loads_nothing_from_before_and_saves_anew() -> None:
    run: Result = reset()["first"]
    assert run.tokens == reset()["alone"].tokens
    assert run.cached[:5] == [0, WHOLE, 0, WHOLE, 0]
    assert all(run.answers)
    assert reset()["namespaces"] == 3


@pytest.mark.parametrize(
    ("epoch", "cached"), [("epoch 1", 0), ("epoch 3", 0), ("epoch 3 again", WHOLE)]
)
def test_replicas_share_by_an_epoch_that_was_set_not_by_resets_that_were_counted(
    epoch: str, cached: int
) -> None:
    assert reset()[epoch].cached == [cached]
    assert reset()[epoch].tokens == reset()["alone"].tokens[:1]


def test_a_reset_is_told_to_the_operator() -> None:
    told = [w for w in reset()["first"].warnings if "cache reset" in w.message]
    assert len(told) == 2
