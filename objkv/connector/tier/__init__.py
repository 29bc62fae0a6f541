"""vLLM's tiered offloading with objkv as its secondary tier."""

from typing import Any

__all__ = ["ObjKVTier"]


def __getattr__(name: str) -> Any:
    # vLLM finds the class here by its public path. Imported on first use: it needs vLLM.
    if name == "ObjKVTier":
        from objkv.connector.tier.manager import ObjKVTier

        return ObjKVTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
