"""The connector for vLLM's old V0 interface. Frozen: no other module imports it."""

from objkv.connector.handoff.connector import HandoffConnector

__all__ = ["HandoffConnector"]
