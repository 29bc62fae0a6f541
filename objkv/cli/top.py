"""``objkv top``: show live hit rates, traffic and errors of a fleet."""

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from objkv.cli.command import FINE, FOUND, UNREACHABLE, Session, command, ending_in_order
from objkv.cli.options import socket_option
from objkv.cli.output import Printer, counted, rich_table
from objkv.config.node import agent_socket
from objkv.config.schema import Config
from objkv.ops.formats import DASH, printable, share, size
from objkv.ops.top import FleetWatch, MetricsSource, TopRow, TopView, hit_rate

_REPLICA: Final = (
    "replica", "state", "~notes", ">tokens", ">hit", ">local", ">loaded", ">saved", ">dropped",
)  # fmt: skip
_AGENT: Final = (
    "node", "state", "~notes", ">arena", ">used", ">unsaved", ">in memory", ">fetched", ">saved",
    ">no room", ">clients",
)  # fmt: skip
_REASONS: Final = {
    "refused": "faster to compute",
    "late_lookups": "late lookups",
    "failed_lookups": "failed lookups",
    "failed_loads": "failed loads",
    "queue_full": "queue or memory full",
}
"""Why stored tokens were computed, by the name of the number."""
_DEFAULT: Final = "http://127.0.0.1:8000"
"""The default address of ``vllm serve``."""
_EVERY_S: Final = 2.0
"""Between two looks, and the time limit of each."""
_ONCE_S: Final = 5.0


@command
def top(
    session: Session,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help=f"A replica; repeatable (default: {_DEFAULT}).", metavar="URL"),
    ] = None,
    agent: Annotated[
        list[Path] | None,
        socket_option(
            "Socket of a node agent; repeatable (default: that of OBJKV_AGENT). Without "
            "--endpoint, no replica is watched.",
            "--agent",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print totals since each process started, and exit.")
    ] = False,
) -> int:
    """Show live hit rates, traffic and errors of a fleet.

    Read-only. Values are per second of the last two seconds. Ctrl-C ends it.
    """
    urls = list(dict.fromkeys(endpoint or ([] if agent else [_DEFAULT])))
    # The usage of a folder that is its own index is counted by a walk through it.
    has_usage = not session.config.index_url.startswith("bulk:") and session.has_bulk()
    once = once or session.out.machine or not sys.stdout.isatty()
    deadline_s = _ONCE_S if once else _EVERY_S
    with ExitStack() as stack:
        stack.enter_context(ending_in_order())
        backends = stack.enter_context(session.backends()) if has_usage else None
        sources = [MetricsSource(url, deadline_s=deadline_s) for url in urls]
        agents = [
            MetricsSource("http://agent", deadline_s=deadline_s, socket=path)
            for path in _agents(agent, session.config)
        ]
        index = backends.index if backends else None
        watch = stack.enter_context(closing(FleetWatch(sources, agents, index)))
        if not once:
            _live(watch)
        return _once(session.out, watch)


def _agents(given: list[Path] | None, config: Config) -> list[Path]:
    if given:
        return list(dict.fromkeys(given))
    path = agent_socket(config)
    # Another user's replicas, or none, may have started agents on this machine.
    is_shown = path is not None and (config.agent != "auto" or path.exists())
    return [path] if path is not None and is_shown else []


def _once(out: Printer, watch: FleetWatch) -> int:
    with out.waiting("reading metrics"):
        view = watch.look(since_start=True)
    if not out.document(view):
        for line in summary_lines(view, ""):
            out.line(line)
        for columns, cells in _tables(view):
            out.line()
            out.table(columns, cells)
    states = [*(row.state for row in view.rows), *(row.state for row in view.agents)]
    if all(state == "down" for state in states):
        return UNREACHABLE
    return FOUND if "down" in states or view.problem else FINE


def _live(watch: FleetWatch) -> NoReturn:
    """Redraw the table until Ctrl-C."""
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            due_s = time.monotonic() + _EVERY_S
            view = watch.look(since_start=False)
            head = f"objkv top  {time.strftime('%H:%M:%S')}"
            parts: list[RenderableType] = [Text(head, style="bold")]
            parts += [Text(printable(line)) for line in summary_lines(view, "/s")]
            for columns, cells in _tables(view):
                parts += [Text(), rich_table(columns, cells, live.console.width)]
            live.update(Group(*parts), refresh=True)
            time.sleep(max(0.0, due_s - time.monotonic()))


