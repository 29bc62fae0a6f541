"""Explains why a match ends where it does, from index, bulk store and node agent. A deleted chunk
leaves no trace, so only its neighbours give evidence; what stays unknown is reported as such."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

from objkv.cache.chunks import stored_header
from objkv.cache.switch import in_force, read_switches
from objkv.codec.seal import Seal
from objkv.errors import PayloadError, StoreError
from objkv.index.base import ReadIndex, Record
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes, root_hash
from objkv.ops.backends_view import QUARANTINE, read_identities, record_keys, stored_namespaces
from objkv.ops.diff import diff
from objkv.ops.formats import span
from objkv.ops.match import ChunkMatch, MatchReport, match_prompt
from objkv.ops.show import find_payloads, inspect_payload
from objkv.stores.base import ReadStore

if TYPE_CHECKING:
    from objkv.agent.prefetch import Matched

NAMESPACES_MAX: Final = 64
"""Other namespaces to search, with one lookup each."""
SCAN_MAX: Final = 200_000
"""Records to scan for chunks that continue the same prefix."""
_AT_ONCE: Final = 16
_HEADERS_ONLY: Final = (
    "whether every byte is correct: only headers were read (objkv verify reads every byte)"
)
_BY_WHAT: Final = "whether it was never saved, expired, or was swept: none of these leaves a trace"
_QUARANTINE: Final = "objkv verify --all --quarantine --apply moves it; the next save replaces it"
_SWEEP: Final = "objkv sweep --apply deletes what has no record; the next save replaces it"

Cause = Literal[
    "nothing", "held_back", "agent_away", "switched_off", "missing", "corrupt", "quarantined",
    "incomplete", "orphan", "elsewhere", "other_extras", "diverged", "gone", "unknown",
]  # fmt: skip
"""``nothing``: the match did not end early. ``held_back``: it did not on this node, whose agent has
what no store has. ``switched_off``: by an operator. ``incomplete``: some layers, heads or groups
are not stored. ``orphan``: stored without a record. ``diverged``: other prompts continue here with
other tokens. ``gone``: it was stored once. ``unknown``: there is no trace of it."""


@dataclass(slots=True)
class Explanation:
    """Why a match is as long as it is."""

    cause: Cause
    sentence: str
    evidence: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Questions that cannot be answered from the stored data."""
    chunk: int | None = None
    """Number of the chunk that ended the match, from 0; None if no chunk did."""
    served_tokens: int = 0
    """What a replica of this node would load, without admission and late lookups."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, its match, and the store and index to search."""

    bulk: ReadStore
    index: ReadIndex
    identity: Identity
    tokens: Sequence[int]
    extras: PromptExtras
    report: MatchReport
    seal: Seal | None
    ttl_s: int
    agent: "Matched | str | None" = None
    """What this node's agent has of the prompt; why it does not answer; None without an agent."""
    clock: Callable[[], float] = time.time


def explain_match(question: Question) -> Explanation:
    """Check the payloads that would be served, then explain the first chunk that would not. Reads
    the headers of the former and every byte of the latter. Changes nothing."""
    report, agent = question.report, question.agent
    if not report.chunks:
        short = "the prompt is shorter than one chunk, and only whole chunks are stored"
        return Explanation("nothing", short)
    if isinstance(agent, str):
        away = (
            "the node agent of these settings does not answer, so replicas with them load nothing"
        )
        return Explanation("agent_away", away, [agent])
    if (stopped := switched_off(question)) is not None:
        return stopped
    usable, ends = report.usable_tokens // report.chunk_tokens, found_chunks(report, agent)
    spoilt = _first_spoilt(question, 0 if agent is None else agent.resident, usable)
    if spoilt is not None:
        ends, found = spoilt
    elif ends == len(report.chunks):
        found = _whole(question, is_held_back=ends > usable)
    else:
        found = _stopped(question, ends)
    if ends > usable:
        found.evidence.append(
            f"this node's agent holds {ends - usable} of the chunks before back, from token "
            f"{report.usable_tokens:,}: only replicas of this node load them"
        )
    if ends < len(report.chunks):
        found.chunk = ends
        if ends:
            found.unknown.append(_HEADERS_ONLY)
    found.served_tokens = ends * report.chunk_tokens
    return found


def switched_off(question: Question) -> Explanation | None:
    """Return the operator's order that stops all loads of the namespace now; None if there is none
    or the orders cannot be read: replicas follow none either then."""
    try:
        orders = read_switches(question.bulk)
    except (PayloadError, StoreError):
        return None
    order = in_force(orders, question.report.namespace, now_s=question.clock())
    if order is None or order.mode != "never":
        return None
    sentence = f"nothing is loaded now: {order.describe()}"
    return Explanation("switched_off", sentence, advice=[f"{order.end()} ends the order"])


