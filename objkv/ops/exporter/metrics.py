"""Values of ``BackendsWatch`` and ``Scans`` as Prometheus metrics. A scrape calls no backend."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from objkv.ops.exporter.scan import Scan, Scans
from objkv.ops.exporter.watch import BackendsWatch, Origin
from objkv.ops.inventory.findings import FAULTS

OF_NAMESPACE = ("namespace", "tenant", "model")
OTHER = "other"
"""The label of the sum over all namespaces that are not exposed individually."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric name."""

    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...] = ()


METRICS = {
    "objkv_info": MetricSpec(
        "gauge",
        "Always 1; the labels hold the version and the URLs watched.",
        ("version", "bulk", "index"),
    ),
    "objkv_up": MetricSpec("gauge", "1 if the backend answered its last check.", ("end",)),
    "objkv_answer_seconds": MetricSpec(
        "gauge", "Duration of the last check, successful or failed.", ("end",)
    ),
    "objkv_asked_timestamp_seconds": MetricSpec(
        "gauge", "Time at which the last check began.", ("end",)
    ),
    "objkv_usage_timestamp_seconds": MetricSpec(
        "gauge", "Time at which totals were last read from the index."
    ),
    "objkv_usage_failures_total": MetricSpec("counter", "Failed reads of totals from the index."),
    "objkv_namespaces": MetricSpec("gauge", "Namespaces with stored payloads."),
    "objkv_stored_bytes": MetricSpec("gauge", "Bytes of indexed payloads.", OF_NAMESPACE),
    "objkv_stored_payloads": MetricSpec("gauge", "Number of indexed payloads.", OF_NAMESPACE),
    "objkv_counted_timestamp_seconds": MetricSpec(
        "gauge",
        "Time at which rebuild or sweep last counted the totals exactly; 0 if never.",
        OF_NAMESPACE,
    ),
    "objkv_tenant_stored_bytes": MetricSpec(
        "gauge", "Bytes of indexed payloads in all namespaces of a tenant.", ("tenant",)
    ),
    "objkv_tenant_quota_bytes": MetricSpec(
        "gauge", "Quota of each tenant (quota_bytes); absent without a quota.", ("tenant",)
    ),
    "objkv_ttl_seconds": MetricSpec("gauge", "Lifetime of unused records (ttl_s)."),
    "objkv_index_memory_bytes": MetricSpec("gauge", "Memory used by the index server."),
    "objkv_index_memory_max_bytes": MetricSpec(
        "gauge", "The index server's maxmemory; absent without a limit."
    ),
    "objkv_index_clock_skew_seconds": MetricSpec(
        "gauge", "The index server's clock minus this machine's."
    ),
    "objkv_scan_timestamp_seconds": MetricSpec(
        "gauge", "Time at which the last complete scan of the bulk store ended."
    ),
    "objkv_scan_seconds": MetricSpec("gauge", "Duration of the last complete scan."),
    "objkv_scan_failures_total": MetricSpec("counter", "Scans that failed before completing."),
    "objkv_scan_payloads": MetricSpec(
        "gauge", "Number of payloads in the bulk store.", OF_NAMESPACE
    ),
    "objkv_scan_bytes": MetricSpec("gauge", "Bytes of payloads in the bulk store.", OF_NAMESPACE),
    "objkv_scan_oldest_timestamp_seconds": MetricSpec(
        "gauge", "Time at which the oldest payload was written.", OF_NAMESPACE
    ),
    "objkv_scan_findings": MetricSpec(
        "gauge",
        "Number of findings by their word in objkv audit; orphans only after the grace time.",
        ("finding", *OF_NAMESPACE),
    ),
    "objkv_scan_finding_bytes": MetricSpec(
        "gauge", "Bytes of these findings.", ("finding", *OF_NAMESPACE)
    ),
    "objkv_scan_pinned_payloads": MetricSpec(
        "gauge", "Number of payloads of pinned chunks.", OF_NAMESPACE
    ),
}
"""By full name. Metrics named ``objkv_scan_…`` exist only with ``--scan-every``."""
_LABEL_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class Watched:
    """The settings that appear in the metrics."""

    version: str
    bulk_url: str
    """Without passwords."""
    index_url: str
    ttl_s: int
    quota_bytes: int
    """Quota of each tenant; 0 means none."""
    namespaces_max: int
    """Namespaces exposed individually, largest first; the others are summed."""


@dataclass(slots=True)
class _Row:
    """The values of one namespace, or of the summed ones."""

    origin: Origin
    values: dict[str, float]


