"""What vLLM's plugin entry point calls, in every process of an engine, maybe more than once."""

CONNECTOR_NAME = "ObjKVConnector"
ENCODER_CONNECTOR_NAME = "ObjKVECConnector"


def register() -> None:
    """Make objkv's connectors known to vLLM by name; their classes are imported when used."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "objkv.connector.kv", CONNECTOR_NAME)
    name = ENCODER_CONNECTOR_NAME
    if name not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(name, "objkv.connector.encoder", name)
