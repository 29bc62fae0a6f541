"""``objkv audit``: what is stored, for whom, of what use, at what price, and what is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from objkv import __version__
from objkv.cli.audit_output import show_report, write_html
from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.upkeep import WORKERS, Upkeep, upkeep
from objkv.config.urls import cache_folder
from objkv.errors import ConfigError, StoreUnavailable
from objkv.ops.audit import ROOTS_MAX, Audit, AuditOptions, Places, find_places
from objkv.ops.audit_costs import LIST_PRICES
from objkv.ops.audit_report import AuditReport, FindingKind, Prices
from objkv.ops.audit_spool import Spool
from objkv.ops.audit_walk import AuditEnds, AuditWalk
from objkv.ops.checkpoint import checkpoint_file
from objkv.ops.prompt import load_tokenizer

LIMIT = 20
_GO_ON = "run the same command again to go on"
_WRONG: tuple[FindingKind, ...] = ("ghost", "stranger", "corrupt")


@dataclass(frozen=True, slots=True)
class _Wish:
    """What is asked of one run, besides what its report is to tell."""

    namespace: str | None
    html: Path | None
    limit: int
    deadline_s: float | None
    restart: bool


@command
def audit(
    session: Session,
    namespace: Annotated[
        str | None, typer.Option(help="Of this one only, or its beginning.", metavar="NS")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the report as one page, too.", metavar="FILE")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer.json, or a model's folder: tell of the text of prefixes, where "
            "replicas have stored tokens.",
            metavar="PATH",
        ),
    ] = None,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="Show the text itself, not only its length.")
    ] = False,
    roots: Annotated[
        int, typer.Option(min=1, max=10_000, help="Largest prefixes to tell.", metavar="N")
    ] = ROOTS_MAX,
    limit: Annotated[
        int,
        typer.Option(
            min=1,
            help="Rows of each table on the terminal, but all kinds of findings.",
            metavar="N",
        ),
    ] = LIMIT,
    price_gb_month: Annotated[
        float, typer.Option(min=0, help="Dollars for 10^9 bytes in a month.", metavar="USD")
    ] = LIST_PRICES.gb_month,
    price_puts: Annotated[
        float, typer.Option(min=0, help="Dollars for 1,000 PUT requests.", metavar="USD")
    ] = LIST_PRICES.per_1000_puts,
    price_gets: Annotated[
        float, typer.Option(min=0, help="Dollars for 1,000 GET requests.", metavar="USD")
    ] = LIST_PRICES.per_1000_gets,
    deadline_s: Annotated[
        float | None, typer.Option(min=0, help="Begin nothing after it.", metavar="SECONDS")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, metavar="N")] = WORKERS,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew, not where an earlier run ended.")
    ] = False,
) -> int:
    """Join bucket and index: what is stored, for whom, of what use, and what is wrong."""
    if show_text and tokenizer is None:
        raise ConfigError("--show-text needs --tokenizer")
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise ConfigError(f"--html {html}: not a file in a folder that is there")
    options = replace(
        _options(session),
        roots_max=roots,
        prices=Prices(price_gb_month, price_puts, price_gets),
        tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
        show_text=show_text,
        workers=workers,
    )
    wish = _Wish(namespace, html, limit, deadline_s, restart)
    return _audited(session, options, wish)


def _options(session: Session) -> AuditOptions:
    """What the settings say."""
    config, public = session.config, session.config.public()
    return AuditOptions(
        version=__version__,
        bulk_url=public["bulk_url"],
        index_url=public["index_url"],
        ttl_s=config.ttl_s,
        grace_s=config.sweep_grace_s,
        quota_bytes=config.quota_bytes,
    )


def _audited(session: Session, options: AuditOptions, wish: _Wish) -> int:
    with (
        upkeep(
            session,
            "audit",
            writes=False,
            workers=options.workers,
            deadline_s=wish.deadline_s,
            resumable=False,
        ) as run,
        _spool(session, wish.namespace, restart=wish.restart) as spool,
    ):
        report = _report(run, spool, wish.namespace, options)
        if wish.html is not None:
            write_html(report, wish.html, private=options.show_text)
        show_report(session.out, report, limit=wish.limit, html=wish.html, is_kept=spool.is_kept)
        spool.is_told = report.ending == "complete"
        return run.code(FOUND if _is_wrong(report) else FINE)


def _is_wrong(report: AuditReport) -> bool:
    """Orphans that are young may be about to get their records."""
    found = {one.kind: one for one in report.findings.counts}
    orphans = found["orphan"]
    return orphans.count > orphans.young or any(found[kind].count for kind in _WRONG)


@contextmanager
def _spool(session: Session, namespace: str | None, *, restart: bool) -> Iterator[Spool]:
    """Where the walk keeps what it sees; removed once all of it has been told."""
    config = session.config
    place = (config.bulk_url, config.index_url, config.s3_endpoint_url, config.redis_prefix)
    file = checkpoint_file(cache_folder(), "audit", place, namespace).with_suffix(".sqlite")
    spool = Spool(file, restart=restart)
    try:
        yield spool
    except StoreUnavailable as exc:
        if not spool.is_kept or not spool.done:
            raise
        raise StoreUnavailable(f"{exc}; {_GO_ON}") from exc
    except KeyboardInterrupt:  # a second one, or while figures were made
        if spool.is_kept and spool.done:
            session.out.note(f"what was seen is kept: {_GO_ON}")
        raise
    finally:
        spool.close()


def _report(run: Upkeep, spool: Spool, namespace: str | None, options: AuditOptions) -> AuditReport:
    ends = AuditEnds(
        bulk=run.ends.bulk,
        index=run.ends.index,
        is_own_index=run.ends.is_own_index,
        seal_of=run.ends.seal_of,
        unfinished=run.ends.bulk.unfinished,
    )
    walk = AuditWalk(ends, spool, options.workers)
    places: Places | None = None
    with run.interruptible():
        with run.session.out.waiting("reading namespaces"):
            places = find_places(ends, run.pick(namespace))
        _walk(run, walk, places)
    if places is None:
        raise KeyboardInterrupt
    ending = run.crew.ending
    assert ending != "limit"
    with run.session.out.waiting("making figures"):
        return Audit(ends, spool, places, options).report(ending, walk.problems)


def _walk(run: Upkeep, walk: AuditWalk, places: Places) -> None:
    run.checkpoint.done |= walk.spool.done
    namespaces = {name: one.namespace for name, one in places.facts.items()}
    run.run("reading records", walk.records(places.indexed))
    run.run("listing payloads", walk.payloads(places.parts, namespaces))
    run.run("looking for leftovers", walk.leftovers(places.only))
    if not walk.ends.is_own_index:
        run.run("looking again", walk.second_looks(sorted({*namespaces, *places.indexed})))
