"""What the encoder cache tells: every name, and what it means to an operator.

Counters become ``vllm:objkv_encoder_<name>_total``, so that they can stand beside the KV
connector's.
"""

from objkv.connector.breaker_metrics import BREAKER_COUNTERS

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
