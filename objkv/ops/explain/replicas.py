"""What replicas tell of loads that they did not make, and of saves that they dropped.

Their counters are of all requests since they started, and not of one prompt: they can say that a
replica refuses matches, never that it refused this one.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from math import isfinite
from time import monotonic
from typing import Final

from objkv.config.urls import without_password
from objkv.errors import ConfigError
from objkv.ops.top.scrape import MetricsSource
from objkv.redact import without_secrets

_PREFIX: Final = "vllm_objkv_"
_TOLD: Final = {
    "admission_refused": "{n} matches not loaded, because computing was measured to be sooner",
    "admission_cut": "{n} matches of which a tail was not loaded, for the same reason",
    "load_failures": "{n} loads of which something was computed after all",
    "load_refused": "{n} chunks not loaded, because the queue was full",
    "lookup_errors": "{n} lookups that the index did not answer",
    "lookup_deadlines": "{n} lookups that took too long",
    "lookup_refused": "{n} lookups not made, because the queue was full",
    "save_drops": "{n} chunks not saved: no slab, queue full, or too late",
    "save_errors": "{n} chunks not saved, because a store failed",
    "saves_shed": "{n} chunks not saved, because the store was left alone or asked too much",
    "save_over_quota": "{n} chunks not saved, because the quota is used up",
    "publish_errors": "{n} payloads saved, but not announced",
    "adapters_unknown": "{n} requests not shared, because their adapter cannot be told",
}


@dataclass(frozen=True, slots=True)
class ReplicaTold:
    """One replica's counters, since it started."""

    endpoint: str
    """Its address, without a password."""
    counters: dict[str, int]
    """Of those that mean something was not loaded or not saved, the ones above 0."""
    sentences: tuple[str, ...]
    problem: str | None
    """Why nothing could be read, if so."""


def ask_replica(
    endpoint: str, *, deadline_s: float = 5.0, clock: Callable[[], float] = monotonic
) -> ReplicaTold:
    """Read ``endpoint``'s metrics: its base address, or that of its metrics. Raises
    ``ConfigError`` for what is no address."""
    try:
        source = MetricsSource(endpoint, deadline_s=deadline_s, clock=clock, is_exact=True)
    except ConfigError as exc:
        raise ConfigError(f"--{exc}") from None
    with closing(source):
        found = source.scrape()
    shown = without_secrets(without_password(endpoint))
    if found.problem is not None:
        why = found.problem.removeprefix("no metrics: ")
        return ReplicaTold(shown, {}, (), f"no metrics: {why}")
    if not any(name.startswith(_PREFIX) for name in found.values):
        return ReplicaTold(shown, {}, (), "it has no metrics of objkv: is its connector loaded?")
    sums = {name: found.values.get(f"{_PREFIX}{name}_total", 0.0) for name in _TOLD}
    counters = {name: int(value) for name, value in sums.items() if value and isfinite(value)}
    sentences = tuple(_TOLD[name].format(n=f"{count:,}") for name, count in counters.items())
    return ReplicaTold(shown, counters, sentences, None)
