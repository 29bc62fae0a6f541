"""The rows of ``test_zoo``: replicas that share, and replicas that must not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

from tests.engine import model
from tests.engine.fleet import BLOCK, CHUNK, SharedStore, offloading
from tests.engine.fp8_kernels import FP8_ENGINE
from tests.engine.job import Prompt, prompt_of, tokens_of
from tests.engine.model import ModelName
from tests.engine.speculation import make_pair

Cached = tuple[int, ...]
Connect = Callable[[SharedStore], dict[str, Any]]


@dataclass(frozen=True)
class Side:
    settings: dict[str, Any] = field(default_factory=dict)
    """objkv's; ``{folder}`` in a text is the row's folder."""
    engine: dict[str, Any] = field(default_factory=dict)
    kv_role: str = "kv_both"
    ranks: int = 1
    stages: int = 1
    connect: Connect | None = None
    """Another ``kv_transfer_config`` than the plain one."""


@dataclass(frozen=True)
class Row:
    """A saves what it computes, B is asked for the same or else, and loads so much of it."""

    name: str
    cached: Cached | Callable[[int], Cached]
    """Of B's prompts; by the size of a block where the processor decides on that."""
    asked: tuple[Prompt, ...]
    saved: tuple[Prompt, ...] = ()
    """What A is asked, if not the same."""
    model: ModelName = "llama"
    engine: Callable[[], dict[str, Any]] = dict
    """Of both replicas."""
    a: Side = Side()
    b: Side = Side()
    look: Literal["cached", "heads", "request", ""] = "cached"
    """How the bytes in the paged cache are looked at: see ``pages``."""
    tokens: Literal["all", "computed", "none"] = "all"
    """Of which prompts they tell anything: with some dtypes and backends they depend on what else
    is computed in the same step, and so on what was loaded."""
    stems: tuple[str, ...] = ()
    """The names of the payloads' files without their suffix: one for each group of a chunk."""
    layers: tuple[str, ...] = ()
    """Dtype and scales of the payloads' tensors."""
    namespaces: int = 1
    adds: int | None = None
    """Payloads that B saves; None if that is told by another row."""
    counted: frozenset[str] = frozenset()
    """What B counts at least once."""
    files: dict[str, str] = field(default_factory=dict)
    """Put into the row's folder, to be read by its owner only."""
    accepts: float | None = None
    """The share of a draft's tokens that are accepted; both replicas accept as many."""
    spoils: tuple[str, ...] = ()
    """Names of payloads: of one prompt each the last one has a bit flipped, and is computed and
    saved again."""


def prompts(*lengths: int, **more: Any) -> tuple[Prompt, ...]:
    return tuple(prompt_of(n, seed=n, **more) for n in lengths)


