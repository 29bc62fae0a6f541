"""What is asked of a match that stopped, and what is answered: plain values."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from objkv.codec.seal import Seal
from objkv.index.base import ReadIndex
from objkv.keys.identity import Identity
from objkv.keys.prefix import PromptExtras
from objkv.ops.match import MatchReport
from objkv.stores.base import ReadStore

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
