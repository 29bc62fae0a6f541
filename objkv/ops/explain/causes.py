"""The causes that end a match early, and how to find them around a chunk that is not stored."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from objkv.cache.match import shards_of
from objkv.codec.seal import Seal
from objkv.errors import PayloadError
from objkv.index.base import ReadIndex
from objkv.keys.identity import GroupIdentity, Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes, root_hash
from objkv.ops.backends_view import read_identity, stored_namespaces
from objkv.ops.diff import diff
from objkv.ops.match import ChunkMatch, MatchReport, match_prompt
from objkv.stores.base import ReadStore

NAMESPACES_MAX: Final = 64
"""Other namespaces to search, with one lookup each."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another namespace that has more of the prompt."""

    namespace: str
    tokens: int
    """Tokens of the prompt that would be served there."""
    reason: str
    """Why it does not share with the requested namespace."""


def find_elsewhere(
    bulk: ReadStore,
    index: ReadIndex,
    identity: Identity,
    tokens: Sequence[int],
    extras: PromptExtras,
    *,
    token_end: int,
) -> list[Elsewhere]:
    """Return other namespaces that store the first ``token_end`` tokens, longest match first.

    A namespace with longer chunks needs only the whole chunks of these tokens.
    """
    own, found = identity.namespace(), []
    names = [name for name in stored_namespaces(bulk) if name != own]
    for name in names[:NAMESPACES_MAX]:
        try:
            other = read_identity(bulk, name)
        except PayloadError:
            continue  # from another version, or for encoder outputs
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
    """Return a sentence if chunk ``number`` is stored without the salt or adapter of ``extras``."""
    tries: list[tuple[str, PromptExtras]] = []
    if extras.salt is not None:
        tries.append(("without the cache_salt", replace(extras, salt=None)))
    if extras.lora_digest is not None:
        tries.append(("without the adapter", replace(extras, lora_digest=None)))
    if extras.salt is not None and extras.lora_digest is not None:
        both = replace(extras, salt=None, lora_digest=None)
        tries.append(("without the cache_salt and the adapter", both))
    namespace, size = identity.namespace(), identity.chunk_tokens
    for difference, other in tries:
        wanted = prefix_hashes(namespace, tokens, size, other)[number]
        if index.lookup(namespace, [wanted])[0] is not None:
            return f"the same tokens are stored {difference}, so this request cannot use them"
    return None


Cause = Literal[
    "nothing",
    "missing",
    "corrupt",
    "quarantined",
    "incomplete",
    "unindexed",
    "elsewhere",
    "other_extras",
    "diverged",
    "gone",
    "unknown",
]
"""``nothing``: the match did not end early. ``incomplete``: some layers, heads or groups are not
stored. ``unindexed``: stored without a record. ``diverged``: other prompts continue here with other
tokens. ``gone``: it was stored once. ``unknown``: there is no trace of it."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a match is as long as it is."""

    cause: Cause
    sentence: str
    chunk: int | None
    """Number of the chunk that ended the match, from 0; None if the match is complete."""
    token_start: int | None
    token_end: int | None
    prefix_hash: bytes | None
    served_tokens: int
    """Tokens that could be served; fewer than the index promises if payloads are missing."""
    evidence: tuple[str, ...]
    """Observations, one sentence each."""
    advice: tuple[str, ...]
    unknown: tuple[str, ...]
    """Questions that cannot be answered from the stored data."""


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
    clock: Callable[[], float] = time.time


@dataclass(slots=True)
class Findings:
    """The parts of an explanation, while they are collected."""

    cause: Cause
    sentence: str
    evidence: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


SCAN_MAX: Final = 200_000
"""Records to scan for chunks that continue the same prefix."""


