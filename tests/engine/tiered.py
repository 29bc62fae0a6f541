"""Replicas with vLLM's tiered offloading and objkv's tier below it."""

from typing import Any

from tests.engine.fleet import BLOCK, PATIENT, SharedStore

_SETTINGS = ("admission", "codec", "lookup_deadline_ms", "load_deadline_ms", "save_deadline_ms")


def offloading(
    store: SharedStore, *, chunk_tokens: int = BLOCK, canonical: bool = False, **settings: Any
) -> dict[str, Any]:
    """vLLM's configuration of the connector. ``settings`` are the tier's."""
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
