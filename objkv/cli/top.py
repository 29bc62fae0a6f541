"""``objkv top``: show live hit rates, traffic and errors of a fleet."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from objkv.cli.command import FINE, FOUND, UNREACHABLE, Session, command, ending_in_order
from objkv.cli.options import time_option
from objkv.cli.output import Printer, counted, plain, rich_table
from objkv.config.node import agent_socket
from objkv.config.schema import Config
from objkv.ops.formats import printable, size
from objkv.ops.top.fleet import AgentRow, FleetWatch, Flow, ReplicaRow, View
from objkv.ops.top.scrape import MetricsSource

_SOURCES: Final = ("computed", "local", "hot", "bulk")
_REPLICA: Final = (
    "replica", "state", "~notes", ">tokens", ">hit", ">local", ">loaded", ">saved",
    ">refused", ">missed", ">dropped", ">lookup", ">load", ">run", ">wait",
)  # fmt: skip
_AGENT: Final = (
    "node", "state", "~notes", ">arena", ">used", ">held back", ">in memory", ">fetched", ">saved",
    ">no room", ">on disk", ">leased", ">clients",
)  # fmt: skip
_DEFAULT: Final = "http://127.0.0.1:8000"
"""The default address of ``vllm serve``."""
_DEADLINE_MAX_S: Final = 5.0


@command
def top(
    session: Session,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help=f"A replica; repeatable (default: {_DEFAULT}).", metavar="URL"),
    ] = None,
    agent: Annotated[
        list[Path] | None,
        typer.Option(
            help="Socket of a node agent; repeatable (default: that of OBJKV_AGENT). Without "
            "--endpoint, no replica is watched.",
            metavar="PATH",
        ),
    ] = None,
    every: Annotated[
        float, time_option("Time between updates", "--every", least=0.2, most=3600, shown="2s")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print totals since each process started, and exit.")
    ] = False,
) -> int:
    """Show live hit rates, traffic and errors of a fleet.

    Read-only. Values are per second of the last interval. Ctrl-C ends it.
    """
    urls = list(dict.fromkeys(endpoint or ([] if agent else [_DEFAULT])))
    # The usage of a folder that is its own index is counted by a walk through it.
    has_usage = not session.config.index_url.startswith("bulk:") and session.has_bulk()
    once = once or session.out.machine or not sys.stdout.isatty()
    deadline_s = _DEADLINE_MAX_S if once else min(max(every, 1.0), _DEADLINE_MAX_S)
    with ExitStack() as stack:
        stack.enter_context(ending_in_order())
        backends = stack.enter_context(session.backends()) if has_usage else None
        sources = [MetricsSource(url, deadline_s=deadline_s) for url in urls]
        agents = [
            MetricsSource("http://agent", deadline_s=deadline_s, socket=Path(f"{path}.http"))
            for path in _agents(agent, session.config)
        ]
        index = backends.index if backends else None
        watch = stack.enter_context(FleetWatch(sources, agents, index))
        return _once(session.out, watch) if once else _live(session.out, watch, every)


def _agents(given: list[Path] | None, config: Config) -> list[Path]:
    """Return the sockets of the agents to show."""
    if given:
        return list(dict.fromkeys(given))
    path = agent_socket(config)
    # Another user's replicas, or none, may have started agents on this machine.
    is_shown = path is not None and (config.agent != "auto" or path.exists())
    return [path] if path is not None and is_shown else []


def _once(out: Printer, watch: FleetWatch) -> int:
    with out.waiting("reading metrics"):
        view = watch.totals()
    if out.machine:
        out.document({**plain(view), "hit_rate": view.total.hit_rate})
    else:
        for line in summary_lines(view, ""):
            out.line(line)
        for columns, cells in _tables(view):
            out.line()
            out.table(columns, cells)
    states = [*(row.state for row in view.rows), *(row.state for row in view.agents)]
    if all(state == "down" for state in states):
        return UNREACHABLE
    return FOUND if "down" in states or view.problem else FINE


def _live(out: Printer, watch: FleetWatch, every_s: float) -> int:
    """Redraw the table until Ctrl-C."""
    try:
        with Live(console=out.screen(), screen=True, auto_refresh=False) as live:
            while True:
                due_s = time.monotonic() + every_s
                view = watch.tick()
                head = f"objkv top  {time.strftime('%H:%M:%S')}  every {every_s:g} s"
                parts: list[RenderableType] = [Text(head, style="bold")]
                parts += [Text(printable(line)) for line in summary_lines(view, "/s")]
                for columns, cells in _tables(view):
                    parts += [Text(), rich_table(columns, cells, live.console.width)]
                live.update(Group(*parts), refresh=True)
                time.sleep(max(0.0, due_s - time.monotonic()))
    except KeyboardInterrupt:
        return FINE


def _tables(view: View) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    found: list[tuple[tuple[str, ...], list[list[str]]]] = []
    if view.rows:
        found.append((_REPLICA, [replica_cells(row) for row in view.rows]))
    if view.agents:
        found.append((_AGENT, [agent_cells(row) for row in view.agents]))
    return found


def summary_lines(view: View, per: str) -> list[str]:
    """Return the fleet's totals as text. ``per``: ``/s`` if the values are rates."""
    lines = []
    down = sum(row.state == "down" for row in (view.rows or view.agents))
    total = view.total
    if not view.rows:  # only agents are watched
        lines.append(f"{counted(len(view.agents), 'node agent')}, {down} down")
    elif down == len(view.rows):  # zeros would look like measurements
        lines += [
            f"{counted(down, 'replica')}, {down} down; hit rate -",
            "no replica answers: is vllm serve running there? --endpoint URL names another",
        ]
    else:
        shares = [
            f"{name} {getattr(total, f'{name}_tokens') / total.tokens:.0%}"
            for name in _SOURCES
            if total.tokens
        ]
        lines += [
            f"{counted(len(view.rows), 'replica')}, {down} down; hit rate {_hit_rate(total)}; "
            f"{total.tokens:,.0f} prompt tokens{per}: {', '.join(shares) or 'none'}",
            f"loads {size(round(total.load_bytes))}{per}; saves {size(round(total.save_bytes))}"
            f"{per}; refused {_count(total.refusals)}{per}, missed {_count(total.misses)}{per}, "
            f"dropped {_count(total.drops)}{per}",
        ]
    if (stored := view.stored) is not None:
        lines.append(
            f"stored {size(stored.nbytes)} in {counted(stored.payloads, 'payload')} of "
            f"{counted(stored.namespaces, 'namespace')}"
        )
    return [*lines, view.problem] if view.problem else lines


