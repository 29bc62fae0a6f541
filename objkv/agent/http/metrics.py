"""The agent's metrics for Prometheus. Only decisions for a namespace have a label."""

import math
from collections.abc import Mapping
from typing import Final

from objkv.cache.worth import Decision
from objkv.codec.compress import CODECS
from objkv.net.breaker import DIRECTIONS

PREFIX: Final = "objkv_agent_"
_BREAKERS = [
    (end, direction) for end in ("bulk", "hot", "index", "disk") for direction in DIRECTIONS
]
LEVELS: Final = {
    "arena_bytes": "Room for payloads in the arena.",
    "arena_free_bytes": "Room that no payload takes.",
    "leased_bytes": "Bytes of payloads that are leased, and so cannot be evicted.",
    "leased_payloads": "Payloads that a client, a fetch or a prefetch has leased.",
    "resident_payloads": "Payloads in the arena, including those that are being filled.",
    "unsaved_payloads": "Payloads that no store has yet.",
    "unsaved_bytes": "Bytes of those.",
    "prefetch_unread_bytes": "Bytes of prefetched payloads that nothing has read yet.",
    "disk_bytes": "Bytes of files on the agent's disk; 0 without one.",
    "disk_max_bytes": "Maximum size of those files.",
    "disk_payloads": "Payloads on the agent's disk.",
    "clients": "Connections of replicas. A replica has several.",
    **{
        f"breaker_open_{end}_{direction}": f"1 while the {end} {direction} circuit breaker is open."
        for end, direction in _BREAKERS
    },
}
TOTALS: Final = {
    "hits": "Requested payloads that were in the arena, or already on their way.",
    "fills": "Requested payloads that had to be fetched from a store.",
    "no_room": "Payloads not fetched because everything that could be evicted was leased.",
    "prefetches": "Payloads fetched ahead of a request.",
    "prefetch_used": "Prefetched payloads that were read.",
    "prefetch_unused": "Prefetched payloads that were evicted before anything read them.",
    "prefetch_unused_bytes": "Bytes of those.",
    "evictions": "Payloads evicted from the arena.",
    "evicted_bytes": "Bytes of evicted payloads.",
    "disk_hits": "Payloads that came from the disk.",
    "disk_read_bytes": "Bytes of those.",
    "disk_writes": "Payloads written to the disk.",
    "disk_written_bytes": "Bytes of those.",
    "disk_evictions": "Payloads removed from the disk for others.",
    "disk_drops": "Payloads not written: full queue, already evicted, or paused writes.",
    "disk_busy": "Payloads fetched from a store because reads of the disk are paused or hang.",
    "disk_corrupt": "Payloads on the disk that did not verify, and were removed.",
    "disk_errors": "Failed reads and writes of the disk.",
    "load_bytes": "Payload bytes fetched from stores and verified.",
    "hot_load_bytes": "Bytes of those that came from the hot store.",
    "bulk_load_bytes": "Bytes of those that came from the bulk store.",
    "load_errors": "Fetches that failed in a store, or at their deadline.",
    "load_corrupt": "Payloads refused because of their length, claim or checksum.",
    "load_ghosts": "Indexed payloads that were missing from the store.",
    "fetch_process_gets": "Payloads that were fetched by a process of the agent's.",
    "fetch_process_losses": "Processes of the agent's that were killed or ended early.",
    "held_back": "Payloads kept without a save until they are seen again.",
    "sighted_before": "Of those, payloads that a node of the fleet had made before.",
    "sighting_drops": "Payloads that were not counted in the index, because it failed or was slow.",
    "unsaved_due": "Unsaved payloads that were seen again.",
    "unsaved_dropped": "Unsaved payloads that were evicted, and are lost.",
    "unsaved_dropped_bytes": "Bytes of those.",
    "unsaved_misses": "Unsaved payloads that were evicted before a replica opened them.",
    "saves": "Payloads stored and indexed, which other nodes find.",
    "save_bytes": "Bytes of those.",
    "save_drops": "Payloads not saved because of a full queue, missing room or the deadline.",
    "save_errors": "Payloads not saved because a store failed.",
    "saves_shed": "Payloads not saved because the store was overloaded or its circuit was open.",
    "save_over_quota": "Payloads not saved because the quota was used up.",
    "joins": "Payloads joined of the parts that the ranks of a replica handed over.",
    "joins_dropped_full": "Parts not taken because too many payloads were incomplete.",
    **{
        f"joins_dropped_{reason}": f"Payloads that stayed incomplete: {text}."
        for reason, text in (
            ("rank", "a rank dropped its part"),
            ("late", "a part did not come before the deadline"),
            ("replaced", "the replica saved the chunk again"),
            ("refused", "a part was invalid"),
            ("gone", "the replica ended"),
        )
    },
    "publish_errors": "Payloads stored and not indexed, so they stay unsaved.",
    "save_existed": "Payloads not stored because they already were.",
    "save_repeats": "Payloads that the agent was saving, or had just saved.",
    "save_leased_elsewhere": "Payloads not saved because another agent was saving them.",
    "lease_errors": "Failed calls to take or release a lease. The payload was saved without one.",
    "forget_errors": "Records of missing or corrupt payloads that could not be removed.",
    "quota_errors": "Failed reads of a tenant's usage.",
    "sweeps": "Automatic sweeps of a local folder that was full.",
    "sweep_errors": "Automatic sweeps that failed.",
    **{f"save_codec_{codec}": f"Payloads saved whose frames are all {codec}." for codec in CODECS},
    "save_codec_mixed": "Payloads saved with both compressed and uncompressed frames.",
    "hot_hits": "Payloads read from the hot store.",
    "hot_misses": "Payloads indexed as hot that were read from the bulk store.",
    "hot_errors": "Failed hot store calls. The bulk store was read instead, or no copy was made.",
    **{
        f"{store}_{what}": f"{store.capitalize()} store {text}"
        for store in ("bulk", "hot")
        for what, text in (
            ("reads", "reads, including failed ones."),
            ("read_bytes", "bytes read, verified or not."),
            ("read_errors", "reads that failed."),
            ("writes", "writes, including failed ones."),
            ("written_bytes", "bytes written."),
            ("write_errors", "writes that failed."),
        )
    },
    "index_calls": "Calls to the index, including failed ones.",
    "index_errors": "Calls to the index that failed.",
    "index_records_found": "Chunks looked up that had a record.",
    "index_records_missing": "Chunks looked up that had no record.",
    **{
        f"breaker_{what}_{end}_{direction}": text.format(f"{end} {direction}")
        for end, direction in _BREAKERS
        for what, text in (
            ("openings", "Times that the {} circuit breaker opened."),
            ("refused", "Calls refused because the {} circuit breaker was open."),
        )
    },
}
"""Counters since the agent's start. They are exported from the start, with ``_total``."""
DECISIONS: Final = {
    "puts_all": "1: all payloads of the namespace are put; 0: those that recur.",
    "break_even": "How often a saved chunk must be read again to pay, if it is known.",
}
"""By ``namespace``, whose value is empty if the settings alone decide for all."""


