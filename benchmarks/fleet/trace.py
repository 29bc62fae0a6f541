"""The request trace, and how one hour of one population becomes the load of a fleet.

The trace is ``conversation_trace.jsonl``, published with *Mooncake: Trading More Storage for Less
Computation* (Qin et al., FAST '25; Apache-2.0) in the folder ``FAST25-release/traces`` of the
public repository kvcache-ai/Mooncake: 12,031 chat requests of one hour. Each line has ``timestamp``
(ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``: one id per 512 tokens, equal
where the block and all before it are equal. ``sample.jsonl`` has 399 of them: every conversation
(second block) that a hash picks with chance 1/30, over the whole hour, so that what is shared stays
shared.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

SAMPLE_FILE = Path(__file__).with_name("sample.jsonl")
BLOCK_TOKENS = 512
COMMON_SHARE = 0.1
"""A first block of more than this share of the requests is a system prompt: all tenants have it."""
_TICK_S = 3.0
"""The trace's clock: arrivals of one tick are spread over it; real ones do not come at once."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the trace, or one request as the fleet sees it. Equal ids in ``blocks``: equal
    prefixes."""

    at_s: float
    tokens: int
    blocks: tuple[int, ...]
    common: int
    """So many leading blocks are a system prompt, which all have; the rest belong to one tenant."""

    @property
    def conversation(self) -> int:
        """Its first block that is not common."""
        return self.blocks[min(self.common, len(self.blocks) - 1)]


@dataclass(frozen=True, slots=True)
class Population:
    """How often the trace is laid over itself to load a fleet.

    Each of ``copies`` is a tenant with conversations of its own, rotated in time by a random part
    of the span. Each copy has ``share`` of the conversations. Times are multiplied by ``stretch``.
    """

    copies: int
    stretch: float
    share: float


def read_trace(path: Path = SAMPLE_FILE) -> list[Request]:
    """Raises ``SystemExit`` with the reason if the file is not a trace."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        first = Counter(line["hash_ids"][0] for line in lines)
        common = {b for b, n in first.items() if n > max(1, COMMON_SHARE * len(lines))}
        return [
            Request(
                line["timestamp"] / 1000,
                line["input_length"],
                tuple(line["hash_ids"]),
                int(line["hash_ids"][0] in common),
            )
            for line in lines
        ]
    except (OSError, ValueError, LookupError, TypeError) as exc:
        raise SystemExit(f"{path}: not a request trace: {exc}") from exc


def span_s(requests: Sequence[Request]) -> float:
    """Seconds from the first arrival to the end of the last tick."""
    return max(request.at_s for request in requests) + _TICK_S


def reusable_share(requests: Sequence[Request]) -> float:
    """Share of prompt blocks that an infinite shared cache would have had."""
    blocks = sum(len(request.blocks) for request in requests)
    return 1 - len({block for request in requests for block in request.blocks}) / blocks


def arrivals(requests: Sequence[Request], population: Population) -> list[Request]:
    """All requests of all copies in the order of their arrival."""
    rng = random.Random(1)
    span = span_s(requests)
    offset = 1 + max(block for request in requests for block in request.blocks)
    out = []
    for copy in range(population.copies):
        turn = rng.random() * span if copy else 0.0
        for one in kept(requests, copy, population.share):
            at_s = (one.at_s + rng.random() * _TICK_S + turn) % span * population.stretch
            own = (block + copy * offset for block in one.blocks[one.common :])
            out.append(replace(one, at_s=at_s, blocks=(*one.blocks[: one.common], *own)))
    out.sort(key=lambda request: request.at_s)
    return out


def kept(requests: Sequence[Request], copy: int, share: float) -> list[Request]:
    """The requests of this share of the conversations: another choice in each copy."""
    return [
        request
        for request in requests
        if share >= 1 or _chance(request.conversation + (copy + 1) * 10**9) < share
    ]


def _chance(number: int) -> float:
    """The same for the same number in every run."""
    return int.from_bytes(hashlib.sha256(str(number).encode()).digest()[:6]) / 2**48
