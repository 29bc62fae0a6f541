"""The metrics of the connectors, with their help texts.

This module imports no vLLM, so pages and dashboards can be generated without an engine. A counter
is exported as the connector's prefix plus ``<name>_total``, a gauge or histogram without
``_total``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
        ("openings", "Times that the {} circuit breaker opened."),
        ("refused", "Calls refused because the {} circuit breaker was open."),
    )
}
_SWITCHED = {"admission_switched": "1 while an operator's switch decides about loads."}
_QUOTA = {
    "admission_switch_errors": "Failed reads of an operator's switch for loads.",
    "quota_errors": "Failed reads of a tenant's usage.",
    "sweeps": "Automatic sweeps of a local folder that was full.",
    "sweep_errors": "Automatic sweeps that failed.",
}
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
    "load_bytes": "Payload bytes loaded and verified.",
    "arena_load_bytes": "Payload bytes loaded from the node agent's memory.",
    "hot_load_bytes": "Payload bytes loaded from the hot store.",
    "bulk_load_bytes": "Payload bytes loaded from the bulk store.",
    "load_failures": "Load plans that failed in whole or in part while their request waited.",
    "load_failed_blocks": "Blocks recomputed after a failed load.",
    "load_ghosts": "Indexed payloads that were missing from the store.",
    "load_corrupt": "Payloads refused because of their length, claim or checksum.",
    "load_errors": "Loads that failed for another reason, such as a store, deadline or slab.",
    "load_given_up": "Payloads not read to their end because nothing waited for them any more.",
    "load_refused": "Chunks not loaded because the queue was full.",
    "lookup_errors": "Lookups that failed in the index.",
    "lookup_deadlines": "Lookups that exceeded their deadline.",
    "lookup_refused": "Lookups not made because the queue was full.",
    "limits_ignored": "Invalid transfer parameters of requests, such as max_load_tokens.",
    "hints_prefetched": "KV hints in requests that the node agent acted on with a prefetch.",
    "hints_unused": "KV hints in requests without effect: unknown, invalid, failed or too many.",
    "adapters_unknown": "Requests not shared because their adapter could not be identified.",
    "saves": "Payloads stored and indexed by the replica. With a node agent, by the agent.",
    "save_bytes": "Bytes of those.",
    "saves_accepted": "Payloads that the node agent took. The node's replicas find them at once.",
    "save_accepted_bytes": "Bytes of those.",
    "save_drops": "Chunks not saved because of a missing slab, a full queue or the deadline.",
    "save_drop_bytes": "Uncompressed bytes of the dropped chunks.",
    "save_errors": "Chunks not saved because a store failed.",
    "saves_shed": "Chunks not saved because the store was overloaded or its circuit was open.",
    "save_over_quota": "Chunks not saved because the quota was used up.",
    **_QUOTA,
    "save_repeats": "Chunks that this worker was saving, or had just saved, for another request.",
    "save_existed": "Chunks not saved because they were already stored.",
    "save_leased_elsewhere": "Chunks not saved because another replica was saving them.",
    "publish_errors": "Payloads saved but not indexed.",
    "hot_hits": "Payloads read from the hot store.",
    "hot_misses": "Payloads indexed as hot that were read from the bulk store.",
    "hot_errors": "Failed hot store calls. The bulk store was read instead, or no copy was made.",
    "lease_errors": "Failed calls to take or release a lease. The chunk was saved without one.",
    "forget_errors": "Records of missing or corrupt payloads that could not be removed.",
    "background_errors": "Failed background calls, such as marking a record as used.",
    **{f"save_codec_{codec}": f"Payloads saved whose frames are all {codec}." for codec in CODECS},
    "save_codec_mixed": "Payloads saved with both compressed and uncompressed frames.",
    **{
        f"{store}_{what}": text.format(store.capitalize())
        for store in ("bulk", "hot")
        for what, text in (
            ("reads", "{} store reads, including failed ones."),
            ("read_bytes", "{} store bytes read, verified or not."),
            ("read_errors", "{} store reads that failed."),
            ("writes", "{} store writes, including failed ones."),
            ("written_bytes", "{} store bytes written."),
            ("write_errors", "{} store writes that failed."),
        )
    },
    "index_calls": "Calls to the index, including failed ones.",
    "index_errors": "Calls to the index that failed.",
    "index_records_found": "Chunks looked up that had a record.",
    "index_records_missing": "Chunks looked up that had no record.",
    **BREAKER_COUNTERS,
}
HISTOGRAMS = {
    "lookup_seconds": "Seconds of one request's lookup in the index.",
    "load_seconds": "Seconds from the start of a load plan to its end, per request and worker.",
    "save_seconds": "Seconds of a save, from bytes in host memory to an index record.",
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
    "load_seconds_sum": "Seconds from when outputs had memory until they were verified.",
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
    "limits_ignored": "Invalid transfer parameters of requests, such as max_load_tokens.",
    "hints_unused": "Actions of KV hints in requests. objkv needs none of them.",
    "adapters_unknown": "Requests not shared because their adapter could not be identified.",
}
TIER = "tier_"
"""Prefix of a tier's metrics, because a KV connector in the same engine may use the plain names."""
TIER_COUNTERS = {
    "tier_loads": "Chunks loaded, verified and given to vLLM.",
    "tier_load_bytes": "Payload bytes of the loaded chunks.",
    "tier_load_ghosts": "Indexed chunks that were missing from the store.",
    "tier_load_corrupt": "Payloads refused because of their length, claim or checksum.",
    "tier_load_errors": "Chunks not loaded because the node agent or its store failed.",
    "tier_load_refused": "Chunks not loaded because the queue or the agent's memory was full.",
    "tier_load_deadlines": "Chunks not loaded because their job exceeded its deadline.",
    "tier_saves": "Chunks that the node agent took. It saves them.",
    "tier_save_bytes": "Payload bytes of those, uncompressed.",
    "tier_save_existed": "Chunks not saved because they were already stored.",
    "tier_save_repeats": "Chunks that this tier was saving, or had just saved.",
    "tier_save_errors": "Chunks not saved because the agent did not take them.",
    "tier_saves_shed": "Chunks not saved because the agent's store was overloaded.",
    "tier_save_over_quota": "Chunks not saved because the quota was used up.",
    "tier_admission_switch_errors": "Failed reads of an operator's switch for loads.",
    "tier_save_refused": "Chunks not saved because the queue was full.",
    "tier_save_deadlines": "Chunks not saved because their job exceeded its deadline.",
    "tier_lookup_deadlines": "Keys whose lookup exceeded its deadline.",
    "tier_lookup_errors": "Lookups that failed in the agent or its index.",
    "tier_lookup_refused": "Keys not looked up because the queue was full.",
}


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with labels, made of several counters or gauges."""

    text: str
    labels: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    """The values of the labels by the counter's or gauge's own name."""


_BREAKER = ("store", "direction")
GAUGE_FAMILIES = {
    "breaker_open": Family(
        "1 while the circuit breaker is open.",
        _BREAKER,
        {f"breaker_open_{name}_{direction}": (name, direction) for name, direction in _EACH},
    )
}
_BREAKER_FAMILIES = {
    f"breaker_{what}": Family(
        text,
        _BREAKER,
        {f"breaker_{what}_{name}_{direction}": (name, direction) for name, direction in _EACH},
    )
    for what, text in (
        ("openings", "Times that the circuit breaker opened."),
        ("refused", "Calls refused because the circuit breaker was open."),
    )
}


def _store_family(text: str, read: str, write: str) -> Family:
    calls = (("read", read), ("write", write))
    parts = {f"{store}_{name}": (store, call) for store in ("bulk", "hot") for call, name in calls}
    return Family(text, ("store", "call"), parts)


COUNTER_FAMILIES = {
    **_BREAKER_FAMILIES,
    "save_codec": Family(
        "Payloads saved, by codec of their frames; mixed: compressed and uncompressed frames.",
        ("codec",),
        {f"save_codec_{codec}": (codec,) for codec in (*CODECS, "mixed")},
    ),
    "store_calls": _store_family("Calls to the store, including failed ones.", "reads", "writes"),
    "store_bytes": _store_family("Bytes read or written.", "read_bytes", "written_bytes"),
    "store_errors": _store_family("Calls that failed.", "read_errors", "write_errors"),
}


@dataclass(frozen=True, slots=True)
class MetricTable:
    """The metrics of one connector, by name."""

    prefix: str
    counters: dict[str, str]
    gauges: dict[str, str]
    histograms: dict[str, str]
    counter_families: Mapping[str, Family] = field(default_factory=dict)
    """Replace their parts, which are still exported for one version."""
    gauge_families: Mapping[str, Family] = field(default_factory=dict)

    def help_of(self, name: str) -> str:
        """Return the help text of a counter or gauge; a part of a family names its successor."""
        text = (self.counters | self.gauges)[name]
        for family, one in {**self.counter_families, **self.gauge_families}.items():
            if name in one.parts:
                return f"Deprecated, see {family}. {text}"
        return text


_GAUGES = BREAKER_GAUGES | _SWITCHED
KV_METRICS = MetricTable(
    "vllm:objkv_", COUNTERS, _GAUGES, HISTOGRAMS, COUNTER_FAMILIES, GAUGE_FAMILIES
)
ENCODER_METRICS = MetricTable("vllm:objkv_encoder_", ENCODER_COUNTERS, _SWITCHED, {})
TIER_METRICS = MetricTable(
    "vllm:objkv_",
    TIER_COUNTERS,
    {TIER + name: text for name, text in _SWITCHED.items()},
    {},
)
