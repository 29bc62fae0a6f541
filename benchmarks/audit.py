"""Measure the time and the peak memory of an audit as the store grows.

    python benchmarks/audit.py [--chunks 100000] [--steps 4] [--keep FOLDER] [--json]

Creates stores, each twice as large as the previous one and the last with ``--chunks`` chunks. Runs
``objkv audit --json --html`` on each in a separate process, with the SQLite index and without one
(``bulk:``). Exits with 1 if an audit does not count the planted chunks and faults.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a script: its folder would hide modules of Python's own
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.audit_store import StoreMaker

_KINDS = ("orphan", "expired", "ghost", "corrupt", "stranger", "leftover")


@dataclass(frozen=True, slots=True)
class Row:
    """One audit."""

    index: str
    chunks: int
    payloads: int
    seconds: float
    cpu_seconds: float
    peak_mib: float
    """Resident memory of the process at most, Python and its libraries included."""
    page_kib: int
    differs: tuple[str, ...]
    """Where its counts are not those that were planted."""


def main() -> int:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument(
        "--steps", type=int, default=4, help="number of stores, each twice the previous one"
    )
    parser.add_argument("--keep", type=Path, help="create the largest store here and keep it")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    for step in reversed(range(given.steps)):
        with tempfile.TemporaryDirectory(prefix="objkv-audit-") as temporary:
            keep = given.keep if step == 0 and given.keep else Path(temporary) / "store"
            begun_s = time.monotonic()
            planted = StoreMaker(keep, given.chunks >> step, time.time()).make()
            made_s = time.monotonic() - begun_s
            sys.stderr.write(f"made {planted['good']:,} chunks in {made_s:.0f} s\n")
            for index in (f"sqlite://{keep.absolute()}/index.sqlite", "bulk:"):
                rows.append(measure(keep.absolute(), index, planted, Path(temporary)))
                if not given.json:
                    sys.stdout.write(told(rows[-1]))
                    sys.stdout.flush()
    if given.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return int(any(row.differs for row in rows))


def measure(store: Path, index: str, planted: dict[str, int], temporary: Path) -> Row:
    """Audit ``store`` in a process of its own."""
    page, answer = temporary / "report.html", temporary / "report.json"
    arguments = [sys.executable, "-m", "objkv.cli", "audit", "--json", "--html", str(page)]
    arguments += ["--bulk-url", f"file://{store}/chunks", "--index-url", index]
    environment = {**os.environ, "XDG_CACHE_HOME": str(temporary), "OBJKV_TTL_S": "7776000"}
    begun_s = time.monotonic()
    with answer.open("wb") as out:
        child = subprocess.Popen(arguments, stdout=out, env=environment)
        _, status, used = os.wait4(child.pid, 0)
    seconds = time.monotonic() - begun_s
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 1):
        raise SystemExit(child.returncode)
    report = json.loads(answer.read_text())
    return Row(
        index=index.partition(":")[0],
        chunks=report["totals"]["chunks"],
        payloads=report["totals"]["payloads"],
        seconds=round(seconds, 1),
        cpu_seconds=round(used.ru_utime + used.ru_stime, 1),
        peak_mib=round(used.ru_maxrss / 1024, 1),
        page_kib=page.stat().st_size >> 10,
        differs=tuple(differences(report, planted, has_index=not index.startswith("bulk:"))),
    )


def differences(report: dict[str, Any], planted: dict[str, int], *, has_index: bool) -> list[str]:
    """Where ``report`` is not what was ``planted``."""
    unseen = () if has_index else ("orphan", "expired", "ghost")
    counts = {one["kind"]: one["count"] for one in report["findings"]["counts"]}
    wanted = {kind: 0 if kind in unseen else planted[kind] for kind in _KINDS}
    stored = ("good", "orphan", "expired", "stranger", "corrupt")
    wanted["chunks"] = sum(planted[kind] for kind in stored)
    counts["chunks"] = report["totals"]["chunks"]
    return [f"{kind} {counts[kind]}, not {n}" for kind, n in wanted.items() if counts[kind] != n]


def told(row: Row) -> str:
    """A line of the table."""
    wrong = f"  WRONG: {'; '.join(row.differs)}" if row.differs else ""
    return (
        f"{row.index:7} {row.chunks:8,} chunks {row.payloads:8,} payloads {row.seconds:6.1f} s "
        f"({row.cpu_seconds:.1f} s CPU) {row.peak_mib:6.1f} MiB peak, page {row.page_kib:,} KiB"
        f"{wrong}\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
