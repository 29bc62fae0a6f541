"""``objkv match``: which chunks of a prompt are stored, and how much of it would be served."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from objkv.assembly.backends import Backends
from objkv.cli.command import FINE, Session, command
from objkv.cli.output import Output, age, size
from objkv.errors import ConfigError
from objkv.keys.identity import NAMESPACE_HEX, Identity
from objkv.keys.prefix import PromptExtras
from objkv.ops.identities import pick_namespace, read_identity
from objkv.ops.match import MatchReport, match_prompt
from objkv.ops.prompt import parse_tokens, tokenize


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
    if [tokens, text, text_file].count(None) < 2:
        raise ConfigError("give only one of --tokens, --text and --text-file")
    if (text is None and text_file is None) != (tokenizer is None):
        raise ConfigError("--text and --text-file need --tokenizer, and nothing else does")
    if tokenizer is not None:
        prompt = tokenize(_read(text_file) if text is None else text, tokenizer)
    else:
        prompt = parse_tokens(_read(tokens))
    if not prompt:
        raise ConfigError("the prompt is empty: it has no token ids")
    extras = PromptExtras(lora_digest=_digest(lora_digest), salt=cache_salt)
    with session.backends() as backends:
        identity = _identity(backends, namespace)
        report = match_prompt(backends.index, identity, prompt, extras)
    if session.out.machine:
        session.out.document(report)
    else:
        _print(session.out, report)
    return FINE


def _read(path: Path | None) -> str:
    if path is None or str(path) == "-":
        if sys.stdin.isatty():
            raise ConfigError("no prompt: give --tokens FILE, or pipe token ids to stdin")
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: not UTF-8 text") from exc


def _digest(text: str | None) -> bytes | None:
    try:
        return None if text is None else bytes.fromhex(text)
    except ValueError as exc:
        raise ConfigError(f"--lora-digest {text!r}: not hex digits") from exc


def _identity(backends: Backends, namespace: str | None) -> Identity:
    complete = namespace is not None and len(namespace) == NAMESPACE_HEX
    name = pick_namespace(() if complete else backends.index.namespaces(), namespace)
    identity = read_identity(backends.bulk, name)
    if identity is None:
        raise ConfigError(
            f"the bulk store has no {name}/identity.json: no replica has saved there, or bulk_url "
            "and index_url do not belong together"
        )
    return identity


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
