"""A method that a new vLLM adds to its connectors is noticed: objkv has it, or leaves it."""

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from objkv.connector import ObjKVConnector, ObjKVECConnector

LEFT = """bind_connector_metadata bind_gpu_block_pool bind_kv_cache_manager clear_connector_metadata
finish_forward get_external_cache_hit_sources get_finished get_finished_count get_handshake_metadata
get_kv_connector_kv_cache_events get_loaded_kv_cache_group_ids get_mem_pool_context
get_required_kvcache_layout has_connector_metadata has_pending_push_work is_consumer is_producer
register_caches register_finished_partial_tail reset_capture_state role set_host_xfer_buffer_ops
set_xfer_handshake_metadata set_xfer_handshake_metadata_pp_aware start_save_caches
start_worker_services supports_divergent_local_hybrid_hits take_unavailable_requests
update_state_after_free"""


def test_every_public_method_of_vllms_connectors_is_known() -> None:
    for base, own in (KVConnectorBase_V1, ObjKVConnector), (ECConnectorBase, ObjKVECConnector):
        ours = {name for one in own.__mro__ if "objkv" in one.__module__ for name in vars(one)}
        assert {name for name in dir(base) if name[0] != "_"} - ours <= set(LEFT.split())
