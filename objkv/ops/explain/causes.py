"""What is asked of a match that stopped, and what is answered: plain values."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Final, Literal

from objkv.cache.match import shards_of
from objkv.codec.seal import Seal
from objkv.errors import PayloadError
from objkv.index.base import ReadIndex, Record, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity, Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes, root_hash
from objkv.ops.backends_view import read_identity, record_keys, stored_header, stored_namespaces
from objkv.ops.diff import diff
from objkv.ops.match import ChunkMatch, MatchReport, match_prompt
from objkv.stores.base import ReadStore

NAMESPACES_MAX: Final = 64
"""Others that are looked at: a lookup each."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another namespace that has more of the prompt."""

    namespace: str
    tokens: int
    """Of the prompt that would be served there."""
    reason: str
    """Why that one does not share with the one that was asked for."""


def find_elsewhere(
    bulk: ReadStore,
    index: ReadIndex,
    identity: Identity,
    tokens: Sequence[int],
    extras: PromptExtras,
    *,
    token_end: int,
) -> list[Elsewhere]:
    """Other namespaces in which at least the first ``token_end`` tokens are stored, or those of its
    whole chunks; the longest match first."""
    own, found = identity.namespace(), []
    names = [name for name in stored_namespaces(bulk) if name != own]
    for name in names[:NAMESPACES_MAX]:
        try:
            other = read_identity(bulk, name)
        except PayloadError:
            continue  # of another version, or of encoder outputs
        if other is None:
            continue
        served = match_prompt(index, other, tokens, extras).usable_tokens
        if served >= token_end // other.chunk_tokens * other.chunk_tokens > 0:
            reason = diff(json.loads(identity.canonical()), json.loads(other.canonical())).reason
            found.append(Elsewhere(name, served, reason))
    return sorted(found, key=lambda one: (-one.tokens, one.namespace))


def without_extras(
    index: ReadIndex, identity: Identity, tokens: Sequence[int], extras: PromptExtras, number: int
) -> str | None:
    """A sentence, if chunk ``number`` is stored without the salt or the adapter of ``extras``."""
    tries: list[tuple[str, PromptExtras]] = []
    if extras.salt is not None:
        tries.append(("without the cache_salt", replace(extras, salt=None)))
    if extras.lora_digest is not None:
        tries.append(("without the adapter", replace(extras, lora_digest=None)))
    if extras.salt is not None and extras.lora_digest is not None:
        both = replace(extras, salt=None, lora_digest=None)
        tries.append(("without the cache_salt and the adapter", both))
    namespace, size = identity.namespace(), identity.chunk_tokens
    for told, other in tries:
        wanted = prefix_hashes(namespace, tokens, size, other)[number]
        if index.lookup(namespace, [wanted])[0] is not None:
            return f"the same tokens are stored {told}, and so not for this request"
    return None


Cause = Literal[
    "nothing",
    "ghost",
    "corrupt",
    "quarantined",
    "incomplete",
    "unindexed",
    "elsewhere",
    "other_extras",
    "parted",
    "gone",
    "unknown",
]
"""``nothing``: the match did not stop. ``incomplete``: some layers, heads or groups are not stored.
``unindexed``: stored, and without a record. ``parted``: other prompts go on from here, this one
does not. ``gone``: it was there once. ``unknown``: nothing tells whether it ever was."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a match is as long as it is."""

    cause: Cause
    sentence: str
    chunk: int | None
    """The chunk that stopped it, counted from 0; None if nothing did."""
    token_start: int | None
    token_end: int | None
    prefix_hash: bytes | None
    served_tokens: int
    """What could really be served: less than the index promises, where payloads are not there."""
    evidence: tuple[str, ...]
    """What was found, a sentence each."""
    advice: tuple[str, ...]
    untold: tuple[str, ...]
    """What cannot be told from here."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, what was matched of it, and where to ask."""

    bulk: ReadStore
    index: ReadIndex
    identity: Identity
    tokens: Sequence[int]
    extras: PromptExtras
    report: MatchReport
    seal: Seal | None
    ttl_s: int
    clock: Callable[[], float] = time.time


@dataclass(slots=True)
class Findings:
    """What grows into an explanation."""

    cause: Cause
    sentence: str
    evidence: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)


SCAN_MAX: Final = 200_000
"""Records that are looked at for what goes on from the same place."""
SIBLINGS_MAX: Final = 32
"""Of those, whose stored tokens are compared."""


def explain_absent(question: Question, number: int) -> Findings:
    """Of a chunk that neither end knows: what is around it?"""
    report = question.report
    found = Findings("unknown", "neither end has anything of it")
    wanted = report.chunks[number]
    if later := [c for c in report.chunks[number + 1 :] if c.payloads]:
        found.cause = "gone"
        found.sentence = "it was there once, and is gone: what follows it in this prompt is stored"
        found.evidence.append(
            f"{len(later)} later chunks of the prompt are stored, the first at token "
            f"{later[0].token_start:,}"
        )
        found.advice.append("the next replica that computes it saves it, and all is whole again")
        found.untold.append("whether it expired, was swept, or its save was dropped")
        return found
    if extras := without_extras(
        question.index, question.identity, question.tokens, question.extras, number
    ):
        found.cause, found.sentence = "other_extras", extras
        found.advice.append("cache_salt and adapter are part of what is shared: give the same ones")
        return found
    others = find_elsewhere(
        question.bulk, question.index, question.identity, question.tokens, question.extras,
        token_end=wanted.token_end,
    )  # fmt: skip
    if others:
        _tell_elsewhere(found, others)
        return found
    _tell_siblings(question, number, found)
    return found


