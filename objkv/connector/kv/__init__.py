"""The KV connector for vLLM's V1 interface. It decides what a replica loads and saves, and when."""

from typing import Any

__all__ = ["ObjKVConnector"]


def __getattr__(name: str) -> Any:
    # vLLM finds the class here by its public path. Imported on first use: it needs vLLM.
    if name == "ObjKVConnector":
        from objkv.connector.kv.connector import ObjKVConnector

        return ObjKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