class StoreCollector(Collector):
    """Exposes the metrics of ``METRICS`` that have values now."""

    def __init__(self, watched: Watched, watch: BackendsWatch, scans: Scans | None = None) -> None:
        self._watched = watched
        self._watch = watch
        self._scans = scans

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: metrics without values are not exposed."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have values."""
        page = _Page()
        self._settings(page)
        self._ends(page)
        self._usage(page)
        if self._scans is not None:
            self._scanned(page, self._scans)
        return page.families()

    def _settings(self, page: "_Page") -> None:
        watched = self._watched
        page.add("objkv_info", 1, watched.version, watched.bulk_url, watched.index_url)
        page.add("objkv_ttl_seconds", watched.ttl_s)

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
        rows = {
            one.namespace: {
                "objkv_stored_bytes": float(one.nbytes),
                "objkv_stored_payloads": float(one.payloads),
                "objkv_counted_timestamp_seconds": float(one.counted_s),
            }
            for one in stored.usage
        }
        page.add("objkv_namespaces", len(rows))
        self._add_rows(page, rows, self._watch.origins, by="objkv_stored_bytes")
        tenants: defaultdict[str, float] = defaultdict(float)
        for name, values in rows.items():
            tenants[self._watch.origins.get(name, Origin()).tenant] += values["objkv_stored_bytes"]
        most = sorted(tenants, key=lambda tenant: -tenants[tenant])
        for tenant in most[: self._watched.namespaces_max]:
            page.add("objkv_tenant_stored_bytes", tenants[tenant], tenant)
            if self._watched.quota_bytes:
                page.add("objkv_tenant_quota_bytes", self._watched.quota_bytes, tenant)

    def _scanned(self, page: "_Page", scans: Scans) -> None:
        page.add("objkv_scan_failures_total", scans.failures)
        scan: Scan | None = scans.last
        if scan is None:
            return
        page.add("objkv_scan_timestamp_seconds", scan.ended_s)
        page.add("objkv_scan_seconds", scan.seconds)
        rows = {
            name: {
                "objkv_scan_payloads": float(counted.payloads),
                "objkv_scan_bytes": float(counted.nbytes),
                "objkv_scan_oldest_timestamp_seconds": counted.oldest_s,
                "objkv_scan_pinned_payloads": float(counted.pinned),
            }
            for name, counted in scan.namespaces.items()
        }
        self._add_rows(page, rows, scan.origins, by="objkv_scan_bytes")
        none = {"objkv_scan_findings": 0.0, "objkv_scan_finding_bytes": 0.0}
        kinds: dict[str, dict[str, dict[str, float]]] = {
            kind: dict.fromkeys(rows, none) for kind in (*FAULTS, "expired")
        }
        for (kind, name), found in scan.findings.items():
            kinds.setdefault(kind, {})[name] = {
                "objkv_scan_findings": float(found.count - found.young),
                "objkv_scan_finding_bytes": float(found.nbytes - found.young_bytes),
            }
        for kind, of in kinds.items():
            self._add_rows(page, of, scan.origins, by="objkv_scan_finding_bytes", first=(kind,))

    def _add_rows(
        self,
        page: "_Page",
        rows: Mapping[str, dict[str, float]],
        origins: Mapping[str, Origin],
        *,
        by: str,
        first: tuple[str, ...] = (),
    ) -> None:
        """Add the largest namespaces individually, and the others as one. ``first``: labels before
        the namespace's."""
        largest = sorted(rows, key=lambda name: (-rows[name][by], name))
        shown = largest[: self._watched.namespaces_max]
        for name in shown:
            origin = origins.get(name, Origin())
            for metric, value in rows[name].items():
                page.add(metric, value, *first, name, origin.tenant, origin.model)
        if rest := largest[self._watched.namespaces_max :]:
            for metric in rows[rest[0]]:
                value = _together(metric)(rows[name][metric] for name in rest)
                page.add(metric, value, *first, OTHER, "", "")


def _together(metric: str) -> Callable[[Iterable[float]], float]:
    """How to combine the values of several namespaces: the earliest time, otherwise the sum."""
    return min if metric.endswith("_timestamp_seconds") else sum


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
        """Yield the families with the values added."""
        for name, metric in METRICS.items():
            samples = self._samples.get(name)
            if samples is None:
                continue
            yield _family(name, metric.kind, metric.text, metric.labels, samples)


def _family(
    name: str,
    kind: str,
    text: str,
    labels: Sequence[str],
    samples: Mapping[tuple[str, ...], float],
) -> Metric:
    cls = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    family = cls(name, text, labels=list(labels))
    for values, value in samples.items():
        family.add_metric(list(values), value)
    return family


def _label(text: str) -> str:
    """Return foreign text as a label: without control characters, and of limited length."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:_LABEL_CHARS_MAX])
    return shown.encode("utf-8", "replace").decode()