def _tell_elsewhere(found: Findings, others: Sequence[Elsewhere]) -> None:
    best = others[0]
    found.cause = "elsewhere"
    found.sentence = (
        f"not in this namespace: {best.namespace} has {best.tokens:,} tokens of the same prompt, "
        f"and {best.reason.removeprefix('they ')}"
    )
    found.evidence += [f"{one.namespace}: {one.tokens:,} tokens; {one.reason}" for one in others]
    found.advice.append("objkv diff says field by field why they do not share, and what to change")


def _tell_siblings(question: Question, number: int, found: Findings) -> None:
    report = question.report
    namespace, chunk = report.namespace, report.chunks[number]
    parent = report.chunks[number - 1].prefix_hash if number else root_hash(namespace)
    hashes = prefix_hashes(namespace, question.tokens, report.chunk_tokens, question.extras)
    assert hashes[number] == chunk.prefix_hash
    siblings: list[Record] = []
    count = 0
    for scanned, record in enumerate(question.index.scan(namespace)):
        if scanned >= SCAN_MAX:
            found.untold.append(f"only {SCAN_MAX:,} records were looked at for other ways on")
            break
        if record.parent_hash == parent and record.token_start == chunk.token_start:
            count += 1
            siblings += [record] if len(siblings) < SIBLINGS_MAX else []
    where = f"tokens {chunk.token_start:,}-{chunk.token_end:,}"
    if count:
        others = "1 other prefix begins" if not number else "1 other prompt goes on"
        if count > 1:
            others = f"{count:,} other {'prompts go on' if number else 'prefixes begin'}"
        found.cause = "parted"
        found.sentence = (
            f"this prompt parts from what is stored within {where}: {others} there, with other "
            "tokens, salt or adapter"
        )
        found.advice.append(
            "a time, a name or an id in the prompt makes each one new: move it behind what is "
            "common, or compare the token ids of both prompts there"
        )
        _tell_token(question, siblings, found)
    else:
        found.evidence.append(f"nothing else goes on from there either: no record of {where}")
        found.advice.append("send the prompt once more, or objkv warm it, then match again")
    found.untold.append(
        "whether it was never saved, or has expired or was swept: neither leaves a trace"
    )


def _tell_token(question: Question, siblings: Sequence[Record], found: Findings) -> None:
    """Where the prompts part, if payloads carry their tokens. Tells the place, not the tokens."""
    shared = -1
    for record in siblings:
        start = record.token_start
        own = question.tokens[start : record.token_end]
        for key in islice(record_keys(question.report.namespace, record), 1):
            tokens = _stored_tokens(question, key)
            if tokens is not None:
                same = takewhile(lambda pair: pair[0] == pair[1], zip(own, tokens, strict=False))
                shared = max(shared, start + sum(1 for _ in same))
    if shared < 0:
        found.untold.append("at which token they part: no token ids are stored (store_tokens)")
    else:
        found.evidence.append(f"it parts from the most similar of them at token {shared:,}")


def _stored_tokens(question: Question, key: ChunkKey) -> tuple[int, ...] | None:
    entry = question.bulk.head(key.path())
    if entry is None:
        return None
    try:
        header = stored_header(question.bulk, entry, question.seal)
    except PayloadError:
        return None
    return None if header is None else header.provenance.tokens


_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Missing:
    """Of one group."""

    group: int
    layers: tuple[str, ...]
    """Of which some head is missing, in forward order."""
    heads: tuple[int, ...]
    """Missing in at least one of them."""
    sentence: str


def describe_missing(identity: Identity, chunk: ChunkMatch) -> list[Missing]:
    """What the groups that are not whole lack."""
    return [_missing(g, identity.groups[g], chunk.payloads) for g in chunk.groups_missing]


def _missing(number: int, group: GroupIdentity, payloads: Sequence[str]) -> Missing:
    empty = ShardRecord(0, 0, "none", False, "", 0)
    held = list(shards_of(dict.fromkeys(payloads, empty), number))
    holes = [
        (layer, head)
        for layer in range(len(group.layers))
        for head in range(group.heads)
        if not any(
            s.layer_start <= layer < s.layer_end and s.head_start <= head < s.head_end for s in held
        )
    ]
    layers = tuple(group.layers[layer] for layer in sorted({layer for layer, _ in holes}))
    heads = tuple(sorted({head for _, head in holes}))
    kind = f"group {number} ({group.kind.replace('_', ' ')})"
    if not held:
        return Missing(number, layers, heads, f"nothing of {kind}")
    which = "all layers" if len(layers) == len(group.layers) else _some(layers)
    whose = "" if len(heads) == group.heads else f", heads {', '.join(map(str, heads))}"
    return Missing(number, layers, heads, f"{kind} lacks {which}{whose}")


def _some(layers: Sequence[str]) -> str:
    if len(layers) <= _NAMES_SHOWN:
        return ", ".join(layers)
    return f"{len(layers)} layers, {layers[0]} to {layers[-1]}"