def whole(*lengths: int, chunk: int = CHUNK) -> Cached:
    """Whole chunks of them."""
    return tuple(n // chunk * chunk for n in lengths)


def but_one(*lengths: int, chunk: int = CHUNK) -> Cached:
    """Whole chunks that leave a token to compute."""
    return tuple((n - 1) // chunk * chunk for n in lengths)


TWO = prompts(300, 600)
TWO_LOADED = whole(300, 600)
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK, 5 * CHUNK + 40)
LONG = prompts(LENGTHS[-1])[0]
FORKS = (2 * CHUNK + 44, 3 * CHUNK, CHUNK - 1)
"""Where a prompt leaves the long one: in a chunk, between two, in the first."""
FORKED = tuple(
    Prompt(tokens=LONG.tokens[:at] + tokens_of(len(LONG.tokens), seed=99)[at:]) for at in FORKS
)
ALL = (*prompts(*LENGTHS), *FORKED)
PLAIN = prompt_of(3 * CHUNK + 9)
UNKNOWN = prompt_of(3 * CHUNK + 9, seed=1)
THREE = 3 * CHUNK


def salted(salt: str) -> Prompt:
    return PLAIN.model_copy(update={"cache_salt": salt})


def adapted(name: str, seed: int) -> Prompt:
    return PLAIN.model_copy(update={"lora": model.adapter(name, seed)})


def _plain() -> list[Row]:
    between = (*whole(*LENGTHS), *whole(*FORKS))
    layerwise = (0, 0, CHUNK - BLOCK, CHUNK, 4 * CHUNK - BLOCK, *between[5:])
    rows = [
        Row(
            f"load mode {mode}",
            layerwise if mode == "layerwise" else between,
            ALL,
            saved=ALL[: len(LENGTHS)],
            b=Side({"load_mode": mode}),
            stems=("0",),
            adds=sum(5 - at // CHUNK for at in FORKS),
            spoils=("0",) if mode != "auto" else (),
        )
        for mode in ("async", "layerwise", "auto")
    ]
    rows += [
        Row("without loading", (0, 0), TWO, b=Side({"admission": "never"}), look="",
            adds=0),
        Row("a folder and nothing else", whole(98, 33, chunk=BLOCK), prompts(98, 33),
            a=Side(connect=_folder_only), b=Side(connect=_folder_only), adds=0),
        Row("in pieces", TWO_LOADED, TWO, engine=lambda: {"max_num_batched_tokens": 96}, adds=0),
    ]  # fmt: skip
    return rows


def _folder_only(store: SharedStore) -> dict[str, Any]:
    """A replica whose only address is a folder, which is its own index."""
    connector = dict(store.job(chunk_tokens=BLOCK).connector or {})
    extra = dict(connector["kv_connector_extra_config"])
    del extra["index_url"]
    return connector | {"kv_connector_extra_config": extra}


def _shared_or_not() -> list[Row]:
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    saved = (PLAIN, salted("red"), adapted("ada", 0), adapted("ben", 1))
    asked = (
        *(PLAIN, salted("red"), salted("blue"), adapted("moved", 0), adapted("ben", 1)),
        *(adapted("cid", 2), adapted("exchanged/ben", 3), UNKNOWN),
    )
    cached = (THREE, THREE, 0, THREE, THREE, 0, 0, 0)
    return [
        # Twice: who an adapter is may be known only when its first request is over.
        Row("salts, adapters and a consumer", cached, asked, saved=(*saved, *saved),
            engine=lambda: lora, look="", a=Side(kv_role="kv_producer"),
            b=Side(kv_role="kv_consumer"), adds=0),
        Row("another tenant", (0, THREE), (PLAIN, PLAIN), saved=(PLAIN,),
            b=Side({"tenant": "other"}), namespaces=2, adds=3),
        Row("a reader", (THREE, 0, 0), (PLAIN, UNKNOWN, UNKNOWN), saved=(PLAIN,),
            b=Side({"role": "reader"}), adds=0),
        Row("another block size", (0,), (PLAIN,), b=Side(engine={"block_size": 64}), look="",
            namespaces=2),
        Row("another epoch of the weights", (0, THREE), (PLAIN, PLAIN), saved=(PLAIN,),
            b=Side({"weights_epoch": 1}), namespaces=2, adds=3),
    ]  # fmt: skip


def _sealed() -> list[Row]:
    old, new, strange = (Random(seed).randbytes(32).hex() for seed in range(3))
    files = {
        "old": f"2026-05 * {old}\n",
        "rotated": f"2026-06 * {new}\n2026-05 * {old}\n",
        "strange": f"2026-05 * {strange}\n",
    }

    def held(name: str, **settings: Any) -> Side:
        file = f"{{folder}}/{name}"
        return Side({"signing_keys_file": file, "encryption_keys_file": file} | settings)

    a = held("old", codec="blosc")
    sealed: dict[str, Any] = {"files": files, "a": a, "adds": 0}
    return [
        Row("sealed", (THREE,), (PLAIN,), b=held("old", load_mode="layerwise"), **sealed),
        Row("sealed, keys rotated", (THREE,), (PLAIN,), b=held("rotated"), **sealed),
        Row("sealed for others", (0,), (PLAIN,), files=files, a=a, look="", namespaces=2),
        Row("sealed by others", (0,), (PLAIN,), files=files, a=a, b=held("strange"), look="",
            counted=frozenset({"load_corrupt"})),
    ]  # fmt: skip


def _dtypes() -> list[Row]:
    rows = [
        Row(f"bfloat16, {codec}", TWO_LOADED, TWO, engine=lambda: {"dtype": "bfloat16"},
            a=Side({"codec": codec}), layers=("BF16",), tokens="computed")
        for codec in ("blosc", "lz4")
    ]  # fmt: skip
    rows.append(
        Row("float16", TWO_LOADED, TWO, engine=lambda: {"dtype": "float16"}, layers=("F16",),
            tokens="computed")
    )  # fmt: skip
    for dtype, kv, layer in (
        ("float32", "fp8", "F8_E4M3 1.0 1.0"),
        ("bfloat16", "fp8_e5m2", "F8_E5M2 1.0 1.0"),
    ):
        other = {"fp8": "fp8_e5m2", "fp8_e5m2": "fp8"}[kv]
        engine = {"dtype": dtype, "kv_cache_dtype": kv} | FP8_ENGINE
        rows += [
            Row(f"{dtype}, {kv}", TWO_LOADED, TWO, engine=lambda engine=engine: engine,
                layers=(layer,), tokens="computed"),
            Row(f"{kv}, then {other}", (0, 0), TWO, engine=lambda engine=engine: engine,
                b=Side(engine={"kv_cache_dtype": other}), look="", namespaces=2),
        ]  # fmt: skip
    # The KV dtype is the checkpoint's own: nobody sets it.
    scaled: dict[str, Any] = {"a": Side({"model_id": "scaled"}), "layers": ("F8_E4M3 0.5 2.0",)}
    scaled |= {"engine": lambda: FP8_ENGINE | {"model": str(scaled_models())}}
    quarter = Side({"model_id": "scaled"}, engine={"model": str(scaled_folder("quarter"))})
    rows += [
        Row("scales", TWO_LOADED, TWO, b=scaled["a"], tokens="computed", **scaled),
        Row("other scales", (0, 0), TWO, b=quarter, look="", namespaces=2, **scaled),
    ]
    return rows


SCALES = {"half": (0.5, 2.0), "quarter": (0.25, 2.0)}
"""Of K and V, in two checkpoints whose weights are the same."""


def scaled_folder(name: str) -> Path:
    return model.place(f"llama-{name}", __file__, model.__file__)


def scaled_models() -> Path:
    """Make the tiny Llama as llm-compressor leaves it when it calibrates the KV cache only, with
    all scales; the folder of the first."""
    made = [
        model.make_once(scaled_folder(name), lambda folder, name=name: _scale(folder, name))
        for name in SCALES
    ]
    return made[0]


def _scale(folder: Path, name: str) -> None:
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
        for part, scale in zip("kv", SCALES[name], strict=True):
            weights[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor(scale)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _drafts() -> list[Row]:
    rows = []
    for method in ("draft_model", "eagle", "dflash", "mtp"):
        # vLLM drops the last block of each match of its own for drafts that continue hidden states.
        loaded = tuple(n - BLOCK * (method != "draft_model") for n in TWO_LOADED)
        rows.append(
            Row(
                f"draft {method}",
                loaded,
                prompts(300, 600, max_tokens=24),
                engine=lambda method=method: make_pair(method),
                stems=("0", "draft"),
                accepts=0.9 if method in ("draft_model", "eagle") else 0.0,
            )
        )
    plain = Side(engine={"speculative_config": None})
    eagle = prompts(300, 600, max_tokens=24)
    rows += [
        Row("a draft finds what was saved without one", rows[1].cached, eagle,
            engine=lambda: make_pair("eagle"), a=plain, stems=("0",), adds=0),
        Row("no draft finds what was saved with one", TWO_LOADED, eagle,
            engine=lambda: make_pair("eagle"), b=plain, adds=0),
    ]  # fmt: skip
    return rows


def _hybrids() -> list[Row]:
    # By default vLLM keeps a window's blocks at the very end of a prompt only.
    dense = {"prefix_cache_retention_interval": BLOCK}
    windows = {256: (40, 256, 257, 513, 700, 1500), BLOCK: (20, 33, 64, 65, 97, 200, 700)}
    rows = [
        Row(f"windows, chunks of {chunk}", but_one(*lengths, chunk=chunk), prompts(*lengths),
            model="gpt_oss", engine=lambda: dense, a=Side({"chunk_tokens": chunk}),
            b=Side({"chunk_tokens": chunk, "load_mode": "layerwise"}), adds=0,
            spoils=("0", "1") if chunk == 256 else ())
        for chunk, lengths in windows.items()
    ]  # fmt: skip
    states = (100, 160, 161, 500, 900)
    state_engine = {"dtype": "bfloat16"}
    # Of the shorter one no state was kept where it ends, of the longer one there was.
    ends = (prompt_of(700, seed=900, max_tokens=12), prompt_of(1300, seed=900, max_tokens=12))
    rows += [
        Row("windows, in pieces", but_one(1500, 700, chunk=256), prompts(1500, 700),
            model="gpt_oss", engine=lambda: dense | {"max_num_batched_tokens": 384},
            a=Side({"chunk_tokens": 256}), b=Side({"chunk_tokens": 256}), adds=0),
        Row("latents", (256, 640), prompts(300, 700), model="deepseek", look="request",
            tokens="none", layers=("F32",), adds=0),
        Row("states", lambda block: (*but_one(*states, chunk=block), 0, 899 // block * block),
            (*prompts(*states, max_tokens=12), *ends), saved=prompts(*states, max_tokens=12),
            model="qwen3_next", engine=lambda: state_engine),
        Row("states, spoilt", lambda block: but_one(410, 420, chunk=block),
            prompts(410, 420, max_tokens=12), model="qwen3_next", engine=lambda: state_engine,
            spoils=("0", "3")),
        Row("states, in pieces",
            lambda block: (699 // (2 * block) * 2 * block, 899 // block * block),
            (ends[0], prompts(900, max_tokens=12)[0]), saved=prompts(900, max_tokens=12),
            model="qwen3_next", engine=lambda: state_engine | {"max_num_batched_tokens": 320}),
    ]  # fmt: skip
    return rows


def _shapes() -> list[Row]:
    """Whatever the shape, the ranks of a replica write one payload."""
    two, one, stages = Side(ranks=2), Side(), Side(stages=2)
    within = Side({"load_mode": "layerwise"}, ranks=2)

    def row(name: str, a: Side, b: Side, **more: Any) -> Row:
        options = {"cached": TWO_LOADED, "stems": ("0",)} | more
        return Row(name, asked=TWO, a=a, b=b, adds=0, **options)

    return [
        row("two ranks, then one", two, one, look="heads"),
        row("two ranks, then two", two, two, look="heads"),
        row("one rank, then two", one, within, look="heads"),
        row("two stages, then one", stages, one, look=""),
        row("two stages, then two", stages, stages, look=""),
        row("two ranks, then two stages", two, stages, look=""),
        row("two stages of two groups, then one", stages, one, look="", model="gpt_oss",
            cached=but_one(300, 600), stems=("0", "1")),
    ]  # fmt: skip


def _tiers() -> list[Row]:
    """objkv's tier below vLLM's own offloading, whose blocks have 32 tokens."""

    def tier(**options: Any) -> Side:
        return Side(connect=lambda store: offloading(store, **options))

    def row(name: str, cached: Cached, side: Side, **more: Any) -> Row:
        look = more.pop("look", "")
        return Row(f"tier, {name}", cached, TWO, a=side, b=side, look=look, adds=0, **more)

    draft = {"method": "draft_model", "model": str(model.folder("llama_draft"))}

    def drafted() -> dict[str, Any]:
        model.make("llama_draft")
        return {"speculative_config": draft | {"num_speculative_tokens": 2}}

    blocks = whole(300, 600, chunk=BLOCK)
    ranks = Side(connect=lambda store: offloading(store, canonical=True), ranks=2)
    return [
        row("chunks", TWO_LOADED, tier(chunk_tokens=CHUNK), look="cached", spoils=("*",)),
        row("windows", blocks, tier(), model="gpt_oss"),
        row("draft", blocks, tier(settings={"speculative": "draft-1"}), engine=drafted),
        Row("tier, one rank, then two", blocks, TWO, a=tier(canonical=True), b=ranks, look="",
            adds=0),
        Row("tier, two ranks, then one", blocks, TWO, a=ranks, b=tier(canonical=True), look="",
            adds=0),
    ]  # fmt: skip


def rows() -> dict[str, Row]:
    made = (
        *(*_plain(), *_shared_or_not(), *_sealed(), *_dtypes()),
        *(*_drafts(), *_hybrids(), *_shapes(), *_tiers()),
    )
    return {row.name: row for row in made}