def found_chunks(report: MatchReport, agent: "Matched | None") -> int:
    """Return how many leading chunks a replica finds: in the index, or held back by its agent."""
    usable = report.usable_tokens // report.chunk_tokens
    # An agent that finds more than the index either has a chunk of which no store has anything, or
    # counts one of which only a part is stored.
    if agent is not None and usable < agent.stored and not report.chunks[usable].payloads:
        return agent.stored
    return usable


def _whole(question: Question, *, is_held_back: bool) -> Explanation:
    report = question.report
    found = Explanation("nothing", "every whole chunk of the prompt would be served")
    if is_held_back:
        found.cause = "held_back"
        found.sentence += " on this node, whose agent has some that no store has yet"
        found.advice.append(
            "nothing is wrong: they are stored when they are needed a second time; "
            "save_to_bucket=all or objkv warm stores them at once"
        )
    if rest := report.prompt_tokens - len(report.chunks) * report.chunk_tokens:
        last = "last token does" if rest == 1 else f"last {rest:,} tokens do"
        found.evidence.append(f"its {last} not fill a chunk of {report.chunk_tokens:,}")
    found.unknown += [
        _HEADERS_ONLY,
        "whether a replica finds it in time and does not compute it because that is faster "
        "(objkv top counts both)",
    ]
    return found


def _first_spoilt(question: Question, start: int, end: int) -> tuple[int, Explanation] | None:
    """Return the first of the recorded chunks ``[start, end)`` whose payload is missing or corrupt.
    Those before are in the agent's memory, which replicas read first."""
    bulk, report = question.bulk, question.report
    hashes = [chunk.prefix_hash for chunk in report.chunks[start:end]]
    records = question.index.lookup(report.namespace, hashes) if hashes else []

    def look(record: Record | None) -> Explanation | None:
        for key in () if record is None else record_keys(report.namespace, record):
            entry = bulk.head(key.path())
            if entry is None:
                return Explanation(
                    "missing",
                    "the index has a record of it, but its payload is not in the bulk store",
                    [f"missing: {key.path()}"],
                    [
                        "replicas forget the record at their next load; objkv sweep --apply "
                        "forgets all that are missing"
                    ],
                    ["who deleted it: a lifecycle rule, a person, or a sweep with another index"],
                )
            try:
                stored_header(bulk, entry, question.seal)
            except PayloadError as exc:
                return Explanation(
                    "corrupt",
                    "its payload is corrupt, so replicas refuse it and recompute the chunk",
                    [f"{key.path()}: {exc}"],
                    [_QUARANTINE],
                )
        return None

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="objkv-explain") as pool:
        for number, found in enumerate(pool.map(look, records), start):
            if found is not None:
                return number, found
    return None


def _stopped(question: Question, number: int) -> Explanation:
    """Explain a chunk that has no record, or only an incomplete one."""
    chunk, namespace = question.report.chunks[number], question.report.namespace
    if chunk.payloads:
        return _incomplete(question.identity, chunk)
    beginning = chunk.prefix_hash.hex()
    payloads = find_payloads(question.bulk, [namespace], beginning)
    if keys := payloads.get((namespace, chunk.prefix_hash)):
        return _unrecorded(question, keys)
    folder = f"{QUARANTINE}/{namespace}/{beginning[:2]}/{beginning}/"
    if quarantined := next(iter(question.bulk.scan(folder)), None):
        return Explanation(
            "quarantined",
            "its payload was corrupt and is quarantined",
            [f"{quarantined.key}, {span(question.clock() - quarantined.modified_s)} ago"],
            ["the next replica that computes it saves it again"],
        )
    if later := [c for c in question.report.chunks[number + 1 :] if c.payloads]:
        return Explanation(
            "gone",
            "it was stored once and is gone: later chunks of this prompt are stored",
            [
                f"later chunks that are stored: {len(later)}, the first at token "
                f"{later[0].token_start:,}"
            ],
            ["the next replica that computes it saves it and completes the prefix"],
            ["whether it expired, was swept, or its save was dropped"],
        )
    return (
        _other_extras(question, number) or _elsewhere(question, chunk) or _beside(question, number)
    )


def _incomplete(identity: Identity, chunk: ChunkMatch) -> Explanation:
    stored = {name.partition(".")[0] for name in chunk.payloads}
    lacks = [
        f"group {group} ({identity.groups[group].kind.replace('_', ' ')}) "
        + ("lacks layers or heads" if str(group) in stored else "is missing")
        for group in chunk.groups_missing
    ]
    return Explanation(
        "incomplete",
        f"only part of it is stored: {'; '.join(lacks)}",
        [f"stored: {', '.join(chunk.payloads)}"],
        [
            "a rank that failed or dropped its saves causes this: check its metrics save_drops "
            "and save_errors"
        ],
        ["whether the missing part was never saved or expired"],
    )


