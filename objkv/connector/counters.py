"""Every metric of the connectors, and what it means to an operator.

Kept apart from vLLM, so that pages and dashboards can be made of the names without an engine. After
the prefix of its connector, a counter is named ``<name>_total``, a gauge or histogram ``<name>``.
"""

from dataclasses import dataclass

from objkv.codec.payload import CODECS
from objkv.net.breaker import DIRECTIONS

_EACH = [(name, direction) for name in ("bulk", "hot", "index") for direction in DIRECTIONS]
BREAKER_GAUGES = {
    f"breaker_open_{name}_{direction}": f"1 while the {name} {direction} circuit breaker is open."
    for name, direction in _EACH
}
BREAKER_COUNTERS = {
    f"breaker_{what}_{name}_{direction}": text.format(f"{name} {direction}")
    for name, direction in _EACH
    for what, text in (
        ("openings", "How often the {} circuit breaker opened."),
        ("refused", "Calls not made because the {} circuit breaker was open."),
    )
}
_QUOTA = {
    "quota_errors": "Failed readings of the quota's usage.",
    "sweeps": "Sweeps of this machine's own folder, because it was full.",
    "sweep_errors": "Such sweeps that failed.",
}
COUNTERS = {
    "queries": "Requests that vLLM gave blocks; one that was preempted counts again.",
    "query_tokens": "Tokens of those requests: local, loaded and computed.",
    "local_hit_tokens": "Of those, tokens whose KV the replica had itself.",
    "hits": "Of those requests, the ones with something to load.",
    "hit_tokens": "Tokens planned to be loaded instead of computed.",
    "hit_hot_tokens": "Of those, tokens that the index promised in the hot store.",
    "hit_bulk_tokens": "The others of those: tokens in the bulk store.",
    "admission_refused": "Matches not loaded because recomputing them measured faster.",
    "admission_cut": "Matches of which a tail was not loaded, for the same reason.",
    "admission_refused_tokens": "Stored tokens that were computed for that reason.",
    "loads": "Load plans that ended, one per request and worker.",
    "load_bytes": "Payload bytes loaded and verified.",
    "hot_load_bytes": "Of those, bytes from the hot store.",
    "bulk_load_bytes": "Of those, bytes from the bulk store.",
    "load_failures": "Load plans of which something had to be recomputed.",
    "load_failed_blocks": "Blocks recomputed after a failed load.",
    "load_ghosts": "Payloads that were indexed but gone.",
    "load_corrupt": "Payloads refused: length, claim or checksum.",
    "load_errors": "Loads that failed for another reason: store, deadline, no slab.",
    "load_given_up": "Payloads not read to their end, because their request no longer waited.",
    "load_refused": "Chunks not loaded because the queue was full.",
    "lookup_errors": "Lookups that the index failed to answer.",
    "lookup_deadlines": "Lookups that took too long.",
    "lookup_refused": "Lookups not made because the queue was full.",
    "adapters_unknown": "Requests not shared because their adapter could not be identified.",
    "saves": "Payloads saved.",
    "save_bytes": "Payload bytes saved.",
    "save_drops": "Chunks not saved: no slab, queue full, too late.",
    "save_drop_bytes": "Bytes of those chunks, uncompressed.",
    "save_errors": "Chunks not saved because a store failed.",
    "saves_shed": "Chunks not saved because the store's circuit was open or it was overloaded.",
    "save_over_quota": "Chunks not saved because the quota is used up.",
    **_QUOTA,
    "save_repeats": "Chunks that this worker was saving, or had just saved, for another request.",
    "save_existed": "Chunks that were stored already.",
    "save_leased_elsewhere": "Chunks that another replica was saving.",
    "publish_errors": "Payloads saved but not indexed.",
    "hot_hits": "Payloads read from the hot store.",
    "hot_misses": "Payloads promised hot that were read from bulk.",
    "hot_errors": "Failed hot store calls: bulk was read instead, or no copy made.",
    "lease_errors": "Leases that the index failed to give or take back: saved without.",
    "forget_errors": "Records of missing or corrupt payloads that could not be removed.",
    "background_errors": "Failed background calls, such as marking a record as used.",
    "hot_promotions": "Payloads copied to the hot store because they were loaded often.",
    "hot_promoted_bytes": "Payload bytes copied so.",
    "hot_promote_drops": "Such copies not made because the queue was full.",
    "hot_promote_errors": "Such copies not made because of a store or a bad payload.",
    **{f"save_codec_{codec}": f"Payloads saved whose frames are all {codec}." for codec in CODECS},
    "save_codec_mixed": "Payloads saved with frames of a codec and frames that gained too little.",
    **{
        f"{store}_{what}": text.format(store.capitalize())
        for store in ("bulk", "hot")
        for what, text in (
            ("reads", "{} store reads, including failed ones."),
            ("read_bytes", "Bytes that they returned, verified or not."),
            ("read_errors", "Of those calls, the ones that failed."),
            ("writes", "{} store writes, including failed ones."),
            ("written_bytes", "Bytes that they wrote."),
            ("write_errors", "Of those calls, the ones that failed."),
        )
    },
    "index_calls": "Calls to the index, including failed ones.",
    "index_errors": "Of those calls, the ones that failed.",
    "index_records_found": "Records that lookups found.",
    "index_records_missing": "Chunks looked up that had no record.",
    **BREAKER_COUNTERS,
}
HISTOGRAMS = {
    "lookup_seconds": "Seconds until the index had answered for a request.",
    "load_seconds": "Seconds from a load plan to its end, one per request and worker.",
    "save_seconds": "Seconds of a save, from its bytes in memory to its record.",
}
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds; what takes longer than the last one has missed every deadline."""
ENCODER_COUNTERS = {
    "hits": "Outputs that vLLM took from objkv instead of encoding.",
    "loads": "Outputs loaded and verified.",
    "load_bytes": "Payload bytes of those.",
    "load_ghosts": "Outputs that were indexed but gone.",
    "load_corrupt": "Outputs refused: length, claim, dtype, shape or checksum.",
    "load_errors": "Outputs not loaded because a store failed.",
    "load_deadlines": "Outputs that took too long.",
    "load_refused": "Outputs not loaded: queue or memory full, stores stuck, another form.",
    "load_oversized": "Outputs too large to be loaded.",
    "load_seconds_sum": "Seconds of gets, summed.",
    "load_seconds_count": "Gets timed.",
    "lookup_errors": "Lookups that the index failed to answer.",
    "saves": "Outputs saved.",
    "save_bytes": "Payload bytes of those.",
    "save_drops": "Outputs not saved: queue or memory full, too late.",
    "save_errors": "Outputs not saved because a store failed.",
    "saves_shed": "Outputs not saved because a store's circuit was open or it was overloaded.",
    "save_over_quota": "Outputs not saved because the quota is used up.",
    **_QUOTA,
    "save_existed": "Outputs that were stored already.",
    "save_repeats": "Outputs that this worker was saving, or had just saved.",
    "save_leased_elsewhere": "Outputs that another replica was saving.",
    "save_unsupported": "Outputs not saved: too large, or of a form that cannot be verified later.",
    "save_seconds_sum": "Seconds of saves, summed.",
    "save_seconds_count": "Saves timed.",
    "publish_errors": "Outputs saved but not indexed.",
    "adapters_unknown": "Requests not shared because their adapter could not be identified.",
    "hot_hits": "Outputs read from the hot store.",
    "hot_misses": "Outputs promised hot that were read from bulk.",
    **BREAKER_COUNTERS,
}
TIER = "tier_"
"""Begins the names of a tier's metrics: a KV connector in the same engine may have the others."""
TIER_COUNTERS = {
    "tier_loads": "Chunks loaded, verified and given to vLLM.",
    "tier_load_bytes": "Payload bytes of them.",
    "tier_load_ghosts": "Chunks that were indexed but gone.",
    "tier_load_corrupt": "Payloads refused: length, claim or checksum.",
    "tier_load_errors": "Loads that a store failed.",
    "tier_load_refused": "Chunks not loaded because the queue was full.",
    "tier_load_deadlines": "Load jobs that took too long.",
    "tier_saves": "Chunks saved.",
    "tier_save_bytes": "Payload bytes of them.",
    "tier_save_existed": "Chunks that were stored already.",
    "tier_save_repeats": "Chunks that this tier was saving, or had just saved.",
    "tier_save_leased_elsewhere": "Chunks that another replica was saving.",
    "tier_save_errors": "Saves that a store failed.",
    "tier_save_over_quota": "Chunks not saved because the quota is used up.",
    **{TIER + name: text for name, text in _QUOTA.items()},
    "tier_save_refused": "Chunks not saved because the queue was full.",
    "tier_save_deadlines": "Save jobs that took too long.",
    "tier_lookup_deadlines": "Keys not answered in time.",
    "tier_lookup_errors": "Lookups that the index failed to answer.",
    "tier_lookup_refused": "Keys not looked up because the queue was full.",
    **{TIER + name: text for name, text in BREAKER_COUNTERS.items()},
}


@dataclass(frozen=True, slots=True)
class MetricTable:
    """The metrics of one connector, by name."""

    prefix: str
    counters: dict[str, str]
    gauges: dict[str, str]
    histograms: dict[str, str]


KV_METRICS = MetricTable("vllm:objkv_", COUNTERS, BREAKER_GAUGES, HISTOGRAMS)
ENCODER_METRICS = MetricTable("vllm:objkv_encoder_", ENCODER_COUNTERS, BREAKER_GAUGES, {})
TIER_METRICS = MetricTable(
    "vllm:objkv_",
    TIER_COUNTERS,
    {TIER + name: text for name, text in BREAKER_GAUGES.items()},
    {},
)
