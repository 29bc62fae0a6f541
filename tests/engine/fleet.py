"""Replicas that share one store: their jobs, what lies in it, and what goes on inside of them.

    store = SharedStore(folder / "store")
    run_replica(store.job(*one_by_one(prompts)), folder)
    run_replica(store.job(*one_by_one(prompts), load_mode="layerwise"), folder)

The functions at the end are for ``Call`` steps: they run in the replica and take its ``llm``.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from objkv.keys.prefix import PromptExtras, prefix_hashes
from tests.engine.endings import DRAIN_S
from tests.engine.job import Call, Generate, Job, Prompt, ResetPrefixCache, Settle, Step
from tests.support.waiting import wait_until

BLOCK = 32
CHUNK = 128
"""Tokens of a chunk in these stores: four blocks, so that a prompt can end inside."""
CONNECTOR = "ObjKVConnector"
PATIENT = {
    "admission": "always",
    "codec": "none",
    "lookup_deadline_ms": 120_000,
    "load_deadline_ms": 300_000,
    "step_load_deadline_ms": 300_000,
    "save_deadline_ms": 600_000,
    "pinned_bytes_max": 256 << 20,
    "drain_deadline_ms": 1_000 * DRAIN_S,
}
"""A busy machine must not change what is cached: nothing is late, and nothing is dropped."""


@dataclass(frozen=True)
class SharedStore:
    folder: Path

    @property
    def bulk(self) -> Path:
        return self.folder / "chunks"

    @property
    def index_file(self) -> Path:
        return self.folder / "index.sqlite"

    def job(
        self,
        *steps: Step,
        role: str = "kv_both",
        engine: dict[str, Any] | None = None,
        also: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Job:
        """A replica on this store. ``settings`` are objkv's, ``also`` those whose names are
        arguments here."""
        extra = {
            "bulk_url": f"file://{self.bulk}",
            "index_url": f"sqlite://{self.index_file}",
            "chunk_tokens": CHUNK,
        }
        extra |= PATIENT | settings | (also or {})
        connector = {
            "kv_connector": CONNECTOR,
            "kv_role": role,
            "kv_connector_extra_config": extra,
        }
        return Job(steps=steps, connector=connector, engine=engine or {})

    def copy(self, folder: Path) -> "SharedStore":
        shutil.copytree(self.folder, folder)
        return SharedStore(folder)

    def namespaces(self) -> list[str]:
        return sorted(path.name for path in self.bulk.iterdir())

    def payloads(self) -> list[Path]:
        return sorted(self.bulk.glob("*/*/*/*.safetensors"))

    def hashes(self, prompt: Prompt) -> list[bytes]:
        (namespace,) = self.namespaces()
        return prefix_hashes(namespace, prompt.tokens, CHUNK, PromptExtras(salt=prompt.cache_salt))


def one_by_one(prompts: Iterable[Prompt]) -> tuple[Step, ...]:
    """Run prompts one after the other; none finds anything in the replica's own cache."""
    steps: list[Step] = []
    for prompt in prompts:
        steps += (Generate(prompts=(prompt,)), SAVED, Settle(), ResetPrefixCache())
    return tuple(steps)


_SETTINGS = ("admission", "codec", "lookup_deadline_ms", "load_deadline_ms", "save_deadline_ms")


def offloading(
    store: SharedStore, *, chunk_tokens: int = BLOCK, canonical: bool = False, **settings: Any
) -> dict[str, Any]:
    tier = {name: PATIENT[name] for name in (*_SETTINGS, "drain_deadline_ms")} | {
        "type": "ObjKVTier",
        "module_path": "objkv.connector.tier",
        "bulk_url": f"file://{store.bulk}",
        "index_url": f"sqlite://{store.index_file}",
    }
    extra = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "tests.engine.host_offload",
        "cpu_bytes_to_use": 64 << 20,
        "block_size": chunk_tokens,
        "canonical_layout": canonical,
        "secondary_tiers": [tier | settings],
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def drain_saves(llm: Any) -> bool:
    """Wait until no worker saves anything any more. For engines whose core is in this process."""
    assert hasattr(llm.llm_engine.engine_core, "engine_core")
    return all(llm.collective_rpc(_drain))


def _drain(_worker: Any) -> bool:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    worker = getattr(connector, "worker", None)  # None: an engine that only encodes
    return worker is None or worker.saver.drain(300)


_drain.objkv_keeps_weights = True  # type: ignore[attr-defined]


def free_blocks(llm: Any) -> int:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def end_loads(_llm: Any) -> None:
    """Wait until no payload is being read any more, also of loads that nobody waits for."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        loads = get_kv_transfer_group().worker.loader
        wait_until(lambda: not loads.link.leased, "all loads to end")


def update_weights(llm: Any) -> int:
    """Give every layer other key and value weights, as a training job between two of its steps.
    Runs in the replica; returns how many workers did."""
    return len(
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": _other_weights(llm)})
    )


def _other_weights(llm: Any) -> list[tuple[str, Any]]:
    from safetensors.torch import load_file

    folder = Path(llm.llm_engine.vllm_config.model_config.model)
    weights = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    changed = ("k_proj.weight", "v_proj.weight")
    return [(k, v * 1.5 if k.endswith(changed) else v) for k, v in weights.items()]


SAVED = Call(function="tests.engine.fleet:drain_saves")
FREE_BLOCKS = Call(function="tests.engine.fleet:free_blocks")
NUMBERS_TOLD = Generate(prompts=(Prompt(tokens=(7,), max_tokens=1),))
"""Background threads' numbers reach vLLM's metrics with the next step: this is one, as the end."""
