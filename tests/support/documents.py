"""The types of the documents that ``--json`` prints, to which tests hold every command.

A document has the keys of one type, or of several taken together: a result that a command prints as
it is, and the keys that the command adds. No command imports this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict, get_type_hints

from objkv.agent.prefetch import Matched
from objkv.cli.admission import AdmissionOrders
from objkv.cli.bench import BenchReport
from objkv.cli.prefetch import PrefetchReport
from objkv.config.prices import Prices
from objkv.ops.audit.report import AuditReport, AuditVerdict
from objkv.ops.demo import DemoReport, DemoRow
from objkv.ops.diff import Difference
from objkv.ops.doctor.access import Access
from objkv.ops.doctor.doctor import DoctorReport
from objkv.ops.explain import Explanation
from objkv.ops.gpu_check import GpuReport
from objkv.ops.inventory.findings import Doubt
from objkv.ops.inventory.tree import Branch, PrefixSummary
from objkv.ops.listing import NamespaceSummary, TenantTotals
from objkv.ops.match import MatchReport
from objkv.ops.models.verdict import ModelVerdict
from objkv.ops.pin import PinList, PinnedPrefix
from objkv.ops.runs import Ending, Finding
from objkv.ops.show import PayloadReport, Verdict
from objkv.ops.size.model import Preset
from objkv.ops.size.sizing import Load, ReplicaLayout, Sizing
from objkv.ops.sweep.remove import Category
from objkv.ops.top import TopView
from objkv.ops.warm.report import WarmReport


class RunKeys(TypedDict):
    """The keys of every command that works through the store in parts."""

    command: str
    ending: Ending
    """Why the run ended."""
    complete: bool
    """Whether everything was looked at."""
    findings: list[Finding]
    omitted: int
    """Findings that are counted but not listed."""


class AuditKeys(TypedDict):
    """The keys that ``audit`` adds to its report."""

    command: Literal["audit"]
    format: int
    """Version of this document's format."""
    verdict: AuditVerdict
    """The worst finding."""
    html: str | None
    """The file that ``--html`` wrote."""


class GpuCheckKeys(TypedDict):
    """The key that ``gpu-check`` adds to its report."""

    passed: bool
    """Whether no comparison and no replica failed."""


class FasterRow(TypedDict):
    """The key that ``demo`` adds to a row."""

    speed_up: float
    """Seconds without objkv, divided by seconds with it."""


class DemoKeys(TypedDict):
    """The keys that ``demo`` adds to its report."""

    rows: list[Annotated[DemoRow, FasterRow]]
    speed_up_median: float
    identical: bool
    """Whether every answer equals the one that the model computes without objkv."""
    served: bool
    """Whether objkv served any token."""
    fine: bool
    """Whether answers are identical and tokens were served."""


class DiffSide(TypedDict):
    """One of the two identities."""

    source: str
    """The argument."""
    namespace: str
    model: str | None


class DiffKeys(TypedDict):
    """The document of ``diff``."""

    share: bool
    reason: str
    """The conclusion in one sentence."""
    a: DiffSide
    b: DiffSide
    differences: list[Difference]


class ServedAt(TypedDict):
    """The document of ``exporter`` while it serves."""

    url: str
    metrics: str
    """The address for Prometheus."""


class AgentServes(TypedDict):
    """The document of ``agent`` while it serves."""

    socket: str
    arena_bytes: int


class SampleKeys(TypedDict):
    """One metric of ``exporter --once``."""

    name: str
    labels: dict[str, str]
    value: float


class NamespacesKeys(TypedDict):
    """The document of ``ls``."""

    source: Literal["index", "bulk"]
    """``bulk`` with ``--bulk``."""
    namespaces: list[NamespaceSummary]
    omitted: int
    """Rows beyond ``--limit``."""
    tenants: list[TenantTotals]
    quota_bytes: int
    """0: no quota."""


class PrefixesKeys(TypedDict):
    """The document of ``ls --prefixes``."""

    prefixes: list[PrefixSummary]
    omitted: int
    """Rows beyond ``--limit``."""


class TreeKeys(TypedDict):
    """The document of ``ls --tree``."""

    branches: list[Branch]
    """In the order in which they are drawn."""
    omitted: int
    """Rows beyond ``--limit``."""


class ExplainKeys(TypedDict):
    """The keys that ``match`` adds with an agent, and with ``--explain``."""

    memory: NotRequired[Matched]
    """With an agent that answers: how much it has in this node's memory."""
    explanation: NotRequired[Explanation]
    """With ``--explain`` only."""


class RebuildSkipped(TypedDict):
    """The document of ``rebuild`` for a folder that is its own index."""

    command: Literal["rebuild"]
    ending: Literal["complete"]
    complete: bool
    own_index: bool


class RebuildKeys(TypedDict):
    """The keys that ``rebuild`` adds."""

    applied: bool
    """Whether ``--apply`` was given."""
    own_index: bool
    """Whether the folder is its own index and needs no rebuild."""
    namespaces: int
    restored: int
    """Payloads that had no record."""
    corrected: int
    """Payloads whose record was wrong."""
    present: int
    """Payloads whose record was right."""
    written: int
    """Payloads that a replica is saving."""
    corrupt: int
    """Payloads that are damaged, not of objkv, or whose header claims another key."""
    pins: int
    """Pinned chunks."""


class ShowKeys(TypedDict):
    """The document of ``show``."""

    key: str
    """The argument."""
    verdict: Verdict
    """The worst of all payloads."""
    payloads: list[PayloadReport]


class Month(TypedDict):
    """The key that ``size`` adds to its result."""

    month: float
    """US dollars for the bucket in a month."""


