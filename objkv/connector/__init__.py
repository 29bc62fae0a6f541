"""The connectors for vLLM. vLLM finds ``{"kv_connector": "ObjKVConnector"}`` through the plugin,
and ``"kv_connector_module_path": "objkv.connector"`` here. Imports vLLM on first use only."""

from typing import Any

__all__ = ["ObjKVConnector", "ObjKVECConnector"]


def __getattr__(name: str) -> Any:
    if name == "ObjKVConnector":
        from objkv.connector.kv.connector import ObjKVConnector

        return ObjKVConnector
    if name == "ObjKVECConnector":
        from objkv.connector.encoder.connector import ObjKVECConnector

        return ObjKVECConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
