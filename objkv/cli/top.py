"""``objkv top``: show live hit rates, traffic and errors of a fleet."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from objkv.cli.command import FINE, FOUND, UNREACHABLE, Session, command, ending_in_order
from objkv.cli.options import time_option
from objkv.cli.output import Printer, counted, plain, size
from objkv.cli.tables import HASH_DIGITS, shortened
from objkv.config.node import agent_socket
from objkv.config.schema import Config
from objkv.errors import ConfigError
from objkv.ops.formats import printable
from objkv.ops.top.nodes import NodeRow
from objkv.ops.top.rates import Flow, ReplicaRow
from objkv.ops.top.scrape import MetricsSource
from objkv.ops.top.watch import FleetWatch, View

SORTS: Final = ("name", "tokens", "hit rate", "loads", "refusals", "drops")
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 48
_SOURCES: Final = (
    ("computed", "computed_tokens", "grey50"),
    ("local", "local_tokens", "blue"),
    ("hot", "hot_tokens", "magenta"),
    ("bulk", "bulk_tokens", "green"),
)
_STATE_STYLES: Final = {"up": "green", "down": "bold red", "restarted": "yellow", "new": "dim"}
REPLICA_COLUMNS: Final = (
    "replica", "state", ">tokens/s", ">hit", ">local", ">loaded/s", ">saved/s",
    ">refused/s", ">missed/s", ">dropped/s", ">lookup", ">load", ">run", ">wait", "notes",
)  # fmt: skip
NODE_COLUMNS: Final = (
    "node", "state", ">arena", ">used", ">leased", ">clients", ">in memory", ">on disk",
    ">fetched/s", ">saved/s", ">no room/s", ">prefetched", ">read", ">unread", "notes",
)  # fmt: skip
_DROPPED_FIRST: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    REPLICA_COLUMNS: (">wait", ">run", ">load", ">lookup", ">local", ">saved/s", ">missed/s"),
    NODE_COLUMNS: (">clients", ">saved/s", ">on disk", ">arena", ">prefetched", ">read"),
}
"""Columns omitted on a narrow terminal, the least important first."""
_DROPPED_FOR_NOTES: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    REPLICA_COLUMNS: (
        ">dropped/s", ">loaded/s", ">hit", ">refused/s", ">tokens/s",
    ),
    NODE_COLUMNS: (">unread", ">fetched/s", ">leased", ">used", ">in memory", ">no room/s"),
}  # fmt: skip
"""Columns also omitted if the notes (such as why a replica is down) do not fit otherwise."""
_NOTES_MIN = 24
_HEADINGS = 8
"""Lines that are no replicas, besides the summary and problems."""


@dataclass(slots=True)
class Showing:
    """The view that the user has chosen by keys."""

    every_s: float
    paused: bool = False
    sort: str = "name"
    top: int = 0
    """Number of the first replica shown."""

    def key(self, pressed: str, rows: int) -> bool:
        """Handle a key. Return False if it ends the command."""
        if pressed in ("q", "Q", "\x03", "\x04"):
            return False
        if pressed in ("p", " "):
            self.paused = not self.paused
        elif pressed == "s":
            self.sort, self.top = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)], 0
        elif pressed in ("up", "k"):
            self.top = max(0, self.top - 1)
        elif pressed in ("down", "j"):
            self.top = min(max(0, rows - 1), self.top + 1)
        return True


def screen(
    view: View | None, showing: Showing, clock: str, size_cells: tuple[int, int]
) -> RenderableType:
    """Return the screen, cut to the terminal's size."""
    width, height = size_cells
    head = _head(view, showing, clock)
    if view is None:
        return Group(head, Text("reading metrics ...", style="dim"))
    above = len(summary_lines(view)) + len(view.problems)
    room = max(2, height - _HEADINGS - above)
    nodes = sorted(view.nodes, key=lambda row: row.state == "up")[: max(0, (room - 4) // 2)]
    room -= len(nodes) + 2 if nodes else 0
    rows = sort_rows(view.rows, showing.sort)
    replicas = rows[showing.top :][: max(1, min(len(rows), room))]
    parts: list[RenderableType] = [head, _summary(view, width), Text()]
    if rows:
        cells = [replica_cells(row) for row in replicas]
        parts.append(_fitted_table(REPLICA_COLUMNS, cells, width))
        if len(rows) > len(replicas):
            first = showing.top + 1
            last = showing.top + len(replicas)
            parts.append(Text(f"{first} to {last} of {len(rows)}", style="dim"))
        parts.append(Text())
    if nodes:
        cells = [node_cells(row) for row in nodes]
        parts += [_fitted_table(NODE_COLUMNS, cells, width), Text()]
    parts += [Text(printable(problem), style="yellow") for problem in view.problems]
    return Group(*parts)


def sort_rows(rows: Sequence[ReplicaRow], by: str) -> list[ReplicaRow]:
    """Sort by a measure, largest first; ``name`` keeps the given order."""
    measures: dict[str, Callable[[Flow], float]] = {
        "tokens": lambda flow: flow.tokens,
        "hit rate": lambda flow: flow.hit_rate or 0.0,
        "loads": lambda flow: flow.load_bytes,
        "refusals": lambda flow: flow.refusals,
        "drops": lambda flow: flow.drops,
    }
    measure = measures.get(by)
    return list(rows) if measure is None else sorted(rows, key=lambda row: -measure(row.flow))


def summary_lines(view: View) -> list[str]:
    """Return the fleet's totals as text without colours."""
    if not view.rows:  # only agents are watched
        down = sum(row.state == "down" for row in view.nodes)
        return [f"{counted(len(view.nodes), 'node agent')}, {down} down", *_stored_lines(view)]
    shares = ", ".join(f"{name} {share:.0%}" for name, share, _ in _shares(view.total))
    down = sum(row.state == "down" for row in view.rows)
    count = len(view.rows)
    total = view.total
    if count and down == count:  # zeros would look like measurements
        lines = [
            f"{count} {'replica' if count == 1 else 'replicas'}, {down} down; hit rate -; "
            "- prompt tokens/s",
            "loads -; saves -; refused -, missed -, dropped -",
            "no replica answers: is vllm serve running there? --endpoint URL names another",
        ]
        return lines + _stored_lines(view)
    lines = [
        f"{count} {'replica' if count == 1 else 'replicas'}, {down} down; hit rate "
        f"{_hit_rate(total)}; {total.tokens:,.0f} prompt tokens/s: {shares or 'none'}",
        f"loads {size(round(total.load_bytes))}/s; saves {size(round(total.save_bytes))}/s; "
        f"refused {total.refusals:.1f}/s, missed {total.misses:.1f}/s, "
        f"dropped {total.drops:.1f}/s",
    ]
    return lines + _stored_lines(view)


def _hit_rate(total: Flow) -> str:
    """Return the hit rate. If the replicas' own caches served most tokens, name the remaining share
    that it refers to, so that 0% does not look like a failure."""
    rate = percent(total.hit_rate)
    if total.hit_rate is None or 2 * total.local_tokens < total.tokens:
        return rate
    return f"{rate} of the {total.asked_tokens / total.tokens:.0%} that was not in GPU memory"


def _stored_lines(view: View) -> list[str]:
    """The lines with the exporter's or the index's values."""
    lines = []
    if view.stored is not None:
        stored = view.stored
        lines.append(
            f"stored {size(round(stored.nbytes))} in {stored.payloads:,.0f} payloads of "
            f"{stored.namespaces:,.0f} {'namespace' if stored.namespaces == 1 else 'namespaces'} "
            f"(from the {stored.told_by})"
        )
    if view.ends:
        states = ", ".join(f"{end} {'up' if up else 'DOWN'}" for end, up in view.ends)
        lines.append(f"backends: {printable(states)}")
    return lines


def replica_cells(row: ReplicaRow) -> list[str]:
    """One replica's row as text."""
    if row.state in ("down", "no objkv"):
        return [row.name, row.state, *[""] * 12, row.problem or ""]
    flow, known = row.flow, row.state != "new"
    return [
        row.name,
        row.state,
        f"{flow.tokens:,.0f}" if known else "",
        percent(flow.hit_rate) if known else "",
        percent(flow.local_tokens / flow.tokens if flow.tokens else None) if known else "",
        _bytes(flow.load_bytes) if known else "",
        _bytes(flow.save_bytes) if known else "",
        _count(flow.refusals) if known else "",
        _count(flow.misses) if known else "",
        _count(flow.drops) if known else "",
        _millis(flow.lookup_ms),
        _millis(flow.load_ms),
        f"{flow.running:.0f}",
        f"{flow.waiting:.0f}",
        "operator's order" if row.switched else "",
    ]


def node_cells(row: NodeRow) -> list[str]:
    """One node agent's row as text."""
    if row.state in ("down", "no agent"):
        return [row.name, row.state, *[""] * 12, row.problem or ""]
    known = row.state != "new"
    asked = row.hits + row.fills
    opened = [f"circuit open: {name.replace('_', ' ')}" for name in row.breakers_open]
    return [
        row.name,
        row.state,
        size(round(row.arena_bytes)),
        percent(row.used_share),
        percent(row.leased_bytes / row.arena_bytes if row.arena_bytes else None),
        f"{row.clients:.0f}",
        percent(row.hit_rate) if known else "",
        percent(row.disk_hits / asked) if known and asked else "",
        _bytes(row.load_bytes) if known else "",
        _bytes(row.save_bytes) if known else "",
        _count(row.no_room) if known else "",
        f"{row.prefetches:,.0f}",
        f"{row.prefetch_used:,.0f}",
        f"{row.prefetch_unused:,.0f}",
        ", ".join([*opened, *map(str, row.puts)]),
    ]


def percent(share: float | None) -> str:
    """``93%``; a dash for None."""
    return "-" if share is None else f"{share:.0%}"


def _head(view: View | None, showing: Showing, clock: str) -> Text:
    paused = "  PAUSED" if showing.paused else ""
    text = Text()
    text.append("objkv top", style="bold")
    text.append(f"  {clock}  every {showing.every_s:g} s  sorted by {showing.sort}{paused}")
    text.append("    q quit  p pause  s sort  ↑↓ scroll", style="dim")
    return text


def _summary(view: View, width: int) -> RenderableType:
    lines = summary_lines(view)
    text = Text(f"{lines[0].partition(': ')[0]}  ")
    text.append(_sparkline(view.hit_rates), style="green")
    text.append("\n")
    cells_max = left = min(_BAR_CELLS, width // 4)
    shares = _shares(view.total)
    for number, (_, share, style) in enumerate(shares):
        cells = left if number == len(shares) - 1 else min(left, round(share * cells_max))
        left -= cells
        text.append("█" * cells, style=style)
    for name, share, style in shares:
        text.append("  ■ ", style=style)
        text.append(f"{name} {share:.0%}")
    if not shares:
        text.append("no prompts", style="dim")
    for line in lines[1:]:
        text.append(f"\n{line}")
    return text


def _shares(total: Flow) -> list[tuple[str, float, str]]:
    """The sources of the prompt tokens' KV: name, share, colour."""
    if total.tokens <= 0:
        return []
    return [(name, getattr(total, field) / total.tokens, style) for name, field, style in _SOURCES]


def _sparkline(values: Sequence[float | None]) -> str:
    top = len(_SPARKS) - 1
    return "".join(
        " " if value is None else _SPARKS[min(top, int(value * top + 0.5))] for value in values
    )


def _fitted_table(names: tuple[str, ...], rows: Sequence[Sequence[str]], width: int) -> Table:
    """Return a table of the columns that fit; the notes get the remaining width."""
    columns = list(names)
    cells = [dict(zip(names, row, strict=True)) for row in rows]

    def widest(name: str) -> int:
        return max(len(name.removeprefix(">")), *(len(row[name]) for row in cells))

    for name in _DROPPED_FIRST[names]:
        if sum(widest(column) + 2 for column in columns[:-1]) + _NOTES_MIN <= width:
            break
        columns.remove(name)
    notes = min(_NOTES_MIN, widest("notes"))
    for name in _DROPPED_FOR_NOTES[names]:
        if sum(widest(column) + 2 for column in columns[:-1]) + notes <= width:
            break
        columns.remove(name)
    table = _table(columns, [[row[name] for name in columns] for row in cells])
    for number, name in enumerate(columns[:-1]):
        table.columns[number].min_width = widest(name)
    return table


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        right = name.startswith(">")
        table.add_column(
            name.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        cells = [Text(printable(shortened(cell, HASH_DIGITS))) for cell in row]
        if columns[0] in ("replica", "node"):
            cells[1].stylize(_STATE_STYLES.get(row[1], "yellow"))
            cells[-1].stylize("yellow")
        table.add_row(*cells)
    return table


def _bytes(per_s: float) -> str:
    return size(round(per_s)) if per_s else "0"


def _count(per_s: float) -> str:
    return f"{per_s:.1f}" if per_s else "0"


def _millis(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f} ms"


_DEFAULT: Final = "http://127.0.0.1:8000"
"""The default address of ``vllm serve``."""
_DEADLINE_MAX_S = 5.0
_POLL_S = 0.1
_ARROWS: Final = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}


@command
def top(
    session: Session,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help=f"A replica; repeatable (default: {_DEFAULT}).", metavar="URL"),
    ] = None,
    endpoints: Annotated[
        Path | None, typer.Option(help="A file with one replica URL on each line.", metavar="FILE")
    ] = None,
    exporter: Annotated[
        str | None, typer.Option(help="An objkv exporter, for stored totals.", metavar="URL")
    ] = None,
    agent: Annotated[
        list[Path] | None,
        typer.Option(
            help="Socket of a node agent; repeatable (default: that of OBJKV_AGENT). Without "
            "--endpoint, no replica is watched.",
            metavar="PATH",
        ),
    ] = None,
    no_index: Annotated[
        bool, typer.Option("--no-index", help="Do not read stored totals from the index.")
    ] = False,
    every: Annotated[
        float, time_option("Time between updates", "--every", least=0.2, most=3600, shown="2s")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Measure one interval, print it and exit.")
    ] = False,
) -> int:
    """Show live hit rates, traffic and errors of a fleet.

    Read-only. Keys: q quits, p pauses, s changes the sort order, arrows scroll.
    """
    urls = _urls(endpoint, endpoints) or ([] if agent else [_DEFAULT])
    config = session.config
    # A folder that is its own index would have to be walked in full.
    wants_index = not no_index and not config.index_url.startswith("bulk:") and session.has_bulk()
    once = once or session.out.machine or not sys.stdout.isatty()
    deadline_s = _DEADLINE_MAX_S if once else min(max(every, 1.0), _DEADLINE_MAX_S)
    with ExitStack() as stack:
        stack.enter_context(ending_in_order())
        backends = stack.enter_context(session.backends()) if wants_index else None
        sources = [MetricsSource(url, deadline_s=deadline_s) for url in urls]
        told = MetricsSource(exporter, deadline_s=deadline_s) if exporter else None
        agents = [_agent_source(path, deadline_s) for path in _agents(agent, config)]
        watch = FleetWatch(sources, told, backends.index if backends else None, agents=agents)
        if once:
            return _once(session.out, watch, every, look=wants_index)
        return _live(session.out, stack.enter_context(watch), every)


def _urls(given: list[str] | None, file: Path | None) -> list[str]:
    urls = list(given or ())
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{file}: {exc}") from exc
        urls += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not urls:
            raise ConfigError(f"{file}: contains no endpoint URL")
    return list(dict.fromkeys(urls))


def _agents(given: list[Path] | None, config: Config) -> list[Path]:
    """Return the sockets of the agents to show."""
    if given:
        return list(dict.fromkeys(given))
    path = agent_socket(config)
    # Another user's replicas, or none, may have started agents on this machine.
    is_shown = path is not None and (config.agent != "auto" or path.exists())
    return [path] if path is not None and is_shown else []


def _agent_source(path: Path, deadline_s: float) -> MetricsSource:
    return MetricsSource("http://agent", deadline_s=deadline_s, socket=Path(f"{path}.http"))


def _once(out: Printer, watch: FleetWatch, every_s: float, *, look: bool) -> int:
    """Print the rates of one interval."""
    try:
        with out.waiting(f"measuring for {every_s:g} s"):
            watch.tick()
            if look:
                watch.look_now()
            time.sleep(every_s)
            view = watch.tick()
    finally:
        watch.__exit__(None, None, None)
    down = sum(row.state == "down" for row in view.rows)
    is_node_down = any(row.state == "down" for row in view.nodes)
    if out.machine:
        hit_rate = view.total.hit_rate
        out.document({**plain(view), "hit_rate": hit_rate, "every_s": every_s})
    else:
        _print(out, view)
    watched = view.rows or view.nodes
    if all(row.state == "down" for row in watched):
        return UNREACHABLE
    return FOUND if down or is_node_down or view.problems else FINE


def _print(out: Printer, view: View) -> None:
    for line in summary_lines(view):
        out.line(line)
    out.line()
    if view.rows:
        out.table(*_notes_third(REPLICA_COLUMNS, [replica_cells(row) for row in view.rows]))
    if view.nodes:
        if view.rows:
            out.line()
        out.table(*_notes_third(NODE_COLUMNS, [node_cells(row) for row in view.nodes]))
    for problem in view.problems:
        out.line(problem, "yellow")


def _notes_third(
    names: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Move the notes forward: why a replica or node is down stays on a narrow terminal."""
    columns = [*names[:2], f"~{names[-1]}", *names[2:-1]]
    return columns, [[*row[:2], row[-1], *row[2:-1]] for row in rows]


def _live(out: Printer, watch: FleetWatch, every_s: float) -> int:
    """Update the screen until the user presses q."""
    console = Console(no_color=None if out.color else True)
    showing, view = Showing(every_s), None
    due = 0.0
    with (
        ThreadPoolExecutor(1, thread_name_prefix="objkv-top-tick") as ticker,
        _keys() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        asked: Future[View] | None = None
        try:
            while True:
                now = time.monotonic()
                # On a separate thread, so that a slow replica does not delay the keys.
                if asked is None and not showing.paused and now >= due:
                    asked, due = ticker.submit(watch.tick), now + every_s
                if asked is not None and asked.done():
                    view, asked = asked.result(), None
                clock = time.strftime("%H:%M:%S")
                live.update(screen(view, showing, clock, console.size), refresh=True)
                pressed = _pressed(keys)
                if pressed and not showing.key(pressed, len(view.rows) if view else 0):
                    return FINE
        except KeyboardInterrupt:
            return FINE


@contextmanager
def _keys() -> Iterator[int | None]:
    """Standard input delivering each key at once; None if it is not a terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    number = sys.stdin.fileno()
    old = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, old)


def _pressed(keys: int | None) -> str:
    """Return the key pressed within ``_POLL_S``, or an empty string."""
    if keys is None:
        time.sleep(_POLL_S)
        return ""
    poll = select.poll()
    poll.register(keys, select.POLLIN)
    if not poll.poll(1000 * _POLL_S):
        return ""
    text = os.read(keys, 8).decode(errors="replace")
    return _ARROWS.get(text, text[:1]) if text else "q"  # end of input: the terminal has closed
