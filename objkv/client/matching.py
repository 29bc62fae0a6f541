"""Answers a router's question, which prefix of a prompt is stored, from one query of the index.

The query reads only the shards in use, which each namespace's replicas announce, because reading
whole records takes ten times as long. Names, identities and announced shards are kept for half a
minute, so most answers cost one round trip.
"""

import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

from objkv.cache.match import covered, usable_chunks
from objkv.client.results import Match, MatchEnd
from objkv.errors import ConfigError, StoreError
from objkv.index.base import ReadIndex, Shards
from objkv.index.fields import are_hot
from objkv.index.shapes import FIELDS_MAX, SHAPES_HASH
from objkv.keys.identity import GroupIdentity, Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.ops.backends_view import read_identity
from objkv.ops.listing import find_namespace
from objkv.stores.base import ReadStore

T = TypeVar("T")
_KEEP_S = 30.0
"""As long as replicas may be unaware of a shape that is new to the fleet."""
_COVERED_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Known:
    """A namespace that can be matched."""

    name: str
    identity: Identity


class Matcher:
    """Matches prompts. Safe from many threads. Raises ``StoreError`` and ``ConfigError``."""

    def __init__(
        self,
        bulk: ReadStore,
        index: ReadIndex,
        *,
        ttl_s: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``ttl_s``: age after which an announced shard is no longer in use."""
        self._bulk = bulk
        self._index = index
        self._ttl_s = ttl_s
        self._clock = clock
        self._known: _Kept[Known] = _Kept(clock)
        self._fields: _Kept[tuple[str, ...]] = _Kept(clock)
        self._covered: dict[Hashable, bool] = {}

    def known(self, namespace: str | None) -> Known:
        """Return the namespace called ``namespace``, or the only one. See ``find_namespace``."""
        return self._known.get(namespace, lambda: self._find(namespace))

    def match(self, known: Known, tokens: Sequence[int], extras: PromptExtras) -> Match:
        """Return the stored prefix of ``tokens``, after one round trip."""
        identity, size = known.identity, known.identity.chunk_tokens
        hashes = prefix_hashes(known.name, tokens, size, extras)
        found = self._found(known.name, hashes) if hashes else []
        usable = usable_chunks(found, identity.groups, size, self._is_covered(known.name))
        hot = sum([one is not None and are_hot(one) for one in found[:usable]])
        return Match(
            namespace=known.name,
            model=identity.model,
            chunk_tokens=size,
            prompt_tokens=len(tokens),
            tokens=usable * size,
            hot_tokens=hot * size,
            chunks=usable,
            prompt_chunks=len(hashes),
            end=_end(found, usable),
        )

    def _found(self, namespace: str, hashes: Sequence[bytes]) -> list[Shards | None]:
        if fields := self._fields.get(namespace, lambda: self._in_use(namespace)):
            return self._index.find(namespace, hashes, fields)
        records = self._index.lookup(namespace, hashes)
        return [None if record is None else record.shards for record in records]

    def _in_use(self, namespace: str) -> tuple[str, ...]:
        """Return the announced fields; none if the announcement was lost with the index."""
        [record] = self._index.lookup(namespace, [SHAPES_HASH])
        since_s = self._clock() - self._ttl_s
        shards = {} if record is None else record.shards
        alive = [field for field, shard in shards.items() if shard.created_s > since_s]
        youngest = sorted(alive, key=lambda field: (-shards[field].created_s, field))
        return tuple(sorted(youngest[:FIELDS_MAX]))

    def _find(self, wanted: str | None) -> Known:
        name = find_namespace(self._bulk, self._index, wanted)
        identity = read_identity(self._bulk, name)
        if identity is None:
            raise ConfigError(
                f"the bulk store has no {name}/identity.json; either no replica has saved there, "
                "or bulk_url and index_url do not belong together"
            )
        return Known(name, identity)

    def _is_covered(self, namespace: str) -> Callable[[Shards, int, GroupIdentity], bool]:
        """Return ``covered`` with a memory: most chunks have the same shards."""
        memory = self._covered

        def is_covered(shards: Shards, group_id: int, group: GroupIdentity) -> bool:
            key = (namespace, group_id, *shards)
            try:
                return memory[key]
            except KeyError:
                if len(memory) >= _COVERED_MAX:
                    memory.clear()
                return memory.setdefault(key, covered(shards, group_id, group))

        return is_covered


def encoded(tokens: Sequence[int]) -> "array[int]":
    """Return token ids in the form that is hashed fastest. Raises ``ConfigError``."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        found = tokens
    else:
        found = array("I")
        try:
            found.fromlist(tokens if isinstance(tokens, list) else list(tokens))
        except (TypeError, ValueError, OverflowError) as exc:
            raise ConfigError(
                f"a prompt in token ids must be a sequence of integers below 2**32: {exc}"
            ) from None
    if not found:
        raise ConfigError("the prompt is empty (no token ids)")
    return found


def _end(found: Sequence[Shards | None], usable: int) -> MatchEnd:
    if usable == len(found):
        return "complete" if found else "short"
    if found[usable]:
        return "incomplete"
    return "gap" if any(found[usable + 1 :]) else "missing"


class _Kept(Generic[T]):
    """Values by name, each read again after ``_KEEP_S``. One thread reads it again while the others
    use the old value. If that fails with a ``StoreError``, the old value stays."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        self._values: dict[str | None, tuple[float, T]] = {}

    def get(self, name: str | None, read: Callable[[], T]) -> T:
        """Return the value called ``name``, from ``read`` if it is old or unknown."""
        now = self._clock()
        kept = self._values.get(name)
        # An end beyond the maximum means that the clock was set back meanwhile.
        if kept is not None and now < kept[0] <= now + _KEEP_S:
            return kept[1]
        if kept is None:
            value = read()
        elif self._lock.acquire(blocking=False):
            try:
                value = read()
            except StoreError:
                value = kept[1]
            finally:
                self._lock.release()
        else:
            return kept[1]
        self._values[name] = (now + _KEEP_S, value)
        return value
