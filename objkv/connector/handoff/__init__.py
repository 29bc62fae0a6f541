"""The connector for vLLM's old V0 interface. Frozen: no other module imports it."""

from typing import Any

__all__ = ["HandoffConnector"]


def __getattr__(name: str) -> Any:
    # vLLM finds the class here by its public path. Imported on first use: it needs vLLM.
    if name == "HandoffConnector":
        from objkv.connector.handoff.connector import HandoffConnector

        return HandoffConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
