"""``objkv agent``: run the node agent."""

import logging
import sys
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from typing import Annotated

import typer

from objkv.assembly.agent import NodeAgent
from objkv.cli.command import FINE, Session, command
from objkv.cli.options import time_option
from objkv.cli.signals import end_signals
from objkv.config.node import agent_socket
from objkv.errors import ConfigError
from objkv.telemetry import LogLimit, MemoryRecorder


@command
def agent(
    session: Session,
    path: Annotated[
        Path | None,
        typer.Option(
            "--socket", help="Socket to serve. Default: that of OBJKV_AGENT.", metavar="PATH"
        ),
    ] = None,
    idle_exit: Annotated[
        float | None,
        time_option("Exit after this time without clients", "--idle-exit", least=1),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace the agent that serves the socket."),
    ] = False,
) -> int:
    """Run the node agent, which loads and saves for all replicas of a machine.

    Replicas read payloads from its shared memory. It runs until SIGTERM or Ctrl-C, and then
    completes the saves that it has begun.
    """
    where = path or agent_socket(session.config)
    if where is None:
        raise ConfigError("no socket to serve: give --socket PATH, or set OBJKV_AGENT")
    log = logging.StreamHandler()
    log.addFilter(LogLimit())
    form = "%(asctime)s %(levelname)s objkv: %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, handlers=[log])
    limit = getrlimit(RLIMIT_NOFILE)[1]
    setrlimit(RLIMIT_NOFILE, (limit, limit))  # each replica takes several
    with (
        end_signals() as ended,
        NodeAgent(session.config, where, MemoryRecorder(), replace=replace) as running,
    ):
        if session.out.machine:
            session.out.document({"socket": str(where), "arena_bytes": running.arena.nbytes})
        else:
            session.out.line(f"serving {where}")
        sys.stdout.flush()
        running.run(ended.wait, idle_s=idle_exit)
    return FINE
