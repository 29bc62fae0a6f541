"""Measure how many blocks of a real trace a bounded cache finds under each eviction policy.

    python benchmarks/eviction.py [--trace conversation_trace.jsonl] [--json] [--plot FILE.svg]

Each request finds the longest stored prefix of its prompt and saves the rest. When the cache
exceeds its high watermark, ``objkv.cache.eviction.choose`` empties it to the low one with the
tested policy, like ``objkv sweep``; so every policy evicts the ends of prompts first. Capacities
are shares of all distinct blocks. objkv's policy was tuned on the first half of the trace, so
compare the second half.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a script: its folder would hide modules of Python's own
    sys.path[0] = str(Path(__file__).parents[1])

import xxhash

from benchmarks.fleet.trace import BLOCK_TOKENS, SAMPLE_FILE, Request, read_trace
from objkv.cache.eviction import Candidate, Policy, Worth, by_use, choose
from objkv.errors import pip_install

SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)
HIGH, LOW = 0.95, 0.85
HELD_OUT = "second half"
_ROOT = b"\0" * 20
_STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "objkv",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One part of the trace, one policy, one capacity."""

    part: str
    policy: str
    capacity: float
    """Share of all different blocks of the part; 1: all of them."""
    hit_share: float
    """Blocks that were found, of all that were asked for; each is 512 tokens."""
    evicted: int


@dataclass(slots=True)
class _Block:
    parent: bytes
    depth: int
    created_s: int
    touched_s: int = 0
    hits: int = 0


def lru(candidates: Sequence[Candidate], now_s: float) -> Worth:
    """What was used longest ago goes first."""
    return lambda one: float(one.used_s)


def lfu(candidates: Sequence[Candidate], now_s: float) -> Worth:
    """What was hit least goes first; of those, what was used longest ago."""
    return lambda one: one.hits + one.used_s / 1e12


def fifo(candidates: Sequence[Candidate], now_s: float) -> Worth:
    """What was saved first goes first."""
    return lambda one: float(one.created_s)


def at_random(candidates: Sequence[Candidate], now_s: float) -> Worth:
    """Another order each time, the same in every run."""
    seed = int(now_s)
    return lambda one: float(xxhash.xxh3_64_intdigest(one.prefix_hash, seed))


POLICIES: dict[str, Policy] = {
    "objkv": by_use,
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "random": at_random,
}


def replay(requests: Sequence[Request], capacity: float, policy: Policy) -> tuple[float, int]:
    """The share of blocks found, and how many were given up, in a cache of ``capacity`` blocks."""
    stored: dict[bytes, _Block] = {}
    found = asked = evicted = 0
    for request in requests:
        names = whole_blocks(request)
        now_s = int(request.at_s)
        hits = 0
        while hits < len(names) and names[hits] in stored:
            block = stored[names[hits]]
            block.hits, block.touched_s = block.hits + 1, now_s
            hits += 1
        found, asked = found + hits, asked + len(names)
        for depth in range(hits, len(names)):
            parent = names[depth - 1] if depth else _ROOT
            # What lies behind a gap is still there, and is found from now on.
            stored.setdefault(names[depth], _Block(parent, depth, now_s))
        if len(stored) > HIGH * capacity:
            free = len(stored) - int(LOW * capacity)
            gone = choose(_candidates(stored), free_bytes=free, now_s=now_s, policy=policy)
            evicted += len(gone)
            for one in gone:
                del stored[one.prefix_hash]
    return found / max(1, asked), evicted


def _candidates(stored: Mapping[bytes, _Block]) -> list[Candidate]:
    return [
        Candidate(
            prefix_hash=name,
            parent_hash=block.parent,
            token_start=block.depth * BLOCK_TOKENS,
            token_end=(block.depth + 1) * BLOCK_TOKENS,
            nbytes=1,
            hits=block.hits,
            touched_s=block.touched_s,
            created_s=block.created_s,
            pinned=False,
        )
        for name, block in stored.items()
    ]


def whole_blocks(request: Request) -> list[bytes]:
    """The blocks that a cache can hold: the last tokens of a prompt fill none."""
    return [b.to_bytes(20, "big") for b in request.blocks[: request.tokens // BLOCK_TOKENS]]


def measure(
    requests: Sequence[Request],
    *,
    parts: Sequence[str] = ("first half", HELD_OUT, "whole"),
    shares: Sequence[float] = SHARES,
    told: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """All policies at all capacities, and the cache that never gives anything up."""
    half = len(requests) // 2
    cuts = {"first half": requests[:half], HELD_OUT: requests[half:], "whole": requests}
    rows = []
    for part in parts:
        different = len({name for request in cuts[part] for name in whole_blocks(request)})
        share, _ = replay(cuts[part], float("inf"), lru)
        rows.append(Row(part, "infinite", 1.0, share, 0))
        told(rows[-1])
        for name, policy in POLICIES.items():
            for capacity in shares:
                share, evicted = replay(cuts[part], capacity * different, policy)
                rows.append(Row(part, name, capacity, share, evicted))
                told(rows[-1])
    return rows


def tables(rows: Sequence[Row]) -> str:
    """Per part: a line for each policy, a column for each capacity, in percent of blocks."""
    lines = []
    for part in dict.fromkeys(row.part for row in rows):
        here = [row for row in rows if row.part == part]
        shares = sorted({row.capacity for row in here if row.policy != "infinite"})
        lines += ["", f"{part}: share of blocks found", ""]
        lines.append("| policy | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
        lines.append("|---|" + "--:|" * len(shares))
        for policy in dict.fromkeys(row.policy for row in here):
            found = {row.capacity: row.hit_share for row in here if row.policy == policy}
            cells = [f"{100 * found.get(share, found.get(1.0, 0)):.2f} %" for share in shares]
            lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines[1:])


def plot(rows: Sequence[Row], path: Path) -> None:
    """Blocks found over capacity, of the second half. Raises ``SystemExit`` without matplotlib."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        plt: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as exc:
        raise SystemExit(f"plots need matplotlib: {pip_install('plot')}") from exc
    plt.rcParams.update(_STYLE)
    here = [row for row in rows if row.part == HELD_OUT]
    figure, axes = plt.subplots(figsize=(7, 4))
    for policy in POLICIES:
        line = sorted((r.capacity, 100 * r.hit_share) for r in here if r.policy == policy)
        axes.plot([x for x, _ in line], [y for _, y in line], marker="o", label=policy)
    infinite = next(row.hit_share for row in here if row.policy == "infinite")
    axes.axhline(100 * infinite, color="grey", linestyle=":", label="infinite")
    axes.set_xscale("log")
    axes.set_xticks(SHARES, [f"{share:.0%}" for share in SHARES])
    axes.minorticks_off()
    axes.set_xlabel("capacity, share of all different blocks")
    axes.set_ylabel("blocks found, %")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, default=SAMPLE_FILE, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    options = parser.parse_args(arguments)
    rows = measure(
        read_trace(options.trace),
        told=lambda row: print(row, file=sys.stderr, flush=True),
    )
    if options.plot:
        plot(rows, options.plot)
    print(json.dumps([asdict(row) for row in rows], indent=1) if options.json else tables(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
