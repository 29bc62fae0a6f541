"""What ``objkv exporter`` tells of the whole store: every name, and what it means.

A replica tells what it does itself; what is stored, and whether the ends answer, is told once for
the fleet, here.
"""

from dataclasses import dataclass
from typing import Literal

OF_NAMESPACE = ("namespace", "tenant", "model")
OTHER = "other"
"""Stands for the namespaces beyond the number that is told one by one."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One name of the page."""

    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...] = ()


METRICS = {
    "objkv_info": MetricSpec("gauge", "Always 1; what is watched.", ("version", "bulk", "index")),
    "objkv_up": MetricSpec("gauge", "1 if the end answered when it was last asked.", ("end",)),
    "objkv_answer_seconds": MetricSpec(
        "gauge", "How long it took to answer, or to fail.", ("end",)
    ),
    "objkv_asked_timestamp_seconds": MetricSpec("gauge", "When the end was last asked.", ("end",)),
    "objkv_usage_timestamp_seconds": MetricSpec(
        "gauge", "When what is stored was last read from the index."
    ),
    "objkv_usage_failures_total": MetricSpec("counter", "Readings of it that failed."),
    "objkv_namespaces": MetricSpec("gauge", "Namespaces in which something is stored."),
    "objkv_stored_bytes": MetricSpec("gauge", "Payload bytes that are indexed.", OF_NAMESPACE),
    "objkv_stored_payloads": MetricSpec("gauge", "Payloads that are indexed.", OF_NAMESPACE),
    "objkv_counted_timestamp_seconds": MetricSpec(
        "gauge",
        "When these were last counted, not added up: by rebuild or sweep; 0 if never.",
        OF_NAMESPACE,
    ),
    "objkv_tenant_stored_bytes": MetricSpec(
        "gauge", "Payload bytes that are indexed, over all namespaces of a tenant.", ("tenant",)
    ),
    "objkv_tenant_quota_bytes": MetricSpec(
        "gauge", "What the settings allow each tenant; absent without a quota.", ("tenant",)
    ),
    "objkv_ttl_seconds": MetricSpec("gauge", "How long the settings keep what nobody uses."),
    "objkv_index_memory_bytes": MetricSpec("gauge", "Memory in use by the index's server."),
    "objkv_index_memory_max_bytes": MetricSpec("gauge", "Its maxmemory; absent where it has none."),
    "objkv_index_clock_skew_seconds": MetricSpec("gauge", "Its clock minus this machine's."),
    "objkv_scan_timestamp_seconds": MetricSpec("gauge", "When the last whole scan of bulk ended."),
    "objkv_scan_seconds": MetricSpec("gauge", "How long it took."),
    "objkv_scan_failures_total": MetricSpec("counter", "Scans that did not come to their end."),
    "objkv_scan_payloads": MetricSpec("gauge", "Payloads in the bulk store.", OF_NAMESPACE),
    "objkv_scan_bytes": MetricSpec("gauge", "Their bytes.", OF_NAMESPACE),
    "objkv_scan_oldest_timestamp_seconds": MetricSpec(
        "gauge", "When the oldest of them was written.", OF_NAMESPACE
    ),
    "objkv_scan_orphans": MetricSpec("gauge", "Payloads without a record.", OF_NAMESPACE),
    "objkv_scan_orphan_bytes": MetricSpec("gauge", "Their bytes.", OF_NAMESPACE),
    "objkv_scan_pinned_payloads": MetricSpec("gauge", "Payloads of pinned chunks.", OF_NAMESPACE),
    "objkv_scan_quarantined_payloads": MetricSpec("gauge", "Payloads in quarantine."),
}
"""By full name. What begins with ``objkv_scan_`` is there with ``--scan-every`` only."""
