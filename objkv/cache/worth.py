"""Decides whether it pays to put each payload into the bucket, or only those that recur.

A put costs its requests and the storage until the payload expires, and saves the GPU time of its
chunk each time that this is read again. The *break-even* is how often a saved chunk has to be read
again, on average, to pay: about a quarter of them is (``docs/scaling.md``).
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock
from time import monotonic
from typing import Final, Literal, Self

from objkv.cache.speed import Typical
from objkv.codec.values import Claim
from objkv.config import Config
from objkv.config.prices import Prices, prices_of
from objkv.index.base import Savings

logger = logging.getLogger(__name__)
ALL_BELOW: Final = 0.25
REUSED_ABOVE: Final = 0.35
SWEEP_WAIT_S: Final = 1_800
"""How long an expired payload is stored on average, if a sweep runs each hour."""
_MONTH_S: Final = 730 * 3_600
_HOUR_S: Final = 3_600
SETTLED_S: Final = 1.0
"""The payloads of a chunk's groups come one by one: all have come once none has for this time."""
_NAMESPACES_MAX: Final = 64
_FIELDS_MAX: Final = 4096
_US: Final = 1e6
Puts = Literal["all", "reused"]


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """What one chunk takes, over all groups."""

    puts: int
    nbytes: int
    gpu_s: float | None = None
    """Seconds to compute it, times the GPUs of a replica; None while it is not known."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which payloads are put, and why."""

    puts: Puts
    break_even: float | None
    """None while it is not known."""
    reason: str

    def __str__(self) -> str:
        return f"{self.puts}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PutRule:
    """The settings that decide."""

    setting: Literal["auto", "all", "reused"]
    prices: Prices
    life_s: float
    """How long a payload is stored."""
    has_disk: bool = False
    """Whether what is not put is kept on a disk of the agent's."""

    @classmethod
    def of(cls, config: Config) -> Self:
        life_s = max(config.ttl_s, config.sweep_grace_s) + SWEEP_WAIT_S
        return cls(
            config.save_to_bucket, prices_of(config), life_s, config.agent_disk_url is not None
        )

    @property
    def is_fixed(self) -> bool:
        """Whether the settings alone decide, whatever is measured."""
        return self.setting != "auto" or self.prices.is_free or self.has_disk

    @property
    def may_hold_back(self) -> bool:
        """Whether any payload may be held back; each is, if that ``is_fixed``."""
        return self.setting == "reused" or (self.setting == "auto" and not self.prices.is_free)

    def cost_usd(self, chunk: ChunkCost) -> float:
        """Of putting and storing a chunk."""
        prices, nbytes = self.prices, chunk.nbytes / 1e9
        storage = nbytes * prices.gb_month * self.life_s / _MONTH_S
        return chunk.puts * prices.per_1000_puts / 1000 + nbytes * prices.put_gb + storage

    def break_even(self, chunk: ChunkCost) -> float | None:
        """Return how often a saved chunk has to be read to pay; None if that is not known."""
        cost = self.cost_usd(chunk)
        if not cost:
            return 0.0
        if chunk.gpu_s is None:
            return None
        saved = chunk.gpu_s / _HOUR_S * (self.prices.gpu_hour or 0.0)
        return cost / saved if saved else math.inf

    def gpu_s_for_all(self, chunk: ChunkCost) -> float:
        """Return the GPU time of a chunk above which ``auto`` puts all."""
        worth_s = ALL_BELOW * (self.prices.gpu_hour or 0.0) / _HOUR_S
        return self.cost_usd(chunk) / worth_s if worth_s else math.inf

    def decide(self, chunk: ChunkCost, before: Puts = "reused") -> Decision:
        """Return what is put of such chunks: between the two limits, what was ``before``."""
        share = self.break_even(chunk)
        if self.setting != "auto":
            return Decision(self.setting, share, "save_to_bucket says so")
        if self.prices.is_free:
            return Decision("all", 0.0, f"{self.prices.source}: no price")
        if self.has_disk:
            return Decision("reused", share, "agent_disk_url keeps the rest")
        if share is None:
            return Decision("reused", None, "the GPU time of a chunk is not known yet")
        found: Puts = "all" if share < ALL_BELOW else "reused" if share > REUSED_ABOVE else before
        reason = f"to pay, {share:.2f} of the chunks must be read again"
        return Decision(found, share, f"{reason}, at prices of {self.prices.source}")


class _Namespace:
    def __init__(self) -> None:
        self.payloads: dict[str, int] = {}
        """Bytes of each payload of a chunk, by field."""
        self.tokens = 0
        self.token = Typical()
        """GPU time of a token."""
        self.decided_from = 0.0
        """When what the decision depends on is complete; infinite once it is decided."""
        self.decision: Decision | None = None


class PutPolicy:
    """Decides by namespace, from the computing time that replicas report (``Savings``), and from
    the payloads of a chunk that they hand over. Thread-safe. Never waits."""

    def __init__(self, rule: PutRule, *, clock: Callable[[], float] = monotonic) -> None:
        self.rule = rule
        self._holds_all = rule.may_hold_back if rule.is_fixed else None
        self._clock = clock
        self._lock = Lock()
        self._namespaces: dict[str, _Namespace] = {}

    def holds_back(self, claim: Claim, nbytes: int) -> bool:
        """Return whether this payload is held back when a replica hands it over."""
        if self._holds_all is not None:
            return self._holds_all
        key, now = claim.key, self._clock()
        with self._lock:
            one = self._of(key.namespace)
            if key.field not in one.payloads and len(one.payloads) < _FIELDS_MAX:
                one.payloads[key.field] = nbytes
                one.tokens = max(one.tokens, claim.token_end - claim.token_start)
                one.decided_from = now + SETTLED_S
            elif now >= one.decided_from:
                self._decide(key.namespace, one)
            return one.decision is None or one.decision.puts == "reused"

    def credited(self, savings: Savings) -> None:
        if self.rule.is_fixed or savings.timed_tokens <= 0:
            return
        with self._lock:
            one = self._of(savings.namespace)
            one.token.observe(savings.timed_tokens, savings.compute_gpu_us / _US)
            if math.isinf(one.decided_from):
                one.decided_from = -math.inf  # at the next payload

    def decisions(self) -> dict[str, Decision]:
        """Return the last decisions, by namespace, empty if the settings alone decide."""
        if self.rule.is_fixed:
            return {"": replace(self.rule.decide(ChunkCost(0, 0)), break_even=None)}
        with self._lock:
            found = {name: one.decision for name, one in self._namespaces.items()}
        return {name: decision for name, decision in found.items() if decision is not None}

    def _of(self, namespace: str) -> _Namespace:
        while len(self._namespaces) >= _NAMESPACES_MAX and namespace not in self._namespaces:
            del self._namespaces[next(iter(self._namespaces))]
        return self._namespaces.setdefault(namespace, _Namespace())

    def _decide(self, namespace: str, one: _Namespace) -> None:
        token_s, before = one.token.seconds_per_unit, one.decision
        gpu_s = None if token_s is None else token_s * one.tokens
        chunk = ChunkCost(len(one.payloads), sum(one.payloads.values()), gpu_s)
        found = self.rule.decide(chunk, "reused" if before is None else before.puts)
        one.decision, one.decided_from = found, math.inf
        if before is None or found.puts != before.puts:
            logger.info("save_to_bucket decided namespace=%s %s", namespace, found)