def _tables(view: TopView) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    every = ((_REPLICA, view.rows, replica_cells), (_AGENT, view.agents, agent_cells))
    return [(columns, [cells(row) for row in rows]) for columns, rows, cells in every if rows]


def summary_lines(view: TopView, per: str) -> list[str]:
    """Return the fleet's totals as text. ``per``: ``/s`` if the values are rates."""
    lines = []
    down = sum(row.state == "down" for row in (view.rows or view.agents))
    total = view.total
    if not view.rows:  # only agents are watched
        lines.append(f"{counted(len(view.agents), 'node agent')}, {down} down")
    elif down == len(view.rows):  # zeros would look like measurements
        lines += [
            f"{counted(down, 'replica')}, {down} down; hit rate {DASH}",
            "no replica answers: is vllm serve running there? --endpoint URL names another",
        ]
    else:
        sources = ("local", "hot", "bulk")
        shares = [f"{name} {share(total[f'{name}_tokens'], total['tokens'])}" for name in sources]
        lines += [
            f"{counted(len(view.rows), 'replica')}, {down} down; hit rate {_hit_rate(view)}; "
            f"{total['tokens']:,.0f} prompt tokens{per}: {', '.join(shares)}",
            f"loads {_bytes(total['load_bytes'])}{per}; saves {_bytes(total['save_bytes'])}{per}; "
            f"dropped {_count(total['drops'])}{per}",
        ]
        if reasons := _reasons(total):
            lines.append(f"stored but computed{per}: {', '.join(reasons)}")
    if any(row.state == "down" for row in view.agents):
        lines.append("a node agent does not answer: is objkv agent running there?")
    if (stored := view.stored) is not None:
        lines.append(
            f"stored {size(stored.nbytes)} in {counted(stored.payloads, 'payload')} of "
            f"{counted(stored.namespaces, 'namespace')}"
        )
    return [*lines, view.problem] if view.problem else lines


def _reasons(values: Mapping[str, float]) -> list[str]:
    """Return why stored tokens were computed, with how often."""
    return [f"{words} {_count(values[name])}" for name, words in _REASONS.items() if values[name]]


def _hit_rate(view: TopView) -> str:
    """Return the hit rate. If the replicas' own caches served most tokens, name the remaining share
    that it refers to, so that 0% does not look like a failure."""
    local, tokens = view.total["local_tokens"], view.total["tokens"]
    rate = share(view.hit_rate, 1)
    if view.hit_rate is None or 2 * local < tokens:
        return rate
    return f"{rate} of the {share(tokens - local, tokens)} that was not in GPU memory"


def replica_cells(row: TopRow) -> list[str]:
    """Return one replica's row as text."""
    values = row.values
    if not values or row.state == "new":
        return [row.name, row.state, row.problem or "", *[""] * 6]
    notes = ["operator's order"] if values["switched"] else []
    return [
        row.name, row.state, ", ".join([*notes, *_reasons(values)]), f"{values['tokens']:,.0f}",
        share(hit_rate(values), 1), share(values["local_tokens"], values["tokens"]),
        _bytes(values["load_bytes"]), _bytes(values["save_bytes"]), _count(values["drops"]),
    ]  # fmt: skip


def agent_cells(row: TopRow) -> list[str]:
    """Return one node agent's row as text."""
    values = row.values
    if not values:
        return [row.name, row.state, row.problem or "", *[""] * 8]
    arena = values["arena_bytes"]
    notes = ", ".join(f"circuit open: {name.replace('_', ' ')}" for name in row.breakers_open)
    return [
        row.name, row.state, notes, _bytes(arena), share(arena - values["free_bytes"], arena),
        _bytes(values["unsaved_bytes"]), share(values["hits"], values["hits"] + values["fills"]),
        _bytes(values["load_bytes"]), _bytes(values["save_bytes"]), _count(values["no_room"]),
        _count(values["clients"]),
    ]  # fmt: skip


def _bytes(value: float) -> str:
    return size(round(value)) if value else "0"


def _count(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")
