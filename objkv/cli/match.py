"""``objkv match``: how much of a prompt is stored and would be served."""

from typing import TYPE_CHECKING, Annotated

import typer

from objkv.cli.command import FINE, Session, command
from objkv.cli.output import Printer, counted, plain
from objkv.cli.prompts import PromptOptions
from objkv.cli.upkeep import seal_of
from objkv.errors import ObjkvError
from objkv.ops.explain import Explanation, Question, explain_match, found_chunks, switched_off
from objkv.ops.formats import age, size
from objkv.ops.listing import find_identity
from objkv.ops.match import MatchReport, match_prompt

if TYPE_CHECKING:
    from objkv.agent.prefetch import Matched

_AGENT_S = 5.0


@command
def match(
    session: Session,
    prompt: PromptOptions,
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain why the match ends where it does.")
    ] = False,
) -> int:
    """Show how much of a prompt is stored and would be served.

    Without --tokens, --text or --text-file, token ids are read from standard input.
    """
    tokens, extras = prompt.read()
    with session.backends() as backends:
        identity = find_identity(backends.bulk, backends.index, prompt.namespace)
        report = match_prompt(backends.index, identity, tokens, extras)
        agent = _ask_agent(session, report)
        question = Question(
            bulk=backends.bulk,
            index=backends.index,
            identity=identity,
            tokens=tokens,
            extras=extras,
            report=report,
            seal=seal_of(session, backends, report.namespace) if explain else None,
            ttl_s=session.config.ttl_s,
            agent=agent,
        )
        with session.out.waiting("explaining the match" if explain else "reading orders"):
            why = explain_match(question) if explain else switched_off(question)
    memory = None if isinstance(agent, str) else agent
    if session.out.machine:
        more = {"explanation": plain(why)} if why else {}
        if memory is not None:
            more["memory"] = plain(memory)
        session.out.document({**plain(report), **more})
        return FINE
    found = found_chunks(report, memory) * report.chunk_tokens
    has_hits = not session.config.index_url.startswith("bulk:")
    _print(session.out, report, found if why is None else why.served_tokens, has_hits=has_hits)
    if memory is not None:
        session.out.line(
            f"{memory.resident_payloads:,} of {counted(memory.payloads, 'payload')} are in this "
            f"node's memory, {size(memory.resident_bytes)}"
        )
    elif isinstance(agent, str):
        session.out.line(agent, "yellow")
    if explain and why is not None:
        _print_reason(session.out, why, report)
    elif why is not None:
        session.out.line(why.sentence, "yellow")
    return FINE


def _ask_agent(session: Session, report: MatchReport) -> "Matched | str | None":
    """Return what the node's agent has of the prompt; why one that the settings name does not
    answer; None without an agent."""
    from objkv.config.node import agent_socket, http_path
    from objkv.ops.agent_api import AgentApi, AskedPrompt  # late: `--help` must start at once

    prompt = AskedPrompt(report.namespace, hashes=[one.prefix_hash for one in report.chunks])
    try:
        where = agent_socket(session.config)
        if where is None or not report.chunks:
            return None
        return AgentApi(http_path(where), answer_s=_AGENT_S).match(prompt)
    except ObjkvError as exc:
        return str(exc) if session.config.agent.startswith("unix:") else None


def _print_reason(out: Printer, why: Explanation, report: MatchReport) -> None:
    out.line()
    if why.chunk is None:
        out.line(f"why: {why.sentence}", "bold")
    else:
        chunk = report.chunks[why.chunk]
        where = f"chunk {why.chunk + 1}, tokens {chunk.token_start:,}-{chunk.token_end:,}"
        out.line(f"why: the match ends at {where}: {why.sentence}", "bold")
    for text in why.evidence:
        out.line(f"  found: {text}")
    for text in why.advice:
        out.line(f"  to do: {text}")
    for text in why.unknown:
        out.line(f"  unknown: {text}")


def _print(out: Printer, report: MatchReport, served_tokens: int, *, has_hits: bool) -> None:
    """Print all chunks, and that the first ``served_tokens`` tokens would be served.
    ``has_hits``: whether the index counts hits."""
    out.line(f"namespace {report.namespace}, model {report.model}")
    out.line()
    if report.chunks:
        columns = (">tokens", "hash", "recorded", "served", ">bytes", ">hits", ">age", "payloads")
        rows = [
            (f"{chunk.token_start:,}-{chunk.token_end:,}", chunk.prefix_hash.hex(),
             _stored(chunk.payloads, chunk.groups_missing),
             "yes" if chunk.token_end <= served_tokens else "no",
             size(chunk.nbytes) if chunk.payloads else "-", chunk.hits if has_hits else None,
             age(chunk.created_s), " ".join(chunk.payloads))
            for chunk in report.chunks
        ]  # fmt: skip
        out.table(columns, rows)
        out.line()
    parts = [_chunks_text(report)]
    if rest := report.prompt_tokens - len(report.chunks) * report.chunk_tokens:
        parts.append(f"the last {counted(rest, 'token does', 'tokens do')} not fill a chunk")
    out.line(
        f"{served_tokens:,} of {counted(report.prompt_tokens, 'token')} would be served "
        f"({'; '.join(parts)})"
    )


def _chunks_text(report: MatchReport) -> str:
    if not report.chunks:
        return f"a chunk is {report.chunk_tokens:,} tokens"
    verb = "has" if len(report.chunks) == 1 else "have"
    parts = sum(bool(chunk.payloads and chunk.groups_missing) for chunk in report.chunks)
    only = f", {parts:,} of them incomplete" if parts else ""
    return (
        f"{report.stored_chunks:,} of {counted(len(report.chunks), 'chunk')} of "
        f"{report.chunk_tokens:,} tokens {verb} a record{only}"
    )


def _stored(payloads: tuple[str, ...], missing: tuple[int, ...]) -> str:
    if not payloads:
        return "no"
    return f"not group {', '.join(map(str, missing))}" if missing else "yes"
