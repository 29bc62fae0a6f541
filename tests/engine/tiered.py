"""Replicas with vLLM's tiered offloading and objkv's tier below it; calls into their tier.

The functions are for ``Call`` steps, in a replica whose engine core is in its own process.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.fleet import BLOCK, PATIENT, SharedStore
from tests.engine.job import Job, Step

_SETTINGS = ("admission", "codec", "lookup_deadline_ms", "load_deadline_ms", "save_deadline_ms")
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""A replica that is bound to its cores waits seconds for a copy while other work runs there."""


def offloading(
    store: SharedStore, *, chunk_tokens: int = BLOCK, canonical: bool = False, **settings: Any
) -> dict[str, Any]:
    """vLLM's configuration of the connector. ``settings`` are the tier's."""
    tier = {name: PATIENT[name] for name in (*_SETTINGS, "lease_ms", "drain_deadline_ms")} | {
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


def tiered(store: SharedStore, *steps: Step, **options: Any) -> Job:
    """A replica on this store; ``options`` as for ``offloading``."""
    return Job(steps=steps, connector=offloading(store, **options), env=ENVIRONMENT)


def spoil(store: SharedStore) -> int:
    """Flip a bit in most bytes of every payload's row; returns how many payloads there are."""
    for payload in store.payloads():
        spoilt = np.fromfile(payload, np.uint8)
        spoilt[10_000:] ^= 64
        spoilt.tofile(payload)
    return len(store.payloads())


def lose(_llm: Any, folder: str) -> None:
    """Remove a folder with all payloads in it."""
    shutil.rmtree(folder)


def hold_finds(llm: Any, gate: str, deadline_s: float) -> None:
    """Let the index answer when the file ``gate`` exists. The tier waits for ``deadline_s``."""
    store = _tier(llm)._store
    store.lookups._limits = replace(store.lookups._limits, deadline_s=deadline_s)
    store._index.find = _held(store._index.find, gate)


def shorten_loads(llm: Any, deadline_s: float) -> None:
    """From now on, loads that take longer have failed."""
    jobs = _tier(llm)._store.loads
    jobs._limits = replace(jobs._limits, deadline_s=deadline_s)


def poison(llm: Any) -> int:
    """Change every row of vLLM's CPU memory, which has no checksums; returns how many."""
    (view,) = [_manager(llm).primary_tier.get_kv_memoryview()]
    rows = np.asarray(view)
    rows ^= 64
    return len(rows)


def _held(find: Callable[..., Any], gate: str) -> Callable[..., Any]:
    def wait_and_find(*args: Any) -> Any:
        while not Path(gate).exists():
            time.sleep(0.005)
        return find(*args)

    return wait_and_find


def _manager(llm: Any) -> Any:
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    return connector.connector_scheduler.manager


def _tier(llm: Any) -> Any:
    (tier,) = _manager(llm).secondary_tiers
    return tier
