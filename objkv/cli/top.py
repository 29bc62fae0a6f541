"""``objkv top``: a fleet, live."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from objkv.cli.command import FINE, FOUND, UNREACHABLE, Session, command
from objkv.cli.endings import ending_in_order
from objkv.cli.output import Output, plain
from objkv.cli.top_screen import (
    PREFIX_COLUMNS,
    REPLICA_COLUMNS,
    Showing,
    prefix_cells,
    prefix_heading,
    replica_cells,
    screen,
    summary_lines,
)
from objkv.errors import ConfigError
from objkv.ops.top.scrape import Source
from objkv.ops.top.watch import View, Watch

_DEFAULT: Final = "http://127.0.0.1:8000"
"""Where ``vllm serve`` listens unless told otherwise."""
_DEADLINE_MAX_S = 5.0
_POLL_S = 0.1
_ARROWS: Final = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}


@command
def top(
    session: Session,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help=f"A replica, again for each. Unset: {_DEFAULT}.", metavar="URL"),
    ] = None,
    endpoints: Annotated[
        Path | None, typer.Option(help="A file that names one on each line.", metavar="FILE")
    ] = None,
    exporter: Annotated[
        str | None, typer.Option(help="The objkv exporter, for what is stored.", metavar="URL")
    ] = None,
    no_index: Annotated[
        bool, typer.Option("--no-index", help="Do not look for hot prefixes in the index.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between looks.", metavar="S")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, print what happened between, and end.")
    ] = False,
) -> int:
    """Show what a fleet does now: hits, bytes, refusals, prefixes.

    Reads only. Keys: q ends it, p pauses, s sorts by something else, arrows scroll.
    """
    urls = _urls(endpoint, endpoints)
    config = session.config
    # A folder that is its own index would be walked whole for it.
    wants_index = not no_index and not config.index_url.startswith("bulk:") and session.has_bulk()
    once = once or session.out.machine or not sys.stdout.isatty()
    deadline_s = _DEADLINE_MAX_S if once else min(max(every, 1.0), _DEADLINE_MAX_S)
    with ExitStack() as stack:
        stack.enter_context(ending_in_order())
        backends = stack.enter_context(session.backends()) if wants_index else None
        sources = [Source(url, deadline_s=deadline_s) for url in urls]
        told = Source(exporter, deadline_s=deadline_s) if exporter else None
        watch = Watch(sources, told, backends.index if backends else None)
        if once:
            return _once(session.out, watch, every, look=wants_index)
        return _live(session.out, stack.enter_context(watch), every)


def _urls(given: list[str] | None, file: Path | None) -> list[str]:
    urls = list(given or ())
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{file}: {exc}") from exc
        urls += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not urls:
            raise ConfigError(f"{file}: names no endpoint")
    return list(dict.fromkeys(urls)) or [_DEFAULT]


def _once(out: Output, watch: Watch, every_s: float, *, look: bool) -> int:
    """Print the rates between two looks."""
    try:
        with out.waiting(f"looking for {every_s:g} s"):
            watch.tick()
            if look:
                watch.look_now()
            time.sleep(every_s)
            if look:
                watch.look_now()
            view = watch.tick()
    finally:
        watch.__exit__(None, None, None)
    down = sum(row.state == "down" for row in view.rows)
    if out.machine:
        hit_rate = view.total.hit_rate
        out.document({**plain(view), "hit_rate": hit_rate, "every_s": every_s})
    else:
        _print(out, view)
    if down == len(view.rows):
        return UNREACHABLE
    return FOUND if down or view.problems else FINE


def _print(out: Output, view: View) -> None:
    for line in summary_lines(view):
        out.line(line)
    out.line()
    out.table(REPLICA_COLUMNS, [replica_cells(row) for row in view.rows])
    if view.prefixes is not None and view.prefixes.prefixes:
        out.line()
        out.line(prefix_heading(view.prefixes), "bold")
        out.table(PREFIX_COLUMNS, [prefix_cells(prefix) for prefix in view.prefixes.prefixes])
    for problem in view.problems:
        out.line(problem, "yellow")


def _live(out: Output, watch: Watch, every_s: float) -> int:
    """Until somebody presses q."""
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
                # In a thread of its own, so that a replica that is down does not hold up the keys.
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
    """Standard input, told of each key at once; None where that is no terminal."""
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
    """The key that was pressed within a moment, or nothing."""
    if keys is None:
        time.sleep(_POLL_S)
        return ""
    ready, _, _ = select.select([keys], [], [], _POLL_S)
    if not ready:
        return ""
    text = os.read(keys, 8).decode(errors="replace")
    # The terminal is gone.
    return _ARROWS.get(text, text[:1]) if text else "q"
