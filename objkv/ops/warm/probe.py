"""Finds out where endpoints save: into which namespace, and whether it is this store at all.

Each computes a chunk that nobody can have stored, because its salt is made up on the spot; the
namespace in which that appears is the endpoint's. Nothing else tells it for certain: there may be
namespaces of the same model with other weights, another tenant or another layout, and a prompt that
is stored there helps nobody here.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep

from objkv.errors import ConfigError
from objkv.index.base import ReadIndex
from objkv.keys.identity import Identity
from objkv.ops.warm.asking import Ask, Asker, AskError
from objkv.ops.warm.stock import Stock, known_identities
from objkv.stores.base import ReadStore

SALT = "objkv-warm-"
"""How the salts of such chunks begin."""
_CHUNK_TOKENS = 256
"""Where nothing is stored yet: the usual chunk."""
_PAUSE_S, _BUSY_S = 0.1, 0.5
"""Between looks, and before it asks again who was busy."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Where to look, and how long."""

    bulk: ReadStore
    index: ReadIndex
    wait_s: float
    clock: Callable[[], float] = monotonic
    sleep: Callable[[float], None] = sleep

    def find(self, askers: Sequence[Asker], tokens: Sequence[int]) -> Identity:
        """The namespace of all of them.

        ``tokens``: of any prompt of theirs. Raises ``ConfigError`` if one saves elsewhere, or they
        do not share, and ``AskError``.
        """
        found = {asker.name: self._of(asker, tokens) for asker in askers}
        names = {identity.namespace() for identity in found.values()}
        if len(names) > 1:
            told = ", ".join(f"{name} {one.namespace()}" for name, one in found.items())
            raise ConfigError(
                f"the endpoints do not share: {told}; objkv diff says why, and each group of them "
                "is to be warmed by itself"
            )
        return next(iter(found.values()))

    def _of(self, asker: Asker, tokens: Sequence[int]) -> Identity:
        salt = SALT + secrets.token_hex(8)
        asked: list[int] = []
        longest = 0
        """Chunks that are longer than this were refused, or need not be asked for."""
        ends_s = self.clock() + self.wait_s
        while True:
            known = known_identities(self.bulk)
            wanted = max((one.chunk_tokens for one in known.values()), default=_CHUNK_TOKENS)
            if wanted > longest:
                sizes = {_CHUNK_TOKENS, *(one.chunk_tokens for one in known.values())}
                asked = self._ask(asker, tokens, salt, sorted(sizes, reverse=True))
                longest, ends_s = wanted, self.clock() + self.wait_s
                known = known_identities(self.bulk)  # it may have announced its own by now
            for identity in known.values():
                stock = Stock(self.index, identity)
                first = stock.hashes(asked[: identity.chunk_tokens], salt)
                if first and any(stock.find(first).nbytes):
                    return identity
            if self.clock() >= ends_s:
                raise ConfigError(
                    f"{asker.name} saved nothing here within {self.wait_s:.0f} s: does it run with "
                    "the objkv connector, does it save (kv_role, role, quota), and are bulk_url "
                    "and index_url the same here as there? objkv doctor shows what they are here; "
                    "its log has a line 'objkv ready'"
                )
            self.sleep(_PAUSE_S)

    def _ask(
        self, asker: Asker, tokens: Sequence[int], salt: str, sizes: Sequence[int]
    ) -> list[int]:
        """Have a chunk computed that is as long as the longest of ``sizes`` that it takes."""
        left, ends_s = list(sizes), self.clock() + self.wait_s
        while True:
            size = left[0]
            made = (list(tokens) * (size // len(tokens) + 1))[: size + 1]
            try:
                asker.ask(Ask(made, salt, None))
                return made
            except AskError as exc:
                if exc.trouble == "refused" and len(left) > 1:
                    left.pop(0)
                    continue
                pause_s = exc.after_s or _BUSY_S
                if exc.trouble == "refused" or self.clock() + pause_s >= ends_s:
                    raise
                self.sleep(pause_s)