class SizeKeys(TypedDict):
    """The document of ``size``."""

    sizing: Annotated[Sizing, Month]
    layout: ReplicaLayout
    load: Load
    prices: Prices


class ModelsKeys(TypedDict):
    """The document of ``size --list``."""

    models: dict[str, Preset]


class CategoryTotals(TypedDict):
    """The findings of a sweep in one category."""

    payloads: int
    nbytes: int


class KeptTotals(TypedDict):
    """Entries that a sweep did not remove."""

    young: int
    """Within the grace time."""
    pinned: int
    doubted: int
    """In namespaces named in ``doubts``, and in their earlier epochs."""
    busy: int
    """A replica holds the lease."""
    changed: int
    """Replaced since they were found."""
    documents: int


class SweepKeys(TypedDict):
    """The keys that ``sweep`` adds."""

    applied: bool
    """Whether the sweep could delete: ``--apply`` was given, and no doubt is about everything."""
    categories: dict[Category, CategoryTotals]
    removed: int
    removed_bytes: int
    kept: KeptTotals
    doubts: list[Doubt]
    """Kept data that looks wrong; ``--force`` sweeps it, too."""


class VerifyKeys(TypedDict):
    """The keys that ``verify`` adds."""

    every: bool
    """Whether ``--all`` was given."""
    quarantine: bool
    """Whether ``--quarantine`` was given."""
    applied: bool
    """Whether ``--quarantine`` and ``--apply`` were given."""
    refusal: str | None
    """With ``--quarantine`` only: why ``--apply`` would be refused; null if it would not."""
    chosen_of: int | None
    """How many payloads the sample was chosen from; null with ``--all``."""
    part: str | None
    """The part that ``--part`` chose, such as 2/7."""
    checked: int
    checked_bytes: int
    missing_seen: bool
    """Whether records without a payload can be seen with the rights of this user."""
    ok: int
    missing: int
    """Records without a payload."""
    corrupt: int
    """Payloads with a wrong length, header, frame or seal, and payloads of another key."""
    mismatch: int
    """Right payloads with a wrong record."""
    hot: int
    """Copies in the hot store that differ from the payload."""
    orphan: int
    """Payloads without a record, which are not checked."""
    expired: int
    """Payloads that were not used for ``ttl_s``, so their records ran out; not checked."""
    changed: int
    """Payloads that were replaced while they were checked."""
    quarantined: int
    """Payloads moved to ``quarantine/``."""
    forgotten: int
    """Records removed."""
    mended: int
    """Records corrected."""


class WarmKeys(TypedDict):
    """The keys that ``warm`` adds to its report."""

    command: Literal["warm"]
    complete: bool
    """Whether every prompt that can be stored is stored."""


@dataclass(frozen=True, slots=True)
class JsonDocument:
    """One kind of document that a command prints."""

    parts: tuple[Any, ...]
    """Its keys are those of these dataclasses and typed dicts; the last one with a key decides."""
    options: str = ""
    """The options that make the command print it; empty for the usual one."""
    is_list: bool = False
    """Whether the command prints a list of these."""


DOCUMENTS: Final[Mapping[str, tuple[JsonDocument, ...]]] = {
    "access": (JsonDocument((Access,)),),
    "agent": (JsonDocument((AgentServes,)),),
    "admission": (JsonDocument((AdmissionOrders,)),),
    "audit": (JsonDocument((AuditKeys, AuditReport)),),
    "bench": (JsonDocument((BenchReport,)),),
    "gpu-check": (JsonDocument((GpuReport, GpuCheckKeys)),),
    "demo": (JsonDocument((DemoReport, DemoKeys)),),
    "diff": (JsonDocument((DiffKeys,)),),
    "doctor": (JsonDocument((DoctorReport,)), JsonDocument((ModelVerdict,), "--model")),
    "exporter": (
        JsonDocument((SampleKeys,), "--once", is_list=True),
        JsonDocument((ServedAt,)),
    ),
    "ls": (
        JsonDocument((NamespacesKeys,)),
        JsonDocument((PrefixesKeys,), "NAMESPACE or --prefixes"),
        JsonDocument((TreeKeys,), "--tree"),
    ),
    "match": (JsonDocument((MatchReport, ExplainKeys)),),
    "pin": (JsonDocument((PinnedPrefix,)), JsonDocument((PinList,), "--list")),
    "prefetch": (JsonDocument((PrefetchReport,)),),
    "rebuild": (
        JsonDocument((RunKeys, RebuildKeys)),
        JsonDocument((RebuildSkipped,), "index_url bulk:"),
    ),
    "show": (JsonDocument((ShowKeys,)),),
    "size": (JsonDocument((SizeKeys,)), JsonDocument((ModelsKeys,), "--list")),
    "sweep": (JsonDocument((RunKeys, SweepKeys)),),
    "top": (JsonDocument((TopView,), "--once"),),
    "unpin": (JsonDocument((PinnedPrefix,)),),
    "verify": (JsonDocument((RunKeys, VerifyKeys)),),
    "warm": (JsonDocument((WarmKeys, WarmReport)),),
}
"""The documents of each command."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a document."""

    type: Any
    """With ``Annotated[A, B]`` for an object that has the keys of both."""
    is_required: bool


def keys_of(*parts: Any) -> dict[str, Key]:
    """Return the keys that dataclasses and typed dicts have together, in order."""
    found: dict[str, Key] = {}
    for part in parts:
        hints = get_type_hints(part, include_extras=True)
        names = [field.name for field in fields(part)] if is_dataclass(part) else list(hints)
        for name in names:
            optional = getattr(hints[name], "__origin__", None) is NotRequired
            kind = hints[name].__args__[0] if optional else hints[name]
            found[name] = Key(kind, not optional)
    return found