def _hit_rate(total: Flow) -> str:
    """Return the hit rate. If the replicas' own caches served most tokens, name the remaining share
    that it refers to, so that 0% does not look like a failure."""
    rate = _percent(total.hit_rate)
    if total.hit_rate is None or 2 * total.local_tokens < total.tokens:
        return rate
    return f"{rate} of the {total.asked_tokens / total.tokens:.0%} that was not in GPU memory"


def replica_cells(row: ReplicaRow) -> list[str]:
    """Return one replica's row as text."""
    flow = row.flow
    if row.problem is not None:
        return [row.name, row.state, row.problem, *[""] * 12]
    grown = [
        f"{flow.tokens:,.0f}",
        _percent(flow.hit_rate),
        _percent(flow.local_tokens / flow.tokens if flow.tokens else None),
        _bytes(flow.load_bytes),
        _bytes(flow.save_bytes),
        _count(flow.refusals),
        _count(flow.misses),
        _count(flow.drops),
        _millis(flow.lookup_ms),
        _millis(flow.load_ms),
    ]
    return [
        row.name,
        row.state,
        "operator's order" if row.switched else "",
        *(grown if row.state != "new" else [""] * len(grown)),
        f"{flow.running:.0f}",
        f"{flow.waiting:.0f}",
    ]


def agent_cells(row: AgentRow) -> list[str]:
    """Return one node agent's row as text."""
    if row.problem is not None:
        return [row.name, row.state, row.problem, *[""] * 10]
    requested = row.hits + row.fills
    opened = [f"circuit open: {name.replace('_', ' ')}" for name in row.breakers_open]
    return [
        row.name,
        row.state,
        ", ".join([*opened, *map(str, row.policies)]),
        size(round(row.arena_bytes)),
        _percent(row.used_share),
        _bytes(row.held_back_bytes),
        _percent(row.hit_rate),
        _bytes(row.load_bytes),
        _bytes(row.save_bytes),
        _count(row.no_room),
        _percent(row.disk_hits / requested if requested else None),
        _percent(row.leased_bytes / row.arena_bytes if row.arena_bytes else None),
        f"{row.clients:.0f}",
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _bytes(value: float) -> str:
    return size(round(value)) if value else "0"


def _count(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _millis(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f} ms"
