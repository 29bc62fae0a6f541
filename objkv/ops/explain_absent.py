"""Of a chunk that neither end knows: what stands around it, and so what became of it."""

from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Final

from objkv.errors import PayloadError
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import prefix_hashes, root_hash
from objkv.ops.ends import record_keys, stored_header
from objkv.ops.explain_elsewhere import Elsewhere, find_elsewhere, without_extras
from objkv.ops.explanation import Findings, Question

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
