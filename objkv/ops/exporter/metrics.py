"""Values of ``BackendsWatch`` and ``Scans`` as Prometheus metrics. A scrape calls no backend."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from objkv.config import Config
from objkv.ops.exporter.watch import BackendsWatch, Origin, Scans
from objkv.ops.inventory.findings import FAULTS

OF_NAMESPACE = ("namespace", "tenant", "model")
OTHER = "other"
"""The label of the sum over all namespaces that are not exposed individually."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric name. Those that end in ``_total`` are counters, the others gauges."""

    text: str
    labels: tuple[str, ...] = ()


METRICS = {
    "objkv_info": MetricSpec(
        "Always 1; the labels hold the version and the URLs watched.", ("version", "bulk", "index")
    ),
    "objkv_up": MetricSpec("1 if the backend answered its last check.", ("end",)),
    "objkv_answer_seconds": MetricSpec(
        "Duration of the last check, successful or failed.", ("end",)
    ),
    "objkv_asked_timestamp_seconds": MetricSpec("Time at which the last check began.", ("end",)),
    "objkv_usage_timestamp_seconds": MetricSpec(
        "Time at which totals were last read from the index."
    ),
    "objkv_usage_failures_total": MetricSpec("Failed reads of totals from the index."),
    "objkv_namespaces": MetricSpec("Namespaces with stored payloads."),
    "objkv_stored_bytes": MetricSpec("Bytes of indexed payloads.", OF_NAMESPACE),
    "objkv_stored_payloads": MetricSpec("Number of indexed payloads.", OF_NAMESPACE),
    "objkv_counted_timestamp_seconds": MetricSpec(
        "Time at which rebuild or sweep last counted the totals exactly; 0 if never.", OF_NAMESPACE
    ),
    "objkv_tenant_stored_bytes": MetricSpec(
        "Bytes of indexed payloads in all namespaces of a tenant.", ("tenant",)
    ),
    "objkv_tenant_quota_bytes": MetricSpec(
        "Quota of each tenant (quota_bytes); absent without a quota.", ("tenant",)
    ),
    "objkv_ttl_seconds": MetricSpec("Lifetime of unused records (ttl_s)."),
    "objkv_index_memory_bytes": MetricSpec("Memory used by the index server."),
    "objkv_index_memory_max_bytes": MetricSpec(
        "The index server's maxmemory; absent without a limit."
    ),
    "objkv_index_clock_skew_seconds": MetricSpec("The index server's clock minus this machine's."),
    "objkv_scan_timestamp_seconds": MetricSpec(
        "Time at which the last complete scan of the bulk store ended."
    ),
    "objkv_scan_seconds": MetricSpec("Duration of the last complete scan."),
    "objkv_scan_failures_total": MetricSpec("Scans that failed before completing."),
    "objkv_scan_payloads": MetricSpec("Number of payloads in the bulk store.", OF_NAMESPACE),
    "objkv_scan_bytes": MetricSpec("Bytes of payloads in the bulk store.", OF_NAMESPACE),
    "objkv_scan_oldest_timestamp_seconds": MetricSpec(
        "Time at which the oldest payload was written.", OF_NAMESPACE
    ),
    "objkv_scan_findings": MetricSpec(
        "Number of findings by their word in objkv audit; orphans only after the grace time.",
        ("finding", *OF_NAMESPACE),
    ),
    "objkv_scan_finding_bytes": MetricSpec("Bytes of these findings.", ("finding", *OF_NAMESPACE)),
}
"""By full name. Metrics named ``objkv_scan_…`` exist only with ``--scan-every``."""
NAMESPACES_MAX = 200
"""Namespaces exposed individually, largest first; the others are summed."""
_LABEL_CHARS_MAX = 200
Rows = dict[str, dict[str, float]]
"""Values by namespace and metric."""


