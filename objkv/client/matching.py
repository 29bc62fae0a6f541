"""Answers a router's question, which prefix of a prompt is stored, from a few queries of the index.

Names and identities are kept for half a minute. So a prompt that is stored whole costs one round
trip; for any other, ``OtherShapesIndex`` reads one record more.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from threading import Lock

from objkv.background import at_once
from objkv.cache.lookup import OtherShapesIndex
from objkv.cache.match import covered, usable_chunks
from objkv.client.results import Match, MatchEnd
from objkv.errors import ConfigError, StoreError
from objkv.index.base import ReadIndex, ShardRecords
from objkv.index.fields import are_hot
from objkv.keys.identity import GroupIdentity, Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.ops.listing import find_identity
from objkv.stores.base import ReadStore

_KEEP_S = 30.0


class Matcher:
    """Matches prompts. Safe from many threads. Raises ``StoreError`` and ``ConfigError``."""

    def __init__(
        self, bulk: ReadStore, index: ReadIndex, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._bulk = bulk
        self._index = index
        self._clock = clock
        self._lock = Lock()
        self._known: dict[str | None, tuple[float, tuple[str, Identity]]] = {}
        """By the name asked for, with the time until which it is used without another look."""

    def known(self, namespace: str | None) -> tuple[str, Identity]:
        """Return name and identity of the namespace called ``namespace``, or of the only one. They
        are read again after ``_KEEP_S``, by one thread while the others use the old ones, which
        stay if that fails with a ``StoreError``."""
        now, kept = self._clock(), self._known.get(namespace)
        # An end beyond the maximum means that the clock was set back meanwhile.
        if kept is not None and now < kept[0] <= now + _KEEP_S:
            return kept[1]
        if kept is None:
            found = self._find(namespace)
        elif self._lock.acquire(blocking=False):
            try:
                found = self._find(namespace)
            except StoreError:
                found = kept[1]
            finally:
                self._lock.release()
        else:
            return kept[1]
        self._known[namespace] = (now + _KEEP_S, found)
        return found

    def match(self, namespace: str | None, tokens: Sequence[int], extras: PromptExtras) -> Match:
        """Return the stored prefix of ``tokens`` in the namespace called ``namespace``."""
        name, identity = self.known(namespace)
        groups, size = identity.groups, identity.chunk_tokens
        hashes = prefix_hashes(name, tokens, size, extras)
        memory: dict[tuple[object, ...], bool] = {}

        def is_covered(shards: ShardRecords, number: int, group: GroupIdentity) -> bool:
            key = number, *shards  # most chunks have the same fields
            if (found := memory.get(key)) is None:
                found = memory[key] = covered(shards, number, group)
            return found

        def is_stored(shards: ShardRecords) -> bool:
            return all(is_covered(shards, number, group) for number, group in enumerate(groups))

        index = OtherShapesIndex(self._index, is_stored, again_s=0)
        fields = [str(number) for number in range(len(groups))]
        found = at_once(index.find(name, hashes, fields)) if hashes else []
        usable = usable_chunks(found, groups, size, is_covered)
        hot = sum([are_hot(shards) for shards in found[:usable] if shards is not None])
        return Match(
            namespace=name,
            model=identity.model,
            chunk_tokens=size,
            prompt_tokens=len(tokens),
            tokens=usable * size,
            hot_tokens=hot * size,
            chunks=usable,
            prompt_chunks=len(hashes),
            end=_end(found, usable),
        )

    def _find(self, namespace: str | None) -> tuple[str, Identity]:
        identity = find_identity(self._bulk, self._index, namespace)
        return identity.namespace(), identity


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


def _end(found: Sequence[ShardRecords | None], usable: int) -> MatchEnd:
    if usable == len(found):
        return "complete" if found else "short"
    if found[usable]:
        return "incomplete"
    return "gap" if any(found[usable + 1 :]) else "missing"
