"""Answers a router's question, which prefix of a prompt is stored, from a few queries of the index.

Names and identities are kept for half a minute. So a prompt that is stored whole costs one round
trip; for any other, ``PartsIndex`` reads one record more.
"""

import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

from objkv.background import at_once
from objkv.cache.lookup import PartsIndex
from objkv.cache.match import covered, usable_chunks
from objkv.client.results import Match, MatchEnd
from objkv.errors import ConfigError, StoreError
from objkv.index.base import ReadIndex, Shards
from objkv.index.fields import are_hot
from objkv.keys.identity import GroupIdentity, Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.ops.backends_view import read_identity
from objkv.ops.listing import find_namespace
from objkv.stores.base import ReadStore

T = TypeVar("T")
_KEEP_S = 30.0
_COVERED_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Known:
    """A namespace that can be matched."""

    name: str
    identity: Identity


class Matcher:
    """Matches prompts. Safe from many threads. Raises ``StoreError`` and ``ConfigError``."""

    def __init__(
        self, bulk: ReadStore, index: ReadIndex, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._bulk = bulk
        self._index = index
        self._known: _Kept[Known] = _Kept(clock)
        self._covered: dict[Hashable, bool] = {}

    def known(self, namespace: str | None) -> Known:
        """Return the namespace called ``namespace``, or the only one. See ``find_namespace``."""
        return self._known.get(namespace, lambda: self._find(namespace))

    def match(self, known: Known, tokens: Sequence[int], extras: PromptExtras) -> Match:
        """Return the stored prefix of ``tokens``."""
        identity, size = known.identity, known.identity.chunk_tokens
        hashes = prefix_hashes(known.name, tokens, size, extras)
        is_covered, groups = self._is_covered(known.name), identity.groups

        def is_stored(shards: Shards) -> bool:
            return all(is_covered(shards, number, group) for number, group in enumerate(groups))

        index = PartsIndex(self._index, is_stored, again_s=0)
        fields = [str(number) for number in range(len(groups))]
        found = at_once(index.find(known.name, hashes, fields)) if hashes else []
        usable = usable_chunks(found, groups, size, is_covered)
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
