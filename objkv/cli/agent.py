"""``objkv agent``: run the node agent."""

import logging
import math
import sys
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from threading import Lock
from time import monotonic
from typing import Annotated

import typer

from objkv.assembly.agent import NodeAgent
from objkv.cli.command import FINE, Session, command, end_signals
from objkv.cli.options import socket_option, time_option
from objkv.config.node import agent_socket
from objkv.errors import ConfigError
from objkv.telemetry import MemoryRecorder

_LINES_MAX = 20
_WITHIN_S = 60.0


class LogLimit(logging.Filter):
    """Drops lines that one place in the code has logged too often lately: others may cause them
    at will."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}
        """Begin of the time and number of lines, by place."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a line. Adds to it how many were dropped before."""
        place, now, dropped = (record.pathname, record.lineno), monotonic(), 0
        with self._lock:
            began, count = self._seen.get(place, (-math.inf, 0))
            if now - began >= _WITHIN_S:
                dropped, began, count = max(0, count - _LINES_MAX), now, 0
            self._seen[place] = began, count + 1
        if dropped:
            record.msg, record.args = f"{record.getMessage()} (and {dropped} more before)", None
        return count < _LINES_MAX


@command
def agent(
    session: Session,
    path: Annotated[
        Path | None, socket_option("Socket to serve. Default: that of OBJKV_AGENT.", "--socket")
    ] = None,
    idle_exit: Annotated[
        float | None, time_option("Exit after this time without clients", "--idle-exit", least=1)
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the agent that serves the socket.")
    ] = False,
) -> int:
    """Run the node agent, which loads and saves for all replicas of a machine.

    Replicas read payloads from its shared memory. It runs until SIGTERM or Ctrl-C, and then
    completes the saves that it has begun.
    """
    where = path or agent_socket(session.config)
    if where is None:
        raise ConfigError("no socket to serve: give --socket PATH, or set OBJKV_AGENT")
    where = where.absolute()  # as OBJKV_AGENT needs it
    log = logging.StreamHandler()
    log.addFilter(LogLimit())
    form = "%(asctime)s %(levelname)s objkv: %(message)s"
    logging.basicConfig(format=form, handlers=[log])
    logging.getLogger("objkv").setLevel(logging.INFO)  # of libraries, warnings alone
    limit = getrlimit(RLIMIT_NOFILE)[1]
    setrlimit(RLIMIT_NOFILE, (limit, limit))  # each replica takes several
    with (
        end_signals() as ended,
        NodeAgent(session.config, where, MemoryRecorder(), replace=replace) as running,
    ):
        if not session.out.document({"socket": str(where), "arena_bytes": running.arena.nbytes}):
            session.out.line(f"serving {where}")
        sys.stdout.flush()
        running.run(ended.wait, idle_s=idle_exit)
    return FINE
