"""vLLM's plugin entry point. vLLM calls it in every process of an engine, possibly repeatedly."""

CONNECTOR_NAME = "ObjKVConnector"
ENCODER_CONNECTOR_NAME = "ObjKVECConnector"


def register() -> None:
    """Register objkv's connectors with vLLM by name. Their classes are imported when used."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    kv, encoder = (KVConnectorFactory, CONNECTOR_NAME), (ECConnectorFactory, ENCODER_CONNECTOR_NAME)
    for factory, name in (kv, encoder):
        if name not in factory._registry:
            factory.register_connector(name, "objkv.connector", name)
