"""The answers of vLLM that ``record.py`` recorded, as objects that objkv's own code can read.

``answers.json`` of a model has a row for each case and different answer, with the versions that
give it. It has the names of layers once, and refers to them by ranges such as ``0-60:2``.
"""

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)

from objkv.config import Config
from objkv.connector.model.groups import Geometry
from objkv.connector.model.identity import read_geometry
from objkv.errors import ConfigError

HERE = Path(__file__).parent
_ENUMS: dict[str, Any] = {
    "KVQuantMode": kv_cache_interface.KVQuantMode,
    "SparseCacheRole": getattr(kv_cache_interface, "SparseCacheRole", {}),
    "MambaAttentionBackendEnum": MambaAttentionBackendEnum,
}
VERSIONS = ("0.31", "0.32", "0.33")


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    title: str
    source: str
    tp: int = 8
    drafts: tuple[dict[str, Any], ...] = ()
    max_model_len: int = 4096

    @property
    def folder(self) -> Path:
        return HERE / self.name

    def cases(self) -> dict[str, dict[str, Any]]:
        sizes = {
            "plain": {},
            f"TP {self.tp}": {"tp": self.tp},
            "PP 2": {"pp": 2},
            "fp8": {"kv_dtype": "fp8"},
            f"TP {self.tp}, DCP 2": {"tp": self.tp, "dcp": 2},
        }
        for draft in self.drafts:
            sizes[draft["draft"]] = draft
        return {name: {**case, "max_model_len": self.max_model_len} for name, case in sizes.items()}


@cache
def models() -> dict[str, Model]:
    table = tomllib.loads((HERE / "models.toml").read_text())
    return {
        name: Model(
            name=name, **{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        )
        for name, row in table.items()
    }


def write(model: Model, version: str, found: dict[str, Any]) -> None:
    """Replace one version's answers. None if there are no answers."""
    known = answers(model.name) if (model.folder / "answers.json").exists() else {}
    known = {one: cases for one, cases in known.items() if one != version}
    if found:
        known[version] = found
    names: dict[str, int] = {}
    rows: dict[tuple[str, str], list[str]] = {}
    for one, cases in sorted(known.items()):
        for case, answer in cases.items():
            text = json.dumps(_renamed(answer, lambda ns: _ranges(_numbers(ns, names))))
            rows.setdefault((case, text), []).append(one)
    lines = ",\n".join(
        f'  {{"case": {json.dumps(case)}, "versions": {json.dumps(versions)}, "answer": {text}}}'
        for (case, text), versions in rows.items()
    )
    (model.folder / "answers.json").write_text(
        f'{{\n "names": {json.dumps(list(names))},\n "answers": [\n{lines}\n ]\n}}\n'
    )


@cache
def answers(name: str) -> dict[str, dict[str, Any]]:
    whole = json.loads((HERE / name / "answers.json").read_text())
    names = whole["names"]
    found: dict[str, dict[str, Any]] = {}
    for row in whole["answers"]:
        answer = _renamed(row["answer"], lambda text: [names[number] for number in _expanded(text)])
        for version in row["versions"]:
            found.setdefault(version, {})[row["case"]] = answer
    return found


def _renamed(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: change(one)
            if key == "layers" and not isinstance(one, int)
            else _renamed(one, change)
            for key, one in value.items()
        }
    return [_renamed(one, change) for one in value] if isinstance(value, list) else value


def _numbers(layers: list[str], names: dict[str, int]) -> list[int]:
    return [names.setdefault(layer, len(names)) for layer in layers]


def _ranges(numbers: list[int]) -> str:
    parts, at = [], 0
    while at < len(numbers):
        end = at + 1
        step = numbers[end] - numbers[at] if end < len(numbers) else 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step and step > 0:
            end += 1
        if end - at < 3:
            end, step = at + 1, 1
        one = f"{numbers[at]}" if end == at + 1 else f"{numbers[at]}-{numbers[end - 1]}"
        parts.append(one if step == 1 else f"{one}:{step}")
        at = end
    return ",".join(parts)


def _expanded(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        numbers += range(int(first), int(last or first) + 1, int(step or 1))
    return numbers


def geometry(answer: dict[str, Any], case: dict[str, Any]) -> Geometry | str:
    """Let objkv read the answer. A text is the error of objkv, or of vLLM before it."""
    if "error" in answer:
        return f"vLLM: {answer['error']}"
    try:
        return read_geometry(vllm_config(answer, case), kv_cache_config(answer), Config())
    except ConfigError as exc:
        return str(exc)


def vllm_config(answer: dict[str, Any], case: dict[str, Any]) -> Any:
    model, draft = answer["model"], answer["draft"]
    text = SimpleNamespace()
    if answer.get("layer_types"):
        text.layer_types = answer["layer_types"]
    speculative = None
    if case.get("draft"):
        speculative = SimpleNamespace(
            method=draft["method"] if draft else case["draft"],
            num_speculative_tokens=case.get("tokens", 1),
            draft_tensor_parallel_size=case.get("tp", 1),
            draft_model_config=draft and _model_config(draft, SimpleNamespace()),
        )
    return SimpleNamespace(
        model_config=_model_config({**model, "dtype": answer["dtype"]}, text),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=case.get("tp", 1),
            pipeline_parallel_size=case.get("pp", 1),
            decode_context_parallel_size=case.get("dcp", 1),
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=case.get("tp", 1) * case.get("pp", 1),
            distributed_executor_backend="mp",
            use_ray=False,
            nnodes_within_dp=1,
        ),
        cache_config=SimpleNamespace(
            cache_dtype=case.get("kv_dtype", "auto"),
            block_size=_first_block_size(answer["groups"][0]),
            prefix_match_unit=None,
            enable_prefix_caching=True,
        ),
        kv_transfer_config=SimpleNamespace(),
        speculative_config=speculative,
        load_config=SimpleNamespace(load_format="dummy"),
    )


def _first_block_size(group: dict[str, Any]) -> int:
    spec = group["spec"] if "spec" in group else group["uniform"][0]["spec"]
    return int(spec["block_size"])


def _model_config(numbers: dict[str, Any], text: Any) -> Any:
    return SimpleNamespace(
        model="model",
        revision=None,
        use_mla=numbers.get("latent", False),
        seed=0,
        quantization=None,
        dtype=getattr(torch, numbers["dtype"]),
        hf_text_config=text,
        get_total_num_kv_heads=lambda: numbers["heads"],
        get_total_num_hidden_layers=lambda: numbers["layers"],
    )


def kv_cache_config(answer: dict[str, Any]) -> KVCacheConfig:
    groups = []
    for group in answer["groups"]:
        more = {"host_resident": True} if group.get("host_resident") else {}
        groups.append(KVCacheGroupSpec(group["layers"], _group_spec(group), **more))
    tensors = [
        KVCacheTensor(
            size=0,
            layers=tensor["layers"],
            layer_stride=tensor["layer_stride"],
            block_stride=tensor["block_stride"],
        )
        for tensor in answer["tensors"]
    ]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=tensors, kv_cache_groups=groups)


