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
from dataclasses import dataclass
from pathlib import Path

SAMPLE_FILE = Path(__file__).with_name("sample.jsonl")
BLOCK_TOKENS = 512
COMMON_SHARE = 0.1
"""A first block of more than this share of the requests is a system prompt: all tenants have it."""
_TICK_S = 3.0
"""The trace's clock: arrivals of one tick are spread over it; real ones do not come at once."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the trace."""

    at_s: float
    tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as the fleet sees it. Equal ids in ``blocks``: equal prefixes."""

    at_s: float
    tokens: int
    blocks: tuple[int, ...]
    conversation: int
    common: int
    """So many leading blocks are everybody's; the rest belong to one tenant."""


@dataclass(frozen=True, slots=True)
class Population:
    """How often the trace is laid over itself to load a fleet.

    Each of ``copies`` is a tenant with conversations of its own, rotated in time by a random part
    of the span. Each copy has ``share`` of the conversations. Times are multiplied by ``stretch``.
    """

    copies: int
    stretch: float
    seed: int
    share: float = 1.0


def read_trace(path: Path = SAMPLE_FILE) -> list[Request]:
    """Raises ``SystemExit`` with the reason if the file is not a trace."""
    requests = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                raw = json.loads(line)
                blocks = tuple(raw["hash_ids"])
                if len(blocks) != -(-raw["input_length"] // BLOCK_TOKENS):
                    raise ValueError(f"{len(blocks)} blocks for {raw['input_length']} tokens")
                requests.append(Request(raw["timestamp"] / 1000, raw["input_length"], blocks))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise SystemExit(f"{path}: not a request trace: {exc}") from exc
    if not requests:
        raise SystemExit(f"{path}: not a request trace: it is empty")
    return requests


def span_s(requests: Sequence[Request]) -> float:
    """Seconds from the first arrival to the end of the last tick."""
    return max(request.at_s for request in requests) + _TICK_S


def reusable_share(requests: Sequence[Request]) -> float:
    """Share of prompt blocks that an infinite shared cache would have had."""
    blocks = sum(len(request.blocks) for request in requests)
    return 1 - len({block for request in requests for block in request.blocks}) / blocks


def common_blocks(requests: Sequence[Request]) -> frozenset[int]:
    """First blocks that so many requests begin with that they must be a system prompt."""
    first = Counter(request.blocks[0] for request in requests if request.blocks)
    return frozenset(b for b, n in first.items() if n > max(1, COMMON_SHARE * len(requests)))


def arrivals(requests: Sequence[Request], population: Population) -> list[Arrival]:
    """All requests of all copies in the order of their arrival."""
    rng = random.Random(population.seed)
    span, common = span_s(requests), common_blocks(requests)
    offset = 1 + max(block for request in requests for block in request.blocks)
    out = []
    for copy in range(population.copies):
        turn = rng.random() * span if copy else 0.0
        for request in kept(requests, copy, population.share):
            at_s = (request.at_s + rng.random() * _TICK_S + turn) % span * population.stretch
            out.append(_arrival(request, at_s, copy * offset, common))
    out.sort(key=lambda arrival: arrival.at_s)
    return out


def kept(requests: Sequence[Request], copy: int, share: float) -> list[Request]:
    """The requests of this share of the conversations: another choice in each copy."""
    common = common_blocks(requests)
    return [
        request
        for request in requests
        if share >= 1 or _chance(_conversation(request, common) + (copy + 1) * 10**9) < share
    ]


def _conversation(request: Request, common: frozenset[int]) -> int:
    """Its first block that is not everybody's."""
    head = 1 if request.blocks[0] in common else 0
    return request.blocks[min(head, len(request.blocks) - 1)]


def _arrival(request: Request, at_s: float, offset: int, common: frozenset[int]) -> Arrival:
    head = 1 if request.blocks[0] in common else 0
    conversation = _conversation(request, common)
    own = tuple(block + offset for block in request.blocks[head:])
    blocks = request.blocks[:head] + own
    return Arrival(at_s, request.tokens, blocks, conversation + offset, head)


def _chance(number: int) -> float:
    """The same for the same number in every run."""
    return int.from_bytes(hashlib.sha256(str(number).encode()).digest()[:6]) / 2**48
