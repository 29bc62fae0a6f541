"""Which chunks to give up when a quota is reached: a pure function of what the index tells.

A chunk is of use only together with all that come before it in its prompt, so chains lose their
ends first.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One chunk of one namespace, as far as giving it up goes."""

    prefix_hash: bytes
    parent_hash: bytes
    token_start: int
    token_end: int
    nbytes: int
    """Of all its payloads."""
    hits: int
    touched_s: int
    created_s: int
    pinned: bool


def choose(candidates: Iterable[Candidate], *, free_bytes: int, now_s: float) -> list[Candidate]:
    """What to give up, in this order, until ``free_bytes`` are free, or all that may go is gone.

    No chunk is given up before every chunk that continues it; none that is pinned, or that a
    pinned one continues. The same candidates in any order give the same answer.
    """
    raise NotImplementedError
