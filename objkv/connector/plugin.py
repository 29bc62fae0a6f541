"""What vLLM's plugin entry point calls, in every process of an engine, maybe more than once."""

CONNECTOR_NAME = "ObjKVConnector"


def register() -> None:
    """Make ``ObjKVConnector`` known to vLLM by name; the class itself is imported when used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "objkv.connector.kv", CONNECTOR_NAME)
