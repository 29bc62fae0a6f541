"""vLLM's connector to objkv. ``{"kv_connector": "ObjKVConnector"}`` finds it through the plugin;
``"kv_connector_module_path": "objkv.connector"`` finds it here. Imports vLLM on first use only."""

from typing import Any

__all__ = ["ObjKVConnector"]


def __getattr__(name: str) -> Any:
    if name == "ObjKVConnector":
        from objkv.connector.kv import ObjKVConnector

        return ObjKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