class StoreCollector(Collector):
    """Exposes the metrics of ``METRICS`` that have values now."""

    def __init__(self, config: Config, watch: BackendsWatch, scans: Scans | None = None) -> None:
        self._config = config
        self._watch = watch
        self._scans = scans

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: metrics without values are not exposed."""
        return ()

    def collect(self) -> Iterator[Metric]:
        page, public = _Page(), self._config.public()
        page.add("objkv_info", 1, version("objkv"), public["bulk_url"], public["index_url"])
        page.add("objkv_ttl_seconds", self._config.ttl_s)
        self._ends(page)
        self._usage(page)
        if self._scans is not None:
            self._scanned(page, self._scans)
        return page.families()

    def _ends(self, page: "_Page") -> None:
        for end, answer in self._watch.answers().items():
            page.add("objkv_up", answer.is_up, end)
            page.add("objkv_answer_seconds", answer.seconds, end)
            page.add("objkv_asked_timestamp_seconds", answer.asked_s, end)
        facts = self._watch.facts
        if facts is not None:
            page.add("objkv_index_memory_bytes", facts.used_bytes)
            page.add("objkv_index_memory_max_bytes", facts.maxmemory_bytes or None)
            page.add("objkv_index_clock_skew_seconds", facts.clock_skew_s)

    def _usage(self, page: "_Page") -> None:
        page.add("objkv_usage_failures_total", self._watch.usage_failures)
        stored = self._watch.stored
        if stored is None:
            return
        page.add("objkv_usage_timestamp_seconds", stored.read_s)
        rows: Rows = {
            one.namespace: {
                "objkv_stored_bytes": one.nbytes,
                "objkv_stored_payloads": one.payloads,
                "objkv_counted_timestamp_seconds": one.counted_s,
            }
            for one in stored.usage
        }
        page.add("objkv_namespaces", len(rows))
        self._add_rows(page, rows, self._watch.origins, by="objkv_stored_bytes")
        tenants: defaultdict[str, float] = defaultdict(float)
        for name, values in rows.items():
            tenants[self._watch.origins.get(name, Origin()).tenant] += values["objkv_stored_bytes"]
        most = sorted(tenants, key=lambda tenant: -tenants[tenant])
        for tenant in most[:NAMESPACES_MAX]:
            page.add("objkv_tenant_stored_bytes", tenants[tenant], tenant)
            if self._config.quota_bytes:
                page.add("objkv_tenant_quota_bytes", self._config.quota_bytes, tenant)

    def _scanned(self, page: "_Page", scans: Scans) -> None:
        page.add("objkv_scan_failures_total", scans.failures)
        if (scan := scans.last) is None:
            return
        page.add("objkv_scan_timestamp_seconds", scan.ended_s)
        page.add("objkv_scan_seconds", scan.seconds)
        origins = {
            one.namespace: Origin(one.tenant or "", one.model or "") for one in scan.namespaces
        }
        rows: Rows = {
            one.namespace: {
                "objkv_scan_payloads": one.payloads,
                "objkv_scan_bytes": one.nbytes,
                "objkv_scan_oldest_timestamp_seconds": one.oldest_s,
            }
            for one in scan.namespaces
            if one.oldest_s is not None
        }
        self._add_rows(page, rows, origins, by="objkv_scan_bytes")
        none = {"objkv_scan_findings": 0.0, "objkv_scan_finding_bytes": 0.0}
        kinds: dict[str, Rows] = {kind: dict.fromkeys(rows, none) for kind in (*FAULTS, "expired")}
        for (kind, name), found in scan.findings.items():
            kinds.setdefault(kind, {})[name] = {
                "objkv_scan_findings": found.count - found.young,
                "objkv_scan_finding_bytes": found.nbytes - found.young_bytes,
            }
        for kind, of in kinds.items():
            self._add_rows(page, of, origins, by="objkv_scan_finding_bytes", first=(kind,))

    def _add_rows(
        self,
        page: "_Page",
        rows: Rows,
        origins: Mapping[str, Origin],
        *,
        by: str,
        first: tuple[str, ...] = (),
    ) -> None:
        """Add the largest namespaces, and the others as one. ``first``: labels before these."""
        largest = sorted(rows, key=lambda name: (-rows[name][by], name))
        shown = largest[:NAMESPACES_MAX]
        for name in shown:
            origin = origins.get(name, Origin())
            for metric, value in rows[name].items():
                page.add(metric, value, *first, name, origin.tenant, origin.model)
        if rest := largest[NAMESPACES_MAX:]:
            for metric in rows[rest[0]]:
                # The earliest time, otherwise the sum.
                together = min if metric.endswith("_timestamp_seconds") else sum
                value = together(rows[name][metric] for name in rest)
                page.add(metric, value, *first, OTHER, "", "")


class _Page:
    """Families in the order of the page; one value per set of labels, the first one added."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[tuple[str, ...], float]] = {}

    def add(self, name: str, value: float | bool | None, *labels: str) -> None:
        """Add one value; None is ignored."""
        if value is None:
            return
        clean = tuple(_label(label) for label in labels)
        self._samples.setdefault(name, {}).setdefault(clean, float(value))

    def families(self) -> Iterator[Metric]:
        for name, metric in METRICS.items():
            if name not in self._samples:
                continue
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, metric.text, labels=list(metric.labels))
            for values, value in self._samples[name].items():
                family.add_metric(list(values), value)
            yield family


def _label(text: str) -> str:
    """Return foreign text as a label: without control characters, and of limited length."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:_LABEL_CHARS_MAX])
    return shown.encode("utf-8", "replace").decode()
