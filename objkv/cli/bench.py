"""``objkv bench``: measure the configured stores, index and node agent from this machine.

Benchmarks of objkv itself are in the project's ``benchmarks`` folder.
"""

from collections.abc import Generator, Iterable
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from objkv.agent.client import is_listening
from objkv.assembly.backends import open_bulk, open_hot, open_index
from objkv.cli.command import FINE, Session, command, ending_in_order, require_role
from objkv.config import Config
from objkv.config.node import agent_socket
from objkv.ops.bench.measure import (
    FULL,
    QUICK,
    BenchRow,
    Effort,
    bench_agent,
    bench_index,
    bench_store,
)
from objkv.telemetry import NullRecorder


@command
def bench(
    session: Session,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use small sizes, to test that it works.")
    ] = False,
) -> int:
    """Measure your stores, index and node agent from this machine.

    Writes payloads and records of its own, and deletes them at the end. What a writer may not
    delete expires, and the next sweep deletes it.
    """
    require_role(session, "bench")
    session.has_bulk()
    config, out = session.config, session.out
    socket = agent_socket(config)
    if socket is not None and not is_listening(socket):
        out.note(
            f"no agent listens at {socket}, so its memory is not measured: replicas start one, "
            "or objkv agent"
        )
        socket = None
    public, found = config.public(), list[BenchRow]()
    where = {"bulk": public["bulk_url"], "index": public["index_url"], "agent": socket}
    if not out.machine:
        out.line(", ".join(f"{name} {place or 'none'}" for name, place in where.items()), "dim")
        out.line(_line("", ("p50", "p95", "p99"), ""), "bold")
    with ending_in_order(), closing(_rows(config, socket, QUICK if quick else FULL)) as rows:
        while True:
            with out.waiting("measuring"):
                row = next(rows, None)
            if row is None:
                break
            found.append(row)
            if not out.machine:
                out.line(_line(row.name, map(_figure, (row.p50, row.p95, row.p99)), row.unit))
    report = {"objkv": metadata.version("objkv"), "quick": quick, **where, "rows": found}
    if not out.document(report) and quick:
        out.line("--quick: the sizes are too small for meaningful figures.", "yellow")
    return FINE


def _rows(config: Config, socket: Path | None, effort: Effort) -> Generator[BenchRow]:
    recorder = NullRecorder()
    with (
        closing(open_bulk(config, recorder)) as bulk,
        closing(open_index(config, recorder)) as index,
    ):
        bulk.check()
        yield from bench_store(bulk, "bulk", effort.bulk, effort)
        index.check()
        yield from bench_index(index, effort)
        if (hot := open_hot(config, recorder)) is not None:
            with closing(hot):
                yield from bench_store(hot, "hot", effort.hot, effort)
        if socket is not None:
            yield from bench_agent(socket, bulk, index, effort, config.seal_kinds)


def _line(name: str, figures: Iterable[str], unit: str) -> str:
    return " ".join((f"{name:<62}", *(f"{figure:>8}" for figure in figures), unit)).rstrip()


def _figure(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"