def _group_spec(group: dict[str, Any]) -> Any:
    if "spec" in group:
        return _spec(group["spec"])
    alike = {layer: _spec(one["spec"]) for one in group["uniform"] for layer in one["layers"]}
    specs = {layer: alike[layer] for layer in group["layers"]}
    return UniformTypeKVCacheSpecs(
        block_size=next(iter(specs.values())).block_size, kv_cache_specs=specs
    )


def _spec(values: dict[str, Any]) -> Any:
    kind = getattr(kv_cache_interface, values["type"])
    known = kind.__dataclass_fields__
    return kind(**{key: _value(one) for key, one in values.items() if key in known})


def _value(value: Any) -> Any:
    if isinstance(value, dict) and "dtype" in value:
        return getattr(torch, value["dtype"])
    if isinstance(value, dict) and "enum" in value:
        kind, _, name = value["enum"].partition(".")
        return _ENUMS[kind][name]
    return tuple(map(_value, value)) if isinstance(value, list) else value


def tier(answer: dict[str, Any], case: dict[str, Any]) -> bool:
    """Whether vLLM itself could offload the cache to a tier."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        get_offloading_group_ids,
        resolve_dcp_kv_block_size,
    )
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    config = kv_cache_config(answer)
    try:
        groups = [config.kv_cache_groups[number] for number in get_offloading_group_ids(config)]
        _, size = resolve_kv_cache_block_sizes(config, vllm_config(answer, case))
    except ValueError:
        return False
    sizes = [resolve_dcp_kv_block_size(g.kv_cache_spec, case.get("dcp", 1)) for g in groups]
    return bool(sizes) and all(one % size == 0 for one in sizes)