def explain_absent(question: Question, number: int) -> Findings:
    """Explain a chunk that is in neither the index nor the bulk store, by its surroundings."""
    report = question.report
    found = Findings("unknown", "it is in neither the index nor the bulk store")
    wanted = report.chunks[number]
    if later := [c for c in report.chunks[number + 1 :] if c.payloads]:
        found.cause = "gone"
        found.sentence = "it was stored once and is gone: later chunks of this prompt are stored"
        found.evidence.append(
            f"later chunks that are stored: {len(later)}, the first at token "
            f"{later[0].token_start:,}"
        )
        found.advice.append("the next replica that computes it saves it and completes the prefix")
        found.unknown.append("whether it expired, was swept, or its save was dropped")
        return found
    if extras := without_extras(
        question.index, question.identity, question.tokens, question.extras, number
    ):
        found.cause, found.sentence = "other_extras", extras
        found.advice.append("KV is shared only with the same cache_salt and adapter: use the same")
        return found
    others = find_elsewhere(
        question.bulk, question.index, question.identity, question.tokens, question.extras,
        token_end=wanted.token_end,
    )  # fmt: skip
    if others:
        _add_elsewhere(found, others)
        return found
    _add_siblings(question, number, found)
    return found


def _add_elsewhere(found: Findings, others: Sequence[Elsewhere]) -> None:
    best = others[0]
    found.cause = "elsewhere"
    found.sentence = (
        f"it is in another namespace: {best.namespace} has {best.tokens:,} tokens of this prompt; "
        f"{best.reason}"
    )
    found.evidence += [f"{one.namespace}: {one.tokens:,} tokens; {one.reason}" for one in others]
    found.advice.append("objkv diff shows each difference and how to remove it")


def _add_siblings(question: Question, number: int, found: Findings) -> None:
    report = question.report
    namespace, chunk = report.namespace, report.chunks[number]
    parent = report.chunks[number - 1].prefix_hash if number else root_hash(namespace)
    count = 0
    for scanned, record in enumerate(question.index.scan(namespace)):
        if scanned >= SCAN_MAX:
            found.unknown.append(
                f"whether other prompts continue here: only {SCAN_MAX:,} records were scanned"
            )
            break
        if record.parent_hash == parent and record.token_start == chunk.token_start:
            count += 1
    where = f"tokens {chunk.token_start:,}-{chunk.token_end:,}"
    if count:
        others = "1 other prompt starts" if not number else "1 other prompt continues"
        if count > 1:
            others = f"{count:,} other prompts {'continue' if number else 'start'}"
        found.cause = "diverged"
        found.sentence = (
            f"this prompt differs from the stored ones within {where}: {others} there with other "
            "tokens, salt or adapter"
        )
        found.advice.append(
            "a time, name or id makes every prompt different: move it behind the shared text, or "
            "compare the token ids of both prompts there"
        )
        found.unknown.append("at which token they differ")
    else:
        found.evidence.append(f"no other prompt continues there: no record of {where}")
        found.advice.append("send the prompt again or use objkv warm, then match again")
    found.unknown.append(
        "whether it was never saved, expired, or was swept: none of these leaves a trace"
    )


_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Missing:
    """The missing parts of one group."""

    group: int
    layers: tuple[str, ...]
    """Layers with a missing head, in forward order."""
    heads: tuple[int, ...]
    """Heads that are missing in at least one of these layers."""
    sentence: str


def describe_missing(identity: Identity, chunk: ChunkMatch) -> list[Missing]:
    """Return the missing parts of the incomplete groups."""
    return [_missing(g, identity.groups[g], chunk.payloads) for g in chunk.groups_missing]


def _missing(number: int, group: GroupIdentity, payloads: Sequence[str]) -> Missing:
    held = [shard for shard in shards_of(payloads, number) if shard is not None]
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
        return Missing(number, layers, heads, f"{kind} is missing")
    which = "all layers" if len(layers) == len(group.layers) else _some(layers)
    whose = "" if len(heads) == group.heads else f", heads {', '.join(map(str, heads))}"
    return Missing(number, layers, heads, f"{kind} lacks {which}{whose}")


def _some(layers: Sequence[str]) -> str:
    if len(layers) <= _NAMES_SHOWN:
        return ", ".join(layers)
    return f"{len(layers)} layers, {layers[0]} to {layers[-1]}"
