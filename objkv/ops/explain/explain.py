"""Why a match stopped where it did: which chunk ended it, and what both ends still tell of it.

What cannot be told is said to be so. The commonest doubt is whether a chunk that is nowhere was
ever there: an end that forgets leaves no trace, so only what stands around it can speak.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from math import isfinite
from time import monotonic
from typing import Final

from objkv.codec.seal import Seal
from objkv.config.urls import without_password
from objkv.errors import ConfigError, PayloadError
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.ops.backends_view import QUARANTINE, record_keys, stored_header
from objkv.ops.explain.causes import (
    Explanation,
    Findings,
    Question,
    describe_missing,
    explain_absent,
)
from objkv.ops.show import find_payloads, inspect_payload
from objkv.redact import without_secrets
from objkv.stores.base import Entry, ReadStore

_AT_ONCE: Final = 16


def explain_match(question: Question) -> Explanation:
    """Look at the payloads of what would be served, then at all that tells of the first chunk that
    would not. Headers of the one, every byte of the other; changes nothing."""
    report = question.report
    usable = report.usable_tokens // report.chunk_tokens
    spoilt = _first_spoilt(question, usable)
    if spoilt is not None:
        chunk, found = spoilt
    elif usable == len(report.chunks):
        return _unstopped(question)
    else:
        chunk, found = usable, _stopped(question, usable)
    told = report.chunks[chunk]
    if report.usable_tokens and spoilt is None:
        found.untold.append(
            "whether every byte of the chunks before it is right: only their headers were read "
            "(objkv verify reads all)"
        )
    return Explanation(
        cause=found.cause,
        sentence=found.sentence,
        chunk=chunk,
        token_start=told.token_start,
        token_end=told.token_end,
        prefix_hash=told.prefix_hash,
        served_tokens=chunk * report.chunk_tokens,
        evidence=tuple(found.evidence),
        advice=tuple(found.advice),
        untold=tuple(found.untold),
    )


def _unstopped(question: Question) -> Explanation:
    report = question.report
    rest = report.prompt_tokens - report.usable_tokens
    filling = "token fills" if rest == 1 else f"{rest:,} tokens fill"
    why = f"its last {filling} no chunk of {report.chunk_tokens:,}" if rest else ""
    sentence = "every whole chunk of the prompt would be served"
    if not report.chunks:
        sentence = "the prompt is shorter than one chunk, and less than a chunk is never stored"
    untold = []
    if report.chunks:
        untold += [
            "whether every byte is right: only headers were read (objkv verify reads all)",
            "whether a replica loads it or computes it sooner: --endpoint asks it",
        ]
    evidence = (why,) if why else ()
    return Explanation(
        "nothing", sentence, None, None, None, None, report.usable_tokens, evidence, (),
        tuple(untold),
    )  # fmt: skip


def _first_spoilt(question: Question, usable: int) -> tuple[int, Findings] | None:
    """The first of the chunks that the index promises whose payload is not there or not right."""
    bulk, report = question.bulk, question.report
    hashes = [chunk.prefix_hash for chunk in report.chunks[:usable]]
    records = question.index.lookup(report.namespace, hashes) if hashes else []

    def look(record: Record | None) -> tuple[str, str] | None:
        for key in () if record is None else record_keys(report.namespace, record):
            entry = bulk.head(key.path())
            if entry is None:
                return "ghost", key.path()
            if problem := _header_problem(bulk, entry, question.seal):
                return "corrupt", f"{key.path()}: {problem}"
        return None

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="objkv-explain") as pool:
        for number, problem in enumerate(pool.map(look, records)):
            if problem is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                return number, _spoilt(*problem)
    return None


def _header_problem(bulk: ReadStore, entry: Entry, seal: Seal | None) -> str | None:
    try:
        stored_header(bulk, entry, seal)
    except PayloadError as exc:
        return str(exc)
    return None


def _spoilt(kind: str, detail: str) -> Findings:
    if kind == "ghost":
        return Findings(
            "ghost",
            "the index has a record of it, but its payload is not in the bulk store (a ghost)",
            [f"missing: {detail}"],
            ["replicas forget the record at their next load; objkv sweep forgets all ghosts"],
            ["who deleted it: a lifecycle rule, somebody by hand, or a sweep of another index"],
        )
    return Findings(
        "corrupt",
        "its payload is corrupt: a load refuses it, and the model computes it",
        [detail],
        ["objkv verify --quarantine takes it out of use; the next save replaces it"],
        [],
    )


def _stopped(question: Question, number: int) -> Findings:
    """Of a chunk that the index does not promise, or not whole."""
    chunk = question.report.chunks[number]
    if chunk.payloads:
        return _incomplete(question, number)
    beginning = chunk.prefix_hash.hex()
    found = find_payloads(question.bulk, [question.report.namespace], beginning)
    if keys := found.get((question.report.namespace, chunk.prefix_hash)):
        return _unindexed(question, keys)
    folder = f"{QUARANTINE}/{question.report.namespace}/{beginning[:2]}/{beginning}/"
    if quarantined := next(iter(question.bulk.scan(folder)), None):
        days = (question.clock() - quarantined.modified_s) / 86_400
        return Findings(
            "quarantined",
            "its payload was found corrupt, and taken out of use",
            [f"{quarantined.key}, since {days:.1f} days"],
            ["the next replica that computes it saves it again"],
        )
    return explain_absent(question, number)


def _incomplete(question: Question, number: int) -> Findings:
    chunk = question.report.chunks[number]
    missing = describe_missing(question.identity, chunk)
    return Findings(
        "incomplete",
        "a part of it is stored, and a part is not: " + "; ".join(m.sentence for m in missing),
        [f"stored: {', '.join(chunk.payloads)}"],
        [
            "a rank that failed, or drops its saves, leaves such chunks: look at its save_drops "
            "and save_errors"
        ],
        ["whether the missing part was never saved or has expired"],
    )


def _unindexed(question: Question, keys: Sequence[ChunkKey]) -> Findings:
    reports = [inspect_payload(question.bulk, key, question.seal) for key in keys]
    corrupt = [one for one in reports if one.verdict == "corrupt"]
    if corrupt:
        return Findings(
            "corrupt",
            "its payload is in the bulk store and corrupt: it has no record, and nobody loads it",
            [f"{one.key}: {one.problem}" for one in corrupt],
            ["objkv verify --quarantine takes it out of use; the next save replaces it"],
        )
    written = max((one.created_s or 0 for one in reports), default=0)
    age_s = max(0, int(question.clock()) - written)
    evidence = [f"{one.key}: whole and right" for one in reports]
    if age_s > question.ttl_s:
        sentence = (
            f"it is stored, but its record is gone: it was written {_span(age_s)} ago, and records "
            f"live {_span(question.ttl_s)} after their last use (ttl_s)"
        )
    else:
        sentence = (
            f"it is stored, but has no record, although it was written only {_span(age_s)} ago and "
            f"records live {_span(question.ttl_s)}: the index lost or evicted it, or it is being "
            "saved right now"
        )
    return Findings(
        "unindexed",
        sentence,
        evidence,
        ["objkv rebuild gives it a record again; a longer ttl_s keeps records longer"],
        ["whether the record expired, was evicted by Redis, or was never published"],
    )


def _span(seconds: float) -> str:
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{int(seconds)} s"


_PREFIX: Final = "vllm_objkv_"
_TOLD: Final = {
    "admission_refused": "{n} matches not loaded, because computing was measured to be sooner",
    "admission_cut": "{n} matches of which a tail was not loaded, for the same reason",
    "load_failures": "{n} loads of which something was computed after all",
    "load_refused": "{n} chunks not loaded, because the queue was full",
    "lookup_errors": "{n} lookups that the index did not answer",
    "lookup_deadlines": "{n} lookups that took too long",
    "lookup_refused": "{n} lookups not made, because the queue was full",
    "save_drops": "{n} chunks not saved: no slab, queue full, or too late",
    "save_errors": "{n} chunks not saved, because a store failed",
    "saves_shed": "{n} chunks not saved, because the store was left alone or asked too much",
    "save_over_quota": "{n} chunks not saved, because the quota is used up",
    "publish_errors": "{n} payloads saved, but not announced",
    "adapters_unknown": "{n} requests not shared, because their adapter cannot be told",
}


@dataclass(frozen=True, slots=True)
class ReplicaTold:
    """One replica's counters, since it started."""

    endpoint: str
    """Its address, without a password."""
    counters: dict[str, int]
    """Of those that mean something was not loaded or not saved, the ones above 0."""
    sentences: tuple[str, ...]
    problem: str | None
    """Why nothing could be read, if so."""


