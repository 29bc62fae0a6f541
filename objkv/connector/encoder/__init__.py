"""The encoder-cache connector, which shares the outputs of vision and audio encoders."""

from typing import Any

__all__ = ["ObjKVECConnector"]


def __getattr__(name: str) -> Any:
    # vLLM finds the class here by its public path. Imported on first use: it needs vLLM.
    if name == "ObjKVECConnector":
        from objkv.connector.encoder.connector import ObjKVECConnector

        return ObjKVECConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
