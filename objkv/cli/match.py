"""``objkv match``: which chunks of a prompt are stored, and how much of it would be served."""

from pathlib import Path
from typing import Annotated

import typer

from objkv.cli.command import FINE, Session, command
from objkv.cli.output import Output, age, size
from objkv.cli.prompts import find_identity, read_digest, read_prompt
from objkv.keys.prefix import PromptExtras
from objkv.ops.match import MatchReport, match_prompt


@command
def match(
    session: Session,
    tokens: Annotated[
        Path | None,
        typer.Option(help="Token ids: JSON list, or separated; - is stdin.", metavar="FILE"),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="The prompt, with --tokenizer.", metavar="TEXT")
    ] = None,
    text_file: Annotated[
        Path | None, typer.Option(help="The prompt's file, with --tokenizer.", metavar="FILE")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, or its folder.", metavar="PATH")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Or its beginning; by default the only one.", metavar="NS")
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="The request's cache_salt.", metavar="TEXT")
    ] = None,
    lora_digest: Annotated[
        str | None, typer.Option(help="Content digest of the adapter.", metavar="HEX")
    ] = None,
) -> int:
    """Say how much of a prompt is stored and would be served.

    Without --tokens, --text or --text-file, token ids are read from standard input.
    """
    prompt = read_prompt(tokens, text, text_file, tokenizer)
    extras = PromptExtras(lora_digest=read_digest(lora_digest), salt=cache_salt)
    with session.backends() as backends:
        identity = find_identity(backends, namespace)
        report = match_prompt(backends.index, identity, prompt, extras)
    if session.out.machine:
        session.out.document(report)
    else:
        _print(session.out, report)
    return FINE


def _print(out: Output, report: MatchReport) -> None:
    out.line(f"namespace {report.namespace}, model {report.model}")
    out.line()
    if report.chunks:
        columns = (">tokens", "hash", "stored", "served", ">bytes", ">age", ">hits", "payloads")
        out.table(
            columns,
            [
                (
                    f"{chunk.token_start}-{chunk.token_end}",
                    chunk.prefix_hash.hex(),
                    _stored(chunk.payloads, chunk.groups_missing),
                    "yes" if chunk.usable else "no",
                    size(chunk.nbytes) if chunk.payloads else "-",
                    age(chunk.created_s),
                    chunk.hits,
                    " ".join(chunk.payloads),
                )
                for chunk in report.chunks
            ],
        )
        out.line()
    rest = report.prompt_tokens - len(report.chunks) * report.chunk_tokens
    out.line(
        f"{report.usable_tokens:,} of {report.prompt_tokens:,} tokens would be served "
        f"({report.stored_chunks} of {len(report.chunks)} chunks of {report.chunk_tokens} tokens "
        f"are stored{f'; the last {rest} tokens fill no chunk' if rest else ''})"
    )


def _stored(payloads: tuple[str, ...], missing: tuple[int, ...]) -> str:
    if not payloads:
        return "no"
    return f"not group {', '.join(map(str, missing))}" if missing else "yes"
