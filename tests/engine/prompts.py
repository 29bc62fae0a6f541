"""Prompts for tiny models: token ids from a seed."""

import random

from tests.engine.job import Prompt
from tests.engine.model import VOCABULARY

_SPECIAL = 3
"""Ids below have a meaning (begin, end, padding)."""


def tokens_of(length: int, *, seed: int = 0) -> tuple[int, ...]:
    """``length`` token ids; those of one seed continue each other: shorter ones are prefixes."""
    source = random.Random(seed)
    return tuple(source.randrange(_SPECIAL, VOCABULARY) for _ in range(length))


def prompt_of(length: int, *, seed: int = 0, max_tokens: int = 8) -> Prompt:
    """A prompt of ``length`` tokens; see ``tokens_of``."""
    return Prompt(tokens=tokens_of(length, seed=seed), max_tokens=max_tokens)