def ask_replica(
    endpoint: str, *, deadline_s: float = 5.0, clock: Callable[[], float] = monotonic
) -> ReplicaTold:
    """Read ``endpoint``'s metrics: its base address, or that of its metrics. Raises
    ``ConfigError`` for what is no address."""
    from objkv.ops.top.scrape import MetricsSource  # late: it imports httpx

    try:
        source = MetricsSource(endpoint, deadline_s=deadline_s, clock=clock, is_exact=True)
    except ConfigError as exc:
        raise ConfigError(f"--{exc}") from None
    with closing(source):
        found = source.scrape()
    shown = without_secrets(without_password(endpoint))
    if found.problem is not None:
        why = found.problem.removeprefix("no metrics: ")
        return ReplicaTold(shown, {}, (), f"no metrics: {why}")
    if not any(name.startswith(_PREFIX) for name in found.values):
        return ReplicaTold(shown, {}, (), "it has no metrics of objkv: is its connector loaded?")
    sums = {name: found.values.get(f"{_PREFIX}{name}_total", 0.0) for name in _TOLD}
    counters = {name: int(value) for name, value in sums.items() if value and isfinite(value)}
    sentences = tuple(_TOLD[name].format(n=f"{count:,}") for name, count in counters.items())
    return ReplicaTold(shown, counters, sentences, None)
