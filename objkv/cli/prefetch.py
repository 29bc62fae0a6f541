"""``objkv prefetch``: fetch a stored prompt into this node's memory, ahead of its request."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from objkv.agent.messages import PREFETCH_S_MAX
from objkv.agent.prefetch import NamespaceFacts, Prefetched
from objkv.cli.command import FINE, FOUND, Session, command, ending_in_order
from objkv.cli.options import socket_option, time_option
from objkv.cli.output import Printer, counted
from objkv.cli.prompts import PromptOptions
from objkv.config.node import agent_socket, http_path
from objkv.errors import ConfigError, UnclearName
from objkv.keys.identity import NAMESPACE_HEX
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.ops.agent_api import AgentApi, AskedPrompt
from objkv.ops.formats import size
from objkv.ops.listing import namespaces_called

_POLL_S, _POLL_MAX_S = 0.02, 0.5
_GRACE_S = 5.0
"""A payload ends at its deadline. Its end may be seen later."""


@dataclass(frozen=True, slots=True)
class PrefetchReport(Prefetched):
    """The outcome of ``objkv prefetch``."""

    namespace: str
    prompt_tokens: int
    waited: bool
    arrived: int
    """Payloads in memory at the end. With ``--no-wait``: at its start."""
    arrived_bytes: int
    seconds: float


@command
def prefetch(
    session: Session,
    prompt: PromptOptions,
    path: Annotated[
        Path | None, socket_option("Socket of the agent. Default: that of OBJKV_AGENT.", "--socket")
    ] = None,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return at once, without waiting for the payloads.")
    ] = False,
    deadline_s: Annotated[
        float,
        time_option(
            "Give up payloads that arrive later",
            "--deadline",
            least=0.001,
            most=PREFETCH_S_MAX,
            shown="60s",
        ),
    ] = 60.0,
) -> int:
    """Fetch a stored prompt into this node's memory.

    The node agent reads it ahead of its request, once for all replicas of the node. Without
    --tokens, --text or --text-file, token ids are read from standard input.
    """
    where = path or agent_socket(session.config)
    if where is None:
        raise ConfigError("no agent: give --socket PATH, or set OBJKV_AGENT")
    api = AgentApi(http_path(where))
    asked = _asked(api, prompt.namespace, *prompt.read())
    with ending_in_order(), session.out.steps("fetching MiB") as on_progress:
        try:
            report = fetch(api, asked, deadline_s, wait=not no_wait, on_progress=on_progress)
        except KeyboardInterrupt:
            session.out.note("the agent continues to fetch these payloads")
            raise
    if not session.out.document(report):
        _print(session.out, report)
    is_whole = report.arrived == report.started + report.resident or no_wait
    return FINE if report.stored and is_whole and not report.refused else FOUND


def fetch(
    api: AgentApi,
    prompt: AskedPrompt,
    deadline_s: float,
    *,
    wait: bool,
    on_progress: Callable[[int, int | None], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> PrefetchReport:
    """Prefetch a prompt, and wait for its payloads until shortly after the deadline.
    ``on_progress`` takes the MiB that have arrived and those to expect."""
    began = clock()
    answer = api.prefetch(prompt, deadline_s)
    expected = answer.resident_bytes + answer.started_bytes
    arrived, nbytes, pause = answer.resident, answer.resident_bytes, _POLL_S
    while wait and answer.chunks:
        found = api.match(prompt)
        arrived, nbytes = found.resident_payloads, found.resident_bytes
        on_progress(nbytes >> 20, expected >> 20)
        if not found.loading_payloads or clock() - began > deadline_s + _GRACE_S:
            break
        sleep(pause)
        pause = min(_POLL_MAX_S, 1.5 * pause)
    return PrefetchReport(
        **asdict(answer),
        namespace=prompt.namespace,
        prompt_tokens=len(prompt.tokens),
        waited=wait,
        arrived=arrived,
        arrived_bytes=nbytes,
        seconds=round(clock() - began, 3),
    )


def _print(out: Printer, report: PrefetchReport) -> None:
    if not report.stored:
        short = f"the prompt is shorter than a chunk: {counted(report.prompt_tokens, 'token')}"
        out.line("no chunk of this prompt is stored" if report.chunks else short)
        return
    out.line(
        f"{report.stored:,} of {counted(report.chunks, 'chunk has', 'chunks have')} a record: "
        f"{counted(report.started, 'payload')} to fetch, {size(report.started_bytes)}; "
        f"{report.resident:,} in memory before, {size(report.resident_bytes)}"
    )
    if report.waited:
        out.line(
            f"{counted(report.arrived, 'payload')} in memory, {size(report.arrived_bytes)}, "
            f"after {report.seconds:.1f} s"
        )
        lost = report.started + report.resident - report.arrived
        if lost > 0:
            what = counted(lost, "payload has", "payloads have")
            out.line(f"{what} not arrived: the agent's log has the reason", "yellow")
    if report.refused:
        out.line(
            f"{counted(report.refused, 'payload was', 'payloads were')} refused, "
            f"{size(report.refused_bytes)}: beyond the quarter of the arena that may hold what "
            "nothing has read",
            "yellow",
        )


def _asked(
    api: AgentApi, wanted: str | None, ids: Sequence[int], extras: PromptExtras
) -> AskedPrompt:
    """Return the prompt in the namespace called ``wanted``, with its hashes if possible: they are
    sent again and again. Raises ``UnclearName``."""
    known = api.namespaces()
    if wanted and len(wanted) == NAMESPACE_HEX and not wanted.strip("0123456789abcdef"):
        found = next((one for one in known if one.namespace == wanted), None)
        if found is None:  # the agent lists no more than 64
            return AskedPrompt(wanted, ids, extras)
    else:
        found = _find(known, wanted)
    hashes = prefix_hashes(found.namespace, ids, found.chunk_tokens, extras)
    return AskedPrompt(found.namespace, ids, extras, hashes)


def _find(known: Sequence[NamespaceFacts], wanted: str | None) -> NamespaceFacts:
    if not known:
        raise UnclearName("the agent's index has no namespace with chunks")
    found, what = list(known), "namespaces"
    if wanted is not None:
        names = namespaces_called([(one.namespace, one.model, one.tenant) for one in known], wanted)
        found, what = [one for one in known if one.namespace in names], f"namespaces match {wanted}"
    if len(found) == 1:
        return found[0]
    choices = [f"{one.namespace}  {one.model}  tenant {one.tenant}" for one in found or known]
    said = f"{len(found)} {what}; choose one"
    raise UnclearName(said if found else f"no namespace matches {wanted}; choose one of", choices)
