"""What a long command found and did: counted by kind, and named as far as there is room."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

FINDINGS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found."""

    kind: str
    key: str
    """Where it is in the bulk store, or was to be."""
    nbytes: int
    detail: str = ""


@dataclass(slots=True)
class Tally:
    """One thread at a time."""

    counts: Counter[str] = field(default_factory=Counter)
    """By kind: of findings, and of what else is counted."""
    nbytes: Counter[str] = field(default_factory=Counter)
    """Bytes by kind, of kinds that have bytes."""
    findings: list[Finding] = field(default_factory=list)
    """The first ``FINDINGS_MAX``."""
    omitted: int = 0
    """Findings that there was no room for."""

    def count(self, kind: str, nbytes: int = 0) -> None:
        """One more of ``kind``."""
        self.counts[kind] += 1
        self.nbytes[kind] += nbytes

    def find(self, kind: str, key: str, nbytes: int, detail: str = "") -> None:
        """One more of ``kind``, which is worth naming."""
        self.count(kind, nbytes)
        self._keep(Finding(kind, key, nbytes, detail))

    def add(self, other: "Tally") -> None:
        """Count what ``other`` has counted as well."""
        self.counts += other.counts
        self.nbytes += other.nbytes
        self.omitted += other.omitted
        for finding in other.findings:
            self._keep(finding)

    def plain(self) -> dict[str, Any]:
        """As JSON values, for ``parse``."""
        findings = [[f.kind, f.key, f.nbytes, f.detail] for f in self.findings]
        return {
            "counts": dict(self.counts),
            "nbytes": dict(self.nbytes),
            "findings": findings,
            "omitted": self.omitted,
        }

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "Tally":
        """What ``plain`` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            Counter({str(kind): int(n) for kind, n in values["counts"].items()}),
            Counter({str(kind): int(n) for kind, n in values["nbytes"].items()}),
            [Finding(str(k), str(key), int(n), str(d)) for k, key, n, d in values["findings"]],
            int(values["omitted"]),
        )

    def _keep(self, finding: Finding) -> None:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)
        else:
            self.omitted += 1
