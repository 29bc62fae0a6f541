"""vLLM's tiered offloading with objkv as its secondary tier. vLLM finds the class here."""

from objkv.connector.tier.manager import ObjKVTier

__all__ = ["ObjKVTier"]
