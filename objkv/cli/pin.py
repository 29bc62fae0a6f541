"""``objkv pin`` and ``objkv unpin``: prefixes protected from expiry and eviction."""

import re
import time
from typing import Annotated

import typer

from objkv.assembly.backends import Backends
from objkv.cache.pins import AUTHOR_CHARS_MAX, is_author
from objkv.cli.command import FINE, FOUND, Session, command, require_role
from objkv.cli.options import Namespace, this_user, time_option
from objkv.cli.output import counted
from objkv.cli.prompts import PromptOptions
from objkv.errors import ConfigError, NotStored
from objkv.index.base import Record
from objkv.index.guarded import for_operators
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.ops.backends_view import stored_namespaces
from objkv.ops.formats import moment, size
from objkv.ops.listing import find_identity, find_namespace
from objkv.ops.pin import Pinner, chain_of, list_pins, served_prefix
from objkv.ops.show import choose_chunk, find_payloads

_LASTS_S_MAX = 10**15
"""Longest pin, 30 million years: indexes store 64-bit times."""
_HASH = re.compile(f"[0-9a-f]{{1,{2 * PREFIX_HASH_BYTES}}}")


@command
def pin(
    session: Session,
    prompt: PromptOptions,
    leaf: Annotated[
        str | None,
        typer.Argument(
            help="Hash of the prefix's last chunk (column leaf of objkv ls), or its first digits.",
            metavar="HASH",
        ),
    ] = None,
    for_: Annotated[
        float, time_option("Duration of the pin", "--for", least=1, most=_LASTS_S_MAX, shown="7d")
    ] = 604_800.0,
    by: Annotated[
        str | None,
        typer.Option(
            help="Who pins it, for audits.", metavar="NAME", show_default="USER@HOST, of this shell"
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the pinned prefixes.")] = False,
) -> int:
    """Protect a stored prefix from eviction until a date.

    Without HASH, --tokens, --text or --text-file, token ids are read from standard input.
    """
    namespace = prompt.namespace
    if list_:
        if leaf is not None or prompt.is_given:
            raise ConfigError("--list takes no HASH and no prompt, only --namespace")
        return _list(session, namespace)
    if leaf is not None and prompt.is_given:
        raise ConfigError("give either HASH or a prompt")
    author = _author(by)
    ids, extras = ([], prompt.extras()) if leaf is not None else prompt.read()
    require_role(session, "pin")
    with session.backends() as backends:
        if leaf is not None:
            name, last = _chunk(backends, namespace, leaf)
            chain = _chain(backends, name, last)
        else:
            identity = find_identity(backends.bulk, backends.index, namespace)
            name = identity.namespace()
            chain = served_prefix(backends.index, identity, ids, extras)
        if not chain:
            raise NotStored(
                "no chunk of this prompt would be served; send it to a replica first, or see why "
                "with objkv match --explain"
            )
        until_s = int(time.time() + for_)
        done = _pinner(session, backends).pin(name, chain, until_s=until_s, by=author)
    if not session.out.document(done):
        session.out.line(
            f"pinned {done.tokens:,} tokens, {counted(done.chunks, 'chunk')}, "
            f"{size(done.nbytes)}, until {moment(done.until_s)}: {name[:8]} {done.leaf}"
        )
        if done.missing:
            session.out.line(
                f"{counted(done.missing, 'chunk was', 'chunks were')} deleted meanwhile; pin again "
                "after the prefix is saved"
            )
    return FOUND if done.missing else FINE


@command
def unpin(
    session: Session,
    leaf: Annotated[
        str,
        typer.Argument(
            help="Leaf in objkv pin --list, given whole or by its first digits.", metavar="HASH"
        ),
    ],
    namespace: Namespace = None,
) -> int:
    """Remove a pin; normal expiry applies again."""
    require_role(session, "unpin")
    with session.backends() as backends:
        name, whole = _pinned_leaf(backends, namespace, leaf)
        done = _pinner(session, backends).unpin(name, whole)
    if done is None:
        raise ConfigError(f"{whole.hex()} is not pinned; objkv pin --list shows the pins")
    if not session.out.document(done):
        session.out.line(
            f"unpinned {done.tokens:,} tokens, {counted(done.chunks, 'chunk')}: {whole.hex()}"
        )
    return FINE


def _list(session: Session, namespace: str | None) -> int:
    out = session.out
    with session.backends() as backends:
        names = _namespaces(backends, namespace)
        found = list_pins(backends.bulk, backends.index, names, now_s=time.time())
    code = FOUND if found.problems else FINE
    if out.document(found):
        return code
    rows = []
    for pin in found.pins:
        lost = f"{counted(pin.missing, 'chunk has', 'chunks have')} no record" * bool(pin.missing)
        ends, nbytes = moment(pin.until_s), size(pin.nbytes)
        row = (pin.namespace, pin.leaf, ends, pin.tokens, nbytes, pin.by, lost, pin.chunks)
        rows.append(row)
    columns = ("namespace", "leaf", ">until", ">tokens", ">bytes", "by", "~notes", ">chunks")
    if rows:
        out.table(columns, rows)
    else:
        out.line("nothing is pinned")
    for problem in found.problems:
        out.line(problem, "yellow")
    return code


def _pinner(session: Session, backends: Backends) -> Pinner:
    return Pinner(backends.bulk, for_operators(backends.admin), session.config.ttl_s)


def _chain(backends: Backends, namespace: str, leaf: bytes) -> list[Record]:
    try:
        return chain_of(backends.index, namespace, leaf)
    except NotStored as exc:
        fix = f"if it is stored, objkv rebuild --apply -n {namespace[:8]} restores its record"
        raise NotStored(f"{exc}; {fix}") from None


def _chunk(backends: Backends, namespace: str | None, beginning: str) -> tuple[str, bytes]:
    """Return namespace and hash of the one stored chunk whose hash starts with ``beginning``."""
    found = find_payloads(backends.bulk, _namespaces(backends, namespace), beginning)
    chunk = choose_chunk(found, beginning)
    if chunk is None:
        raise NotStored(
            f"no stored chunk starts with {beginning}; objkv ls --prefixes lists the leaves that "
            "can be pinned"
        )
    return chunk


def _namespaces(backends: Backends, namespace: str | None) -> list[str]:
    """Return the namespaces of the bulk store, because the index may have lost pinned records."""
    if namespace is not None:
        return [find_namespace(backends.bulk, backends.index, namespace)]
    return stored_namespaces(backends.bulk)


def _pinned_leaf(backends: Backends, namespace: str | None, beginning: str) -> tuple[str, bytes]:
    if not _HASH.fullmatch(beginning):
        raise ConfigError(f"{beginning!r} is not a hash; give 40 hex digits or the first few")
    found = [
        (name, path.rpartition("/")[2].removesuffix(".json"))
        for name in _namespaces(backends, namespace)
        for path in (entry.key for entry in backends.bulk.scan(f"{name}/pins/{beginning}"))
    ]
    if len(found) != 1:
        what = f"{len(found)} pins start" if found else "no pin starts"
        raise ConfigError(f"{what} with {beginning}; objkv pin --list shows the pins")
    name, whole = found[0]
    if len(whole) != 2 * PREFIX_HASH_BYTES or not _HASH.fullmatch(whole):
        raise ConfigError(f"{name}/pins/{whole}.json: not named like the hash of a chunk")
    return name, bytes.fromhex(whole)


def _author(name: str | None) -> str | None:
    if name is None:
        return this_user() if is_author(this_user()) else None
    if not is_author(name):
        raise ConfigError(
            f"--by: give 1 to {AUTHOR_CHARS_MAX} printable characters, without brackets"
        )
    return name
