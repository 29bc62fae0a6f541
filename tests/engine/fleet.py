"""Replicas that share one store: their jobs, what lies in it, and what goes on inside of them.

    store = SharedStore(folder / "store")
    run_replica(store.job(*one_by_one(prompts)), folder)
    run_replica(store.job(*one_by_one(prompts), load_mode="layerwise"), folder)

The functions at the end are for ``Call`` steps: they run in the replica and take its ``llm``.
"""

import faulthandler
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from objkv.keys.prefix import PromptExtras, prefix_hashes
from tests.engine.endings import DRAIN_S
from tests.engine.job import Job, Prompt, Step, call, generate
from tests.support.waiting import wait_until

BLOCK = 32
CHUNK = 128
"""Tokens of a chunk in these stores: four blocks, so that a prompt can end inside."""
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
NOWHERE = {"bulk_url": "file:///nowhere/chunks", "index_url": "sqlite:///nowhere/index"}
"""Of replicas of an agent, which use neither."""


@dataclass(frozen=True)
class SharedStore:
    folder: Path

    @property
    def bulk(self) -> Path:
        return self.folder / "chunks"

    @property
    def index_file(self) -> Path:
        return self.folder / "index.sqlite"

    @property
    def places(self) -> dict[str, str]:
        """objkv's settings that lead to it."""
        return {"bulk_url": f"file://{self.bulk}", "index_url": f"sqlite://{self.index_file}"}

    def job(
        self,
        *steps: Step,
        kv_role: str = "kv_both",
        engine: dict[str, Any] | None = None,
        ranks: int = 1,
        stages: int = 1,
        **settings: Any,
    ) -> Job:
        """A replica on this store. ``settings`` are objkv's. ``ranks`` are tensor-parallel, and
        ``stages`` those of a pipeline."""
        extra = self.places | {"chunk_tokens": CHUNK} | PATIENT | settings
        connector = {"kv_connector": "ObjKVConnector", "kv_role": kv_role}
        connector |= {"kv_connector_extra_config": extra}
        engine, env = dict(engine or {}), dict[str, str]()
        if ranks * stages > 1:
            engine |= {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
            engine["distributed_executor_backend"] = "mp"
            env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function goes to the workers
        if stages > 1:
            steps = (call(make_buffers), *steps)
        return Job(steps=steps, connector=connector, engine=engine, env=env)

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
    return tuple(step for prompt in prompts for step in (generate(prompt), *FORGOTTEN))


_NOT_OF_TIERS = ("step_load_deadline_ms", "pinned_bytes_max")


def offloading(
    store: SharedStore, *, chunk_tokens: int = BLOCK, canonical: bool = False, **settings: Any
) -> dict[str, Any]:
    """``kv_transfer_config`` of vLLM's own offloading above objkv's tier on the store."""
    patient = {name: value for name, value in PATIENT.items() if name not in _NOT_OF_TIERS}
    tier = {"type": "ObjKVTier", "module_path": "objkv.connector.tier"} | store.places | patient
    extra = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "tests.engine.host_offload",
        "cpu_bytes_to_use": 64 << 20,
        "block_size": chunk_tokens,
        "canonical_layout": canonical,
        "secondary_tiers": [tier | settings],
    }
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return connector | {"kv_connector_extra_config": extra}


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


def make_buffers(llm: Any) -> list[bool]:
    """Before the first prompt of a pipeline; per rank, whether it needed some. For engines whose
    core is in this process.

    A stage after the first one receives into buffers that vLLM makes in a dummy run, which its CPU
    worker does not do without compiling. Source: vLLM 0.32, ``_dummy_run`` in
    ``v1/worker/gpu_model_runner.py``.
    """
    return list(llm.collective_rpc(_make_buffers))


def _make_buffers(worker: Any) -> bool:
    from vllm.distributed.parallel_state import get_pp_group

    # vLLM sends it to stages that do not end, before it kills them: they tell where they wait.
    faulthandler.register(signal.SIGTERM, chain=True)
    runner = worker.model_runner
    if get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return False
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )
    return True


_make_buffers.objkv_keeps_weights = True  # type: ignore[attr-defined]


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


def settle(llm: Any) -> None:
    """Let the engine step until no finished request is held back by a connector."""
    scheduler, end = llm.llm_engine.engine_core.engine_core.scheduler, time.monotonic() + 300
    while scheduler.has_requests():
        assert time.monotonic() < end, "a connector holds requests back"
        llm.llm_engine.step()
        time.sleep(0.002)


def reset(llm: Any, *, connector: bool = False) -> bool:
    """Forget the replica's own KV cache, so that only a connector can bring a prefix back; whether
    that was possible. ``connector``: whether the connector is asked to reset as well."""
    return bool(llm.reset_prefix_cache(reset_connector=connector))


def touch(_llm: Any, path: str) -> None:
    Path(path).touch()


SAVED, SETTLED, RESET, FREE_BLOCKS = map(call, (drain_saves, settle, reset, free_blocks))
FORGOTTEN = (SAVED, SETTLED, RESET)
NUMBERS_TOLD = generate(Prompt(tokens=(7,), max_tokens=1))
"""Background threads' numbers reach vLLM's metrics with the next step: this is one, as the end."""
