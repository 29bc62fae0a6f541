"""What things cost: models, stores, Redis and nodes, read from ``costs.toml``.

All times are seconds, all sizes bytes, all prices US dollars. Values are only as good as the
sources that the file names beside them.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COSTS_FILE = Path(__file__).with_name("costs.toml")


@dataclass(frozen=True, slots=True)
class Model:
    """One model on its GPUs: one replica."""

    layers: int
    kv_elements: int
    element_bytes: int
    active_params: float
    attention_width: int
    ranks: int
    gpus: int
    peak_flops: float
    utilisation: float
    gpu_cache_bytes: float
    replicas_per_host: int
    source: str

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token, over all ranks."""
        return self.layers * self.kv_elements * self.element_bytes

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds to compute tokens ``[start, end)`` with the KV of what is before them."""
        assert 0 <= start <= end
        linear = 2 * self.active_params * (end - start)
        quadratic = 2 * self.layers * self.attention_width * (end * end - start * start)
        return (linear + quadratic) / (self.gpus * self.peak_flops * self.utilisation)


@dataclass(frozen=True, slots=True)
class Bulk:
    """One bulk store as one connection sees it, its list prices and its limits."""

    first_byte_s: float
    connection_bytes_s: float
    put_usd: float
    get_usd: float
    gb_month_usd: float
    prefix_puts_s: float
    prefix_gets_s: float
    source: str
    put_gb_usd: float = 0.0
    get_gb_usd: float = 0.0


@dataclass(frozen=True, slots=True)
class Redis:
    """One primary and the way to it."""

    round_trip_s: float
    lookup_s: float
    touch_s: float
    save_command_s: float
    record_bytes: int
    client_s_per_chunk: float
    source: str


@dataclass(frozen=True, slots=True)
class Node:
    """A machine and its agent."""

    memory_bytes: float
    fetch_bytes_s: float
    """Of the agent's gets, verified; likewise the next of its puts and of its disk."""
    put_bytes_s: float
    disk_bytes_s: float
    disk_usd_tb: float
    """Wear: a drive's price over the terabytes that it may be written."""
    arena_bytes_s: float
    """Of one worker that loads from the arena."""
    nic_bytes_s: float
    gpu_hour_usd: float
    source: str


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything in the file."""

    models: dict[str, Model]
    bulk: dict[str, Bulk]
    redis: Redis
    node: Node


def read_costs() -> Costs:
    """Read the file. Raises what ``tomllib`` does, and ``TypeError`` for a field too many."""
    raw: dict[str, Any] = tomllib.loads(COSTS_FILE.read_text(encoding="utf-8"))
    return Costs(
        {name: Model(**values) for name, values in raw["models"].items()},
        {name: Bulk(**values) for name, values in raw["bulk"].items()},
        Redis(**raw["redis"]),
        Node(**raw["node"]),
    )
