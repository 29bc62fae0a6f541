"""The connectors' metrics and help texts. Imports no vLLM: pages and dashboards need no engine. A
counter is exported as prefix plus ``<name>_total``, a gauge or histogram without ``_total``."""

from dataclasses import dataclass

_SWITCHED = {"admission_switched": "1 while an operator's switch decides about loads."}
COUNTERS = {
    "queries": "Requests that may load and got blocks. A preempted request counts again.",
    "query_tokens": "Tokens of those requests: local, loaded and computed.",
    "local_hit_tokens": "Tokens of those requests that were in the replica's own prefix cache.",
    "hits": "Requests with something to load.",
    "hit_tokens": "Tokens planned to be loaded instead of computed.",
    "hit_hot_tokens": "Planned tokens that the index reported in the hot store.",
    "hit_bulk_tokens": "Planned tokens that the index reported in the bulk store only.",
    "hit_draftless_tokens": "Planned tokens without the draft's KV, after which it proposes worse.",
    "admission_refused": "Matches not loaded because recomputing them measured faster.",
    "admission_cut": "Matches loaded without their tail because recomputing it measured faster.",
    "admission_refused_tokens": "Stored tokens computed because recomputing them measured faster.",
    "loads": "Load plans that ended, one per request and worker.",
    "load_bytes": "Bytes of payloads loaded and verified, uncompressed.",
    "load_failures": "Load plans that failed in whole or in part while their request waited.",
    "load_failed_blocks": "Blocks recomputed after a failed load.",
    "load_ghosts": "Indexed payloads that were missing from the store.",
    "load_corrupt": "Payloads refused because of their length, claim or checksum.",
    "load_errors": "Loads that failed for another reason, such as a store, deadline or slab.",
    "load_given_up": "Payloads not read to their end because nothing waited for them any more.",
    "load_refused": "Chunks not loaded because the queue or the agent's memory was full.",
    "lookup_errors": "Lookups that failed in the index.",
    "lookup_deadlines": "Lookups that exceeded their deadline.",
    "lookup_refused": "Lookups not made because the queue was full.",
    "admission_switch_errors": "Failed reads of an operator's switch for loads.",
    "limits_ignored": "Invalid transfer parameters of requests, such as max_load_tokens.",
    "adapters_unknown": "Requests not shared because their adapter could not be identified.",
    "saves_accepted": "Payloads that the node agent took. The node's replicas find them at once.",
    "save_accepted_bytes": "Bytes of those.",
    "save_drops": "Chunks not saved because of a missing slab, a full queue or the deadline.",
    "save_drop_bytes": "Uncompressed bytes of the dropped chunks.",
    "save_errors": "Chunks not saved because the node agent did not take them.",
    "saves_shed": "Chunks not saved because the store was overloaded or its circuit was open.",
    "save_over_quota": "Chunks not saved because the quota was used up.",
    "save_repeats": "Chunks that this worker was saving, or had just saved, for another request.",
    "save_existed": "Chunks not saved because they were already stored.",
    "background_errors": "Failed background calls, such as marking a record as used.",
}
HISTOGRAMS = {
    "lookup_seconds": "Seconds of one request's lookup in the index.",
    "load_seconds": "Seconds from the start of a load plan to its end, per request and worker.",
    "save_seconds": "Seconds from a chunk's bytes in host memory until the node agent has them.",
}
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histograms' buckets. The last one is the longest default load deadline."""
ENCODER_COUNTERS = {
    "hits": "Outputs that vLLM took from objkv instead of encoding.",
    "loads": "Outputs loaded and verified.",
    "load_bytes": "Payload bytes of the loaded outputs.",
    "load_ghosts": "Indexed outputs that were missing from the store.",
    "load_corrupt": "Outputs refused because of their length, claim, dtype, shape or checksum.",
    "load_errors": "Outputs not loaded because the agent or its store failed.",
    "load_deadlines": "Outputs not loaded because they exceeded their deadline.",
    "load_refused": "Outputs not loaded: queue or memory full, lookups stuck, or unexpected form.",
    "load_oversized": "Outputs too large to load.",
    "load_seconds_sum": "Seconds from when outputs were found until they were verified.",
    "load_seconds_count": "Outputs in load_seconds_sum.",
    "lookup_errors": "Lookups that failed in the index.",
    "saves_accepted": "Outputs that the node agent took.",
    "save_accepted_bytes": "Payload bytes of those.",
    "save_drops": "Outputs not saved because of a full queue, full memory or the deadline.",
    "save_errors": "Outputs not saved because the agent or its store failed.",
    "saves_shed": "Outputs not saved because the agent's store was overloaded.",
    "save_over_quota": "Outputs not saved because the quota was used up.",
    "save_existed": "Outputs that the agent was saving, or had just saved.",
    "save_repeats": "Outputs that this worker had just handed over.",
    "save_unsupported": "Outputs not saved: too large, or in a form that no reader could verify.",
    "background_errors": "Records not renewed, and documents not stored.",
    "admission_switch_errors": "Failed reads of an operator's switch for loads.",
}
TIER_COUNTERS = {
    "loads": "Chunks loaded, verified and given to vLLM.",
    "load_bytes": "Payload bytes of the loaded chunks.",
    "load_ghosts": "Indexed chunks that were missing from the store.",
    "load_corrupt": "Payloads refused because of their length, claim or checksum.",
    "load_errors": "Chunks not loaded because the node agent or its store failed.",
    "load_refused": "Chunks not loaded because the queue or the agent's memory was full.",
    "load_deadlines": "Chunks not loaded because their job exceeded its deadline.",
    "saves": "Chunks that the node agent took. It saves them.",
    "save_bytes": "Payload bytes of those, uncompressed.",
    "save_existed": "Chunks not saved because they were already stored.",
    "save_repeats": "Chunks that this tier was saving, or had just saved.",
    "save_errors": "Chunks not saved because the agent did not take them.",
    "saves_shed": "Chunks not saved because the agent's store was overloaded.",
    "save_over_quota": "Chunks not saved because the quota was used up.",
    "admission_switch_errors": "Failed reads of an operator's switch for loads.",
    "save_refused": "Chunks not saved because the queue was full.",
    "save_deadlines": "Chunks not saved because their job exceeded its deadline.",
    "lookup_deadlines": "Keys whose lookup exceeded its deadline.",
    "lookup_errors": "Lookups that failed in the agent or its index.",
    "lookup_refused": "Keys not looked up because the queue was full.",
}


@dataclass(frozen=True, slots=True)
class MetricTable:
    """The metrics of one connector, by name."""

    prefix: str
    counters: dict[str, str]
    gauges: dict[str, str]
    histograms: dict[str, str]


KV_METRICS = MetricTable("vllm:objkv_", COUNTERS, _SWITCHED, HISTOGRAMS)
ENCODER_METRICS = MetricTable("vllm:objkv_encoder_", ENCODER_COUNTERS, _SWITCHED, {})
# A KV connector in the same engine may use the plain names.
TIER_METRICS = MetricTable("vllm:objkv_tier_", TIER_COUNTERS, _SWITCHED, {})