def metrics_page(
    levels: Mapping[str, float],
    numbers: Mapping[str, float],
    decisions: Mapping[str, Decision] | None = None,
) -> str:
    """Return the page of these levels, a recorder's numbers, and the namespaces' decisions."""
    values = {name.removeprefix("agent_"): value for name, value in numbers.items()} | {**levels}
    puts_all, break_even = dict[str, float](), dict[str, float]()
    for name, one in (decisions or {}).items():
        puts_all[f'{{namespace="{name}"}}'] = float(one.puts == "all")
        if one.break_even is not None and math.isfinite(one.break_even):
            break_even[f'{{namespace="{name}"}}'] = one.break_even
    lines = []
    for name, text in LEVELS.items():
        lines += _metric(name, "gauge", {"": values.pop(name, 0.0)}, text)
    for name, found in (("puts_all", puts_all), ("break_even", break_even)):
        lines += _metric(name, "gauge", found, DECISIONS[name])
    for name in (*TOTALS, *sorted(values.keys() - TOTALS.keys())):
        if not name.endswith("_max"):
            found = {"": values.get(name, 0.0)}
            lines += _metric(f"{name}_total", "counter", found, TOTALS.get(name))
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, found: Mapping[str, float], text: str | None) -> list[str]:
    """Return the lines of a metric. ``found``: its values, by their labels."""
    name = PREFIX + name
    help_lines = [f"# HELP {name} {text}"] if text else []
    values = [f"{name}{labels} {value:.15g}" for labels, value in found.items()]
    return [*help_lines, f"# TYPE {name} {kind}", *values]
