"""Explains why a match ends where it does, from the index and the bulk store.

Unknowns are reported as such. Most often it is unknown whether a missing chunk was ever stored: a
deleted chunk leaves no trace, so only its neighbours give evidence.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from objkv.cache.chunks import stored_header
from objkv.cache.switch import in_force, read_switches
from objkv.codec.seal import Seal
from objkv.errors import PayloadError, StoreError
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.ops.backends_view import QUARANTINE, record_keys
from objkv.ops.explain.causes import (
    Explanation,
    Findings,
    Question,
    describe_missing,
    explain_absent,
)
from objkv.ops.show import find_payloads, inspect_payload
from objkv.stores.base import Entry, ReadStore

_AT_ONCE: Final = 16


def explain_match(question: Question) -> Explanation:
    """Check the payloads that would be served, then explain the first chunk that would not.

    Reads the headers of the former and every byte of the latter. Changes nothing.
    """
    report = question.report
    usable = report.usable_tokens // report.chunk_tokens
    spoilt = _first_spoilt(question, usable)
    if spoilt is not None:
        chunk, found = spoilt
    elif usable == len(report.chunks):
        return _unstopped(question)
    else:
        chunk, found = usable, _stopped(question, usable)
    ending = report.chunks[chunk]
    if report.usable_tokens and spoilt is None:
        found.unknown.append(
            "whether every byte of the chunks before it is correct: only headers were read "
            "(objkv verify reads every byte)"
        )
    found.advice += _orders(question)
    return Explanation(
        cause=found.cause,
        sentence=found.sentence,
        chunk=chunk,
        token_start=ending.token_start,
        token_end=ending.token_end,
        prefix_hash=ending.prefix_hash,
        served_tokens=chunk * report.chunk_tokens,
        evidence=tuple(found.evidence),
        advice=tuple(found.advice),
        unknown=tuple(found.unknown),
    )


def _unstopped(question: Question) -> Explanation:
    report = question.report
    rest = report.prompt_tokens - report.usable_tokens
    last = "last token does" if rest == 1 else f"last {rest:,} tokens do"
    why = f"its {last} not fill a chunk of {report.chunk_tokens:,}" if rest else ""
    sentence = "every whole chunk of the prompt would be served"
    if not report.chunks:
        sentence = "the prompt is shorter than one chunk, and only whole chunks are stored"
    unknown = []
    if report.chunks:
        unknown += [
            "whether every byte is correct: only headers were read (objkv verify reads every byte)",
            "whether a replica loads or recomputes it (objkv top counts what replicas refused)",
        ]
    evidence = (why,) if why else ()
    return Explanation(
        "nothing", sentence, None, None, None, None, report.usable_tokens, evidence,
        tuple(_orders(question)), tuple(unknown),
    )  # fmt: skip


def _orders(question: Question) -> list[str]:
    """Return a sentence if an operator has switched loads of this namespace off."""
    try:
        orders = read_switches(question.bulk)
    except (PayloadError, StoreError):  # replicas follow none either
        return []
    order = in_force(orders, question.report.namespace, now_s=question.clock())
    if order is None or order.mode != "never":
        return []
    return [f"nothing is loaded now: {order.describe()}; objkv admission clear ends it"]


def _first_spoilt(question: Question, usable: int) -> tuple[int, Findings] | None:
    """Return the first recorded chunk whose payload is missing or corrupt."""
    bulk, report = question.bulk, question.report
    hashes = [chunk.prefix_hash for chunk in report.chunks[:usable]]
    records = question.index.lookup(report.namespace, hashes) if hashes else []

    def look(record: Record | None) -> tuple[str, str] | None:
        for key in () if record is None else record_keys(report.namespace, record):
            entry = bulk.head(key.path())
            if entry is None:
                return "missing", key.path()
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
    if kind == "missing":
        return Findings(
            "missing",
            "the index has a record of it, but its payload is not in the bulk store",
            [f"missing: {detail}"],
            [
                "replicas forget the record at their next load; objkv sweep --apply forgets all "
                "that are missing"
            ],
            ["who deleted it: a lifecycle rule, a person, or a sweep with another index"],
        )
    return Findings(
        "corrupt",
        "its payload is corrupt, so replicas refuse it and recompute the chunk",
        [detail],
        ["objkv verify --all --quarantine --apply moves it; the next save replaces it"],
        [],
    )


def _stopped(question: Question, number: int) -> Findings:
    """Explain a chunk that has no record, or only an incomplete one."""
    chunk = question.report.chunks[number]
    if chunk.payloads:
        return _incomplete(question, number)
    beginning = chunk.prefix_hash.hex()
    found = find_payloads(question.bulk, [question.report.namespace], beginning)
    if keys := found.get((question.report.namespace, chunk.prefix_hash)):
        return _unrecorded(question, keys)
    folder = f"{QUARANTINE}/{question.report.namespace}/{beginning[:2]}/{beginning}/"
    if quarantined := next(iter(question.bulk.scan(folder)), None):
        days = (question.clock() - quarantined.modified_s) / 86_400
        return Findings(
            "quarantined",
            "its payload was corrupt and is quarantined",
            [f"{quarantined.key}, quarantined {days:.1f} days ago"],
            ["the next replica that computes it saves it again"],
        )
    return explain_absent(question, number)


def _incomplete(question: Question, number: int) -> Findings:
    chunk = question.report.chunks[number]
    missing = describe_missing(question.identity, chunk)
    return Findings(
        "incomplete",
        "only part of it is stored: " + "; ".join(m.sentence for m in missing),
        [f"stored: {', '.join(chunk.payloads)}"],
        [
            "a rank that failed or dropped its saves causes this: check its metrics save_drops "
            "and save_errors"
        ],
        ["whether the missing part was never saved or expired"],
    )


def _unrecorded(question: Question, keys: Sequence[ChunkKey]) -> Findings:
    reports = [inspect_payload(question.bulk, key, question.seal) for key in keys]
    corrupt = [one for one in reports if one.verdict == "corrupt"]
    if corrupt:
        return Findings(
            "corrupt",
            "its payload in the bulk store is corrupt and has no record, so no replica loads it",
            [f"{one.key}: {one.problem}" for one in corrupt],
            ["objkv verify --all --quarantine --apply moves it; the next save replaces it"],
        )
    written = max((one.created_s or 0 for one in reports), default=0)
    age_s = max(0, int(question.clock()) - written)
    evidence = [f"{one.key}: complete and correct" for one in reports]
    if age_s > question.ttl_s:
        sentence = (
            f"it is stored, but its record is gone: it was written {_span(age_s)} ago, and records "
            f"expire {_span(question.ttl_s)} after their last use (ttl_s)"
        )
    else:
        sentence = (
            f"it is stored but has no record, although it was written only {_span(age_s)} ago and "
            f"records live {_span(question.ttl_s)}: the index lost or evicted the record, or a "
            "replica is saving the chunk now"
        )
    return Findings(
        "orphan",
        sentence,
        evidence,
        ["objkv rebuild --apply restores its record; a longer ttl_s keeps records longer"],
        ["whether the record expired, was evicted by Redis, or was never published"],
    )


def _span(seconds: float) -> str:
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{int(seconds)} s"