def _unrecorded(question: Question, keys: Sequence[ChunkKey]) -> Explanation:
    reports = [inspect_payload(question.bulk, key, question.seal) for key in keys]
    if corrupt := [one for one in reports if one.verdict == "corrupt"]:
        return Explanation(
            "corrupt",
            "its payload in the bulk store is corrupt and has no record, so no replica loads it",
            [f"{one.key}: {one.problem}" for one in corrupt],
            [_SWEEP],
        )
    written = max((one.created_s or 0 for one in reports), default=0)
    age_s = max(0, int(question.clock()) - written)
    why = "the record may have expired"
    if age_s <= question.ttl_s:
        why = "the index lost or evicted it, or a replica is saving the chunk now"
    return Explanation(
        "orphan",
        f"it is stored without a record: it was written {span(age_s)} ago, and records live "
        f"{span(question.ttl_s)} after their last use (ttl_s): {why}",
        [f"{one.key}: complete and correct" for one in reports],
        ["objkv rebuild --apply restores its record; a longer ttl_s keeps records longer"],
        ["whether the record expired, was evicted by Redis, or was never published"],
    )


def _other_extras(question: Question, number: int) -> Explanation | None:
    """Return an explanation if the chunk is stored without the prompt's salt or adapter."""
    extras, namespace = question.extras, question.report.namespace
    for lacks, other in (
        ("the cache_salt", replace(extras, salt=None)),
        ("the adapter", replace(extras, lora_digest=None)),
        ("the cache_salt and the adapter", PromptExtras()),
    ):
        if other == extras:
            continue
        hashes = prefix_hashes(namespace, question.tokens, question.report.chunk_tokens, other)
        if question.index.lookup(namespace, [hashes[number]])[0] is not None:
            return Explanation(
                "other_extras",
                f"the same tokens are stored without {lacks}, so this request cannot use them",
                advice=["KV is shared only with the same cache_salt and adapter: use the same"],
            )
    return None


def _elsewhere(question: Question, chunk: ChunkMatch) -> Explanation | None:
    """Return an explanation if other namespaces store the tokens up to the end of ``chunk``. A
    namespace with longer chunks needs only the whole chunks of these tokens."""
    identity, found = question.identity, list[tuple[int, str, str]]()
    names = [name for name in stored_namespaces(question.bulk) if name != identity.namespace()]
    for name, other in read_identities(question.bulk, names[:NAMESPACES_MAX]):
        served = match_prompt(question.index, other, question.tokens, question.extras).usable_tokens
        if served >= chunk.token_end // other.chunk_tokens * other.chunk_tokens > 0:
            reason = diff(json.loads(identity.canonical()), json.loads(other.canonical())).reason
            found.append((-served, name, reason))
    if not found:
        return None
    lines = [f"{name}: {-served:,} tokens; {reason}" for served, name, reason in sorted(found)]
    return Explanation(
        "elsewhere",
        f"another namespace has it: {lines[0]}",
        lines,
        ["objkv diff shows each difference and how to remove it"],
    )


def _beside(question: Question, number: int) -> Explanation:
    """Explain a chunk without any trace, by other prompts that continue from its beginning."""
    report, more = question.report, [_BY_WHAT]
    chunk = report.chunks[number]
    parent = report.chunks[number - 1].prefix_hash if number else root_hash(report.namespace)
    records = question.index.scan(report.namespace)
    count = sum(
        record.parent_hash == parent and record.token_start == chunk.token_start
        for record in islice(records, SCAN_MAX)
    )
    if next(records, None) is not None:
        more.append(f"whether other prompts continue here: only {SCAN_MAX:,} records were scanned")
    where = f"tokens {chunk.token_start:,}-{chunk.token_end:,}"
    if not count:
        return Explanation(
            "unknown",
            "it is in neither the index nor the bulk store",
            [f"no other prompt continues there: no record of {where}"],
            ["send the prompt again or use objkv warm, then match again"],
            more,
        )
    others = "1 other prompt continues" if count == 1 else f"{count:,} other prompts continue"
    return Explanation(
        "diverged",
        f"this prompt differs from the stored ones within {where}: {others} there with other "
        "tokens, salt or adapter",
        [],
        [
            "a time, name or id makes every prompt different: move it behind the shared text, or "
            "compare the token ids of both prompts there"
        ],
        ["at which token they differ", *more],
    )
