"""Which payloads an agent puts at once, by namespace, from what its replicas measure.

Replicas report the computing time of what they loaded (``Savings``), and hand over one payload for
each rank and group of a chunk.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from time import monotonic
from typing import Final

from objkv.cache.speed import Typical
from objkv.cache.worth import Decision, PutRule
from objkv.codec.payload import Claim
from objkv.index.base import Savings

logger = logging.getLogger(__name__)
SETTLED_S: Final = 1.0
"""Ranks hand the payloads of a chunk over one after the other: how many it has is known once no
other kind has come for this time."""
_NAMESPACES_MAX: Final = 64
_FIELDS_MAX: Final = 4096
_US: Final = 1e6


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
    """Thread-safe. Never waits."""

    def __init__(self, rule: PutRule, *, clock: Callable[[], float] = monotonic) -> None:
        self.rule = rule
        self._clock = clock
        self._lock = Lock()
        self._namespaces: dict[str, _Namespace] = {}

    def holds_back(self, claim: Claim, nbytes: int) -> bool:
        """Return whether this payload, of ``nbytes``, is held back when a replica hands it over."""
        if self.rule.is_fixed:
            return self.rule.may_hold_back
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
        """A replica has measured what a load saved."""
        if self.rule.is_fixed or savings.timed_tokens <= 0:
            return
        with self._lock:
            one = self._of(savings.namespace)
            one.token.observe(savings.timed_tokens, savings.compute_gpu_us / _US)
            if math.isinf(one.decided_from):
                one.decided_from = -math.inf  # at the next payload

    def decisions(self) -> dict[str, Decision]:
        """Return what was decided last, by namespace; of an empty name, if the settings alone
        decide."""
        if self.rule.is_fixed:
            return {"": replace(self.rule.decide(self.rule.chunk(())), break_even=None)}
        with self._lock:
            found = {name: one.decision for name, one in self._namespaces.items()}
        return {name: decision for name, decision in found.items() if decision is not None}

    def __repr__(self) -> str:
        return f"<PutPolicy {self.rule.setting}, {len(self._namespaces)} namespaces>"

    def _of(self, namespace: str) -> _Namespace:
        while len(self._namespaces) >= _NAMESPACES_MAX and namespace not in self._namespaces:
            del self._namespaces[next(iter(self._namespaces))]
        return self._namespaces.setdefault(namespace, _Namespace())

    def _decide(self, namespace: str, one: _Namespace) -> None:
        token_s, before = one.token.seconds_per_unit, one.decision
        chunk = self.rule.chunk(
            one.payloads.values(), None if token_s is None else token_s * one.tokens
        )
        found = self.rule.decide(chunk, "reused" if before is None else before.puts)
        one.decision, one.decided_from = found, math.inf
        if before is None or found.puts != before.puts:
            logger.info("save_to_bucket decided namespace=%s %s", namespace, found)
