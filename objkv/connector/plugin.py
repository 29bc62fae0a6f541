"""vLLM's plugin entry point. vLLM calls it in every process of an engine, possibly repeatedly."""

CONNECTOR_NAME = "ObjKVConnector"
ENCODER_CONNECTOR_NAME = "ObjKVECConnector"


def register() -> None:
    """Register objkv's connectors with vLLM by name. Their classes are imported when used."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "objkv.connector", CONNECTOR_NAME)
    name = ENCODER_CONNECTOR_NAME
    if name not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(name, "objkv.connector", name)
