"""What the KV connector tells: every name, and what it means to an operator.

Kept apart from what vLLM does with them, so that pages and dashboards can be made of the names
without an engine. Counters become ``vllm:objkv_<name>_total``, levels and histograms
``vllm:objkv_<name>``.
"""

from objkv.codec.payload import CODECS
from objkv.net.breaker import DIRECTIONS

# What breakers tell, for whichever connector's statistics: per end and direction whether one is
# open, how often one opened, and how many calls were refused meanwhile.

_EACH = [(end, direction) for end in ("bulk", "hot", "index") for direction in DIRECTIONS]
BREAKER_GAUGES = {
    f"breaker_open_{end}_{direction}": f"1 while {direction}s of the {end} end are left alone."
    for end, direction in _EACH
}
BREAKER_COUNTERS = {
    f"breaker_{what}_{end}_{direction}": text.format(f"{direction}s of the {end} end")
    for end, direction in _EACH
    for what, text in (
        ("openings", "How often {} were given up."),
        ("refused", "Calls not made because {} were left alone."),
    )
}

# What the encoder cache tells: every name, and what it means to an operator.
#
# Counters become ``vllm:objkv_encoder_<name>_total``, so that they can stand beside the KV
# connector's.

ENCODER_COUNTERS = {
    "hits": "Outputs that vLLM was told to take instead of encoding.",
    "loads": "Outputs brought in and verified.",
    "load_bytes": "Payload bytes of those.",
    "load_ghosts": "Outputs that were indexed but gone.",
    "load_corrupt": "Outputs refused: length, claim, dtype, shape or checksum.",
    "load_errors": "Outputs not brought in because a store failed.",
    "load_deadlines": "Outputs that took too long.",
    "load_refused": "Outputs not brought in: queue or memory full, stores stuck, another form.",
    "load_oversized": "Outputs too large to be brought in.",
    "load_seconds_sum": "Seconds of gets, summed.",
    "load_seconds_count": "Gets timed.",
    "lookup_errors": "Lookups that the index failed to answer.",
    "saves": "Outputs saved.",
    "save_bytes": "Payload bytes of those.",
    "save_drops": "Outputs not saved: queue or memory full, too late.",
    "save_errors": "Outputs not saved because a store failed.",
    "saves_shed": "Outputs not saved because a store was left alone, or asked too much.",
    "save_over_quota": "Outputs not saved because the quota is used up.",
    "quota_errors": "Readings of how much of the quota is used that a store failed.",
    "sweeps": "Sweeps of this machine's own folder, because it was full.",
    "sweep_errors": "Such sweeps that failed.",
    "save_existed": "Outputs that were stored already.",
    "save_repeats": "Outputs that this worker was saving, or had just saved.",
    "save_leased_elsewhere": "Outputs that another replica was saving.",
    "save_unsupported": "Outputs not saved: too large, or of a form that cannot be verified later.",
    "save_seconds_sum": "Seconds of saves, summed.",
    "save_seconds_count": "Saves timed.",
    "publish_errors": "Outputs saved but not announced.",
    "adapters_unknown": "Requests not shared because their adapter cannot be told.",
    "hot_hits": "Outputs read from the hot store.",
    "hot_misses": "Outputs promised hot that were read from bulk.",
    **BREAKER_COUNTERS,
}
COUNTERS = {
    "queries": "Requests that vLLM gave blocks; one that was preempted counts again.",
    "query_tokens": "Tokens of those requests: of the local, the loaded and the computed ones.",
    "local_hit_tokens": "Of those, tokens whose KV the replica had itself.",
    "hits": "Of those requests, the ones that something was to be loaded for.",
    "hit_tokens": "Tokens that vLLM was told to load instead of computing.",
    "hit_hot_tokens": "Of those, tokens that the index promised in the hot store.",
    "hit_bulk_tokens": "The others of those: tokens in the bulk store.",
    "admission_refused": "Matches not loaded, because computing them was measured to be sooner.",
    "admission_cut": "Matches of which a tail was not loaded, for the same reason.",
    "admission_refused_tokens": "Tokens computed for that reason although they were stored.",
    "loads": "Load plans that ended, one per request and worker.",
    "load_bytes": "Payload bytes brought in and verified.",
    "hot_load_bytes": "Of those, bytes that came from the hot store.",
    "bulk_load_bytes": "Of those, bytes that came from the bulk store.",
    "load_failures": "Load plans of which something had to be recomputed.",
    "load_failed_blocks": "Blocks recomputed after a failed load.",
    "load_ghosts": "Payloads that were indexed but gone.",
    "load_corrupt": "Payloads refused: length, claim or checksum.",
    "load_errors": "Loads that failed for another reason: store, deadline, no slab.",
    "load_given_up": "Payloads not read to their end, because nobody waited for them any more.",
    "load_refused": "Chunks not loaded because the queue was full.",
    "lookup_errors": "Lookups that the index failed to answer.",
    "lookup_deadlines": "Lookups that took too long.",
    "lookup_refused": "Lookups not made because the queue was full.",
    "adapters_unknown": "Requests not shared because their adapter cannot be told.",
    "saves": "Payloads saved.",
    "save_bytes": "Payload bytes saved.",
    "save_drops": "Chunks not saved: no slab, queue full, too late.",
    "save_drop_bytes": "Bytes of those chunks, uncompressed.",
    "save_errors": "Chunks not saved because a store failed.",
    "saves_shed": "Chunks not saved because the store was left alone, or asked too much.",
    "save_over_quota": "Chunks not saved because the quota is used up.",
    "quota_errors": "Readings of how much of the quota is used that a store failed.",
    "sweeps": "Sweeps of this machine's own folder, because it was full.",
    "sweep_errors": "Such sweeps that failed.",
    "save_repeats": "Chunks that this worker was saving, or had just saved, for another request.",
    "save_existed": "Chunks that were stored already.",
    "save_leased_elsewhere": "Chunks that another replica was saving.",
    "publish_errors": "Payloads saved but not announced.",
    "hot_hits": "Payloads read from the hot store.",
    "hot_misses": "Payloads promised hot that were read from bulk.",
    "hot_errors": "Calls to the hot store that failed: bulk was asked instead, or no copy made.",
    "lease_errors": "Leases that the index failed to give or take back: saved without.",
    "forget_errors": "Records of payloads found missing or corrupt that could not be removed.",
    "background_errors": "Marks that a record was used, and the like, that failed.",
    "hot_promotions": "Payloads copied to the hot store because they were loaded often.",
    "hot_promoted_bytes": "Payload bytes copied so.",
    "hot_promote_drops": "Such copies not made because the queue was full.",
    "hot_promote_errors": "Such copies not made because of a store or a bad payload.",
    **{f"save_codec_{codec}": f"Payloads saved whose frames are all {codec}." for codec in CODECS},
    "save_codec_mixed": "Payloads saved with frames of a codec and frames that gained too little.",
    **{
        f"{end}_{what}": text.format(end)
        for end in ("bulk", "hot")
        for what, text in (
            ("reads", "Calls that read from the {} store, those that failed too."),
            ("read_bytes", "Bytes that they returned, verified or not."),
            ("read_errors", "Of those calls, the ones that failed."),
            ("writes", "Calls that wrote to the {} store, those that failed too."),
            ("written_bytes", "Bytes that they wrote."),
            ("write_errors", "Of those calls, the ones that failed."),
        )
    },
    "index_calls": "Calls to the index, those that failed too.",
    "index_errors": "Of those calls, the ones that failed.",
    "index_records_found": "Records that lookups found.",
    "index_records_missing": "Chunks that lookups asked for and that had no record.",
    **BREAKER_COUNTERS,
}
GAUGES = BREAKER_GAUGES
HISTOGRAMS = {
    "lookup_seconds": "Seconds until the index had answered for a request.",
    "load_seconds": "Seconds from a load plan to its end, one per request and worker.",
    "save_seconds": "Seconds of a save, from its bytes in memory to its record.",
}
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds; what takes longer than the last one has missed every deadline."""
