"""A cache of records in this process, so that hot prefixes are found without a round trip.

A record is believed for a while. That a chunk is not stored is believed for much less: only so long
that many requests with one new prompt ask once.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from objkv.index.base import ChunkEntry, ShardRecord, Shards, WriteIndex
from objkv.index.guarded import GuardedIndex

SETTLE_S = 5
"""Records with a younger shard are not kept: other ranks may still be adding theirs. The
writers' clocks decide; one that is wrong costs round trips, or hits for ``ttl_s``."""

_SECOND_CHANCES = 64
"""Used records that are passed over for one that is not; bounds how long the lock is held."""


class NearIndex(GuardedIndex):
    """Keeps up to ``records_max`` records of ``inner``, each for ``ttl_s``; the least used go.

    Only what is found with exactly these ``fields``, all of them, and of the namespace that was
    asked for last; whatever else is asked for every time. A record that was removed elsewhere is
    still answered for up to ``ttl_s``: whoever finds that it lied calls ``forget`` or
    ``invalidate``.

    The first chunk that a prompt was found to lack is remembered for ``miss_ttl_s``. It ends every
    match, so what follows it is answered None without being asked for.

    ``clock`` tells seconds since the epoch. Thread-safe; no lock is held while ``inner`` is asked,
    and none taken to answer what is kept.
    """

    def __init__(
        self,
        inner: WriteIndex,
        *,
        records_max: int,
        ttl_s: float,
        fields: Collection[str],
        miss_ttl_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(inner)
        self._fields = frozenset(fields)
        self._complete: Callable[[Shards], bool] = lambda shards: len(shards) == len(self._fields)
        self._records_max = records_max
        self._ttl_s = ttl_s
        self._miss_ttl_s = miss_ttl_s
        self._clock = clock
        self._lock = Lock()
        self._book = _Book("")
        self._asking: list[_Asking] = []

    def __repr__(self) -> str:
        kept = f"{len(self._book.records)}/{self._records_max} records for {self._ttl_s:g} s"
        return f"<NearIndex {kept}, of {self._inner!r}>"

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        """As the inner index, which is asked once, for what is not kept; nothing is asked for from
        the first chunk on that is known to be missing."""
        if len(fields) != len(self._fields) or not self._fields.issuperset(fields):
            return self._inner.find(namespace, prefix_hashes, fields)
        asked_s = self._clock()
        found, places = self._kept(namespace, prefix_hashes, asked_s)
        if places:
            wanted = [prefix_hashes[place] for place in places]
            with self._ask(namespace) as asking:
                fresh = self._inner.find(namespace, wanted, fields)
                self._keep(asking, wanted, fresh, asked_s)
            for place, shards in zip(places, fresh, strict=True):
                found[place] = shards
        return found

    def publish(self, chunk: ChunkEntry, shards: Mapping[str, ShardRecord], *, ttl_s: int) -> None:
        """As the inner index."""
        try:
            self._inner.publish(chunk, shards, ttl_s=ttl_s)
        finally:
            self.invalidate(chunk.namespace, chunk.prefix_hash)

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        """As the inner index."""
        try:
            return self._inner.forget(namespace, prefix_hash, field, expected)
        finally:
            self.invalidate(namespace, prefix_hash)

    def invalidate(self, namespace: str, *prefix_hashes: bytes) -> None:
        """Believe nothing of these chunks any longer, neither that they are stored nor that they
        are not, also if a lookup in flight is about to bring it."""
        with self._lock:
            for asking in self._asking:
                if asking.book.namespace == namespace:
                    asking.spoiled.update(prefix_hashes)
            if self._book.namespace == namespace:
                for prefix_hash in prefix_hashes:
                    self._book.records.pop(prefix_hash, None)
                    self._book.missing.pop(prefix_hash, None)

    def keep_only(self, fields: Collection[str], complete: Callable[[Shards], bool]) -> None:
        """From now on keep what is found with exactly these fields, and is ``complete``; nothing of
        what was kept before."""
        with self._lock:
            self._fields, self._complete = frozenset(fields), complete
            self._book = _Book(self._book.namespace)

    def clear(self) -> None:
        """Keep nothing of what is kept now, nor of what lookups in flight bring."""
        with self._lock:
            self._book = _Book(self._book.namespace)

    def _kept(
        self, namespace: str, prefix_hashes: Sequence[bytes], now: float
    ) -> tuple[list[Shards | None], list[int]]:
        """What is kept of each chunk, and the places of those to ask for.

        Without the lock: what another thread takes out meanwhile was there when this began.
        """
        book = self._book
        if book.namespace != namespace:
            return [None] * len(prefix_hashes), list(range(len(prefix_hashes)))
        get, missing = book.records.get, book.missing
        ttl_s, miss_ttl_s = self._ttl_s, self._miss_ttl_s
        found: list[Shards | None] = []
        places = []
        for prefix_hash in prefix_hashes:
            kept = get(prefix_hash)
            # Of what ends later than what is kept now, the clock has been set back meanwhile.
            if kept is not None and now < kept.ends_s <= now + ttl_s:
                kept.used = True
                found.append(kept.shards)
            elif missing and now < missing.get(prefix_hash, 0.0) <= now + miss_ttl_s:
                break
            else:
                places.append(len(found))
                found.append(None)
        found += [None] * (len(prefix_hashes) - len(found))
        return found, places

    def _keep(
        self,
        asking: "_Asking",
        prefix_hashes: Sequence[bytes],
        fresh: Sequence[Shards | None],
        asked_s: float,
    ) -> None:
        settled_s = self._clock() - SETTLE_S
        kept = [
            (prefix_hash, _Kept(shards, asked_s + self._ttl_s))
            for prefix_hash, shards in zip(prefix_hashes, fresh, strict=True)
            if shards is not None
            and self._complete(shards)
            and max(shard.created_s for shard in shards.values()) <= settled_s
        ]
        lacked = next((h for h, s in zip(prefix_hashes, fresh, strict=True) if s is None), None)
        with self._lock:
            book = asking.book  # if all was cleared meanwhile, nobody reads it any more
            for prefix_hash, entry in kept:
                if prefix_hash not in asking.spoiled:
                    book.records[prefix_hash] = entry
                    book.records.move_to_end(prefix_hash)
            book.shrink(self._records_max)
            if lacked is not None and lacked not in asking.spoiled and self._miss_ttl_s:
                book.lack(lacked, asked_s, asked_s + self._miss_ttl_s, self._records_max)

    @contextmanager
    def _ask(self, namespace: str) -> Iterator["_Asking"]:
        with self._lock:
            if self._book.namespace != namespace:
                self._book = _Book(namespace)
            asking = _Asking(self._book)
            self._asking.append(asking)
        try:
            yield asking
        finally:
            with self._lock:
                self._asking.remove(asking)


class _Kept:
    """What is kept of one chunk."""

    __slots__ = ("ends_s", "shards", "used")

    def __init__(self, shards: Shards, ends_s: float) -> None:
        self.shards = shards
        self.ends_s = ends_s
        self.used = False


class _Book:
    """What is kept of one namespace; another one begins another book."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.records: OrderedDict[bytes, _Kept] = OrderedDict()
        self.missing: OrderedDict[bytes, float] = OrderedDict()
        """Until when each of these chunks is believed not to be stored, the next to end first."""

    def shrink(self, records_max: int) -> None:
        """Drop the oldest records above ``records_max``, those that were not used before others."""
        chances = _SECOND_CHANCES
        while len(self.records) > records_max:
            prefix_hash, kept = self.records.popitem(last=False)
            if kept.used and chances and records_max:
                kept.used = False
                self.records[prefix_hash] = kept
                chances -= 1

    def lack(self, prefix_hash: bytes, now: float, ends_s: float, missing_max: int) -> None:
        """Remember that a chunk is not stored; of more than ``missing_max`` the oldest go."""
        self.missing[prefix_hash] = ends_s
        self.missing.move_to_end(prefix_hash)
        while len(self.missing) > missing_max or next(iter(self.missing.values())) <= now:
            self.missing.popitem(last=False)
            if not self.missing:
                return


class _Asking:
    """One lookup in flight, and the chunks that were invalidated meanwhile."""

    def __init__(self, book: _Book) -> None:
        self.book = book
        self.spoiled: set[bytes] = set()
