"""``objkv bench``: measure the configured stores, index and node agent from this machine.

Benchmarks of objkv itself are in the project's ``benchmarks`` folder.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from objkv.agent.client import is_listening
from objkv.assembly.backends import open_bulk, open_hot, open_index
from objkv.cli.command import FINE, Session, command, ending_in_order
from objkv.cli.demo import Steps
from objkv.cli.output import Printer
from objkv.config import Config
from objkv.config.node import agent_socket
from objkv.ops.bench.agent import bench_agent
from objkv.ops.bench.stores import (
    FULL,
    QUICK,
    BenchRow,
    Effort,
    bench_index,
    bench_store,
)
from objkv.ops.demo import Tell
from objkv.telemetry import NullRecorder


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The result of one run."""

    objkv: str
    quick: bool
    """Whether sizes were small: then the figures show only that it works."""
    bulk: str
    """URLs without passwords."""
    index: str
    agent: str | None
    """Socket of the agent; null if none was measured."""
    rows: tuple[BenchRow, ...]


@command
def bench(
    session: Session,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use small sizes, to test that it works.")
    ] = False,
) -> int:
    """Measure your stores, index and node agent from this machine.

    Writes payloads and records of its own, and deletes them at the end.
    """
    config, steps = session.config, Steps()
    socket = agent_socket(config)
    if socket is not None and not is_listening(socket):
        session.out.note(f"no agent listens at {socket}: start one with objkv agent")
        socket = None
    with ending_in_order(), steps.shown():
        rows = tuple(_rows(config, socket, QUICK if quick else FULL, steps.tell))
    public = config.public()
    report = BenchReport(
        metadata.version("objkv"),
        quick,
        public["bulk_url"],
        public["index_url"],
        None if socket is None else str(socket),
        rows,
    )
    if session.out.machine:
        session.out.document(report)
    else:
        print_report(session.out, report)
    return FINE


def _rows(config: Config, socket: Path | None, effort: Effort, tell: Tell) -> Iterator[BenchRow]:
    recorder = NullRecorder()
    with (
        closing(open_bulk(config, recorder)) as bulk,
        closing(open_index(config, recorder)) as index,
    ):
        tell("bulk store", "putting and getting")
        bulk.check()
        yield from bench_store(bulk, "bulk", effort.bulk, effort)
        tell("index", "looking up")
        index.check()
        yield from bench_index(index, effort)
        if (hot := open_hot(config, recorder)) is not None:
            with closing(hot):
                tell("hot store", "putting and getting")
                yield from bench_store(hot, "hot", effort.hot, effort)
        if socket is not None:
            tell("node agent", "loading")
            yield from bench_agent(socket, bulk, index, effort)


def print_report(out: Printer, report: BenchReport) -> None:
    """Print the table and the places measured."""
    out.table(("", ">p50", ">p95", ">p99", "unit"), [
        (row.name, *map(_figure, (row.p50, row.p95, row.p99)), row.unit) for row in report.rows
    ])  # fmt: skip
    agent = "" if report.agent is None else f", agent {report.agent}"
    out.line(f"objkv {report.objkv}, bulk {report.bulk}, index {report.index}{agent}", "dim")
    if report.quick:
        out.line("--quick: the sizes are too small for meaningful figures.", "yellow")


def _figure(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"
