"""A secondary tier's numbers in vLLM's statistics of offloading, as Prometheus metrics."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from objkv.connector.counters import BREAKER_COUNTERS, BREAKER_GAUGES

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

_TIER = "tier_"
_UNNAMED = ("breaker_", "quota_", "sweep")
"""What counts these does not know that it is part of a tier."""
"""Of names that a KV connector in the same engine may have, too."""
COUNTERS = {
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
    "tier_quota_errors": "Readings of how much of the quota is used that a store failed.",
    "tier_sweeps": "Sweeps of this machine's own folder, because it was full.",
    "tier_sweep_errors": "Such sweeps that failed.",
    "tier_save_refused": "Chunks not saved because the queue was full.",
    "tier_save_deadlines": "Save jobs that took too long.",
    "tier_lookup_deadlines": "Keys not answered in time.",
    "tier_lookup_errors": "Questions that the index failed to answer.",
    "tier_lookup_refused": "Keys not asked for because the queue was full.",
    **{_TIER + name: text for name, text in BREAKER_COUNTERS.items()},
}
GAUGES = {_TIER + name: text for name, text in BREAKER_GAUGES.items()}
_PREFIX = "vllm:objkv_"


def tier_metric_definitions() -> dict[str, "OffloadingMetricMetadata"]:
    """By full name, what ``tier_stats`` may tell."""
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

    counters = {_PREFIX + name: OffloadingCounterMetadata(text) for name, text in COUNTERS.items()}
    gauges = {_PREFIX + name: OffloadingGaugeMetadata(text) for name, text in GAUGES.items()}
    return {**counters, **gauges}


def tier_stats(numbers: Mapping[str, float]) -> "OffloadingConnectorStats | None":
    """Those of ``numbers`` that are defined above; None if there are none."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

    named = {_TIER + n if n.startswith(_UNNAMED) else n: v for n, v in numbers.items()}
    told = {name: value for name, value in named.items() if name in COUNTERS | GAUGES}
    if not told:
        return None
    stats = OffloadingConnectorStats()
    for name, value in told.items():
        if name in COUNTERS:
            stats.increase_counter(_PREFIX + name, value)
        else:
            stats.set_gauge(_PREFIX + name, value)
    return stats
