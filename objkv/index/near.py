"""An in-process cache of index records, which finds hot prefixes without a round trip.

It serves a record for a while. It remembers a missing chunk for much less time: just enough for
many simultaneous requests with one new prompt to share one query.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from objkv.index.base import ChunkEntry, ShardRecord, Shards, WriteIndex
from objkv.index.guarded import GuardedIndex

SETTLE_S = 5
"""Records with a younger shard are not kept, because other ranks may still be adding theirs. The
writers' clocks decide. A wrong clock costs round trips, or hits for ``ttl_s``."""

_SECOND_CHANCES = 64
"""Maximum number of recently used records to spare in one eviction; bounds how long the lock is
held."""


class NearIndex(GuardedIndex):
    """Keeps up to ``records_max`` records of ``inner``, each for ``ttl_s``. The least used are
    evicted first.

    Keeps only records that a lookup with exactly these ``fields`` returned and that have all of
    them, and only those of the namespace looked up last. Other lookups always go to ``inner``. A
    record that was removed elsewhere is still returned for up to ``ttl_s``; a caller that notices
    calls ``forget`` or ``invalidate``.

    The first missing chunk of a prompt is remembered for ``miss_ttl_s``. It ends every match, so
    the chunks after it are returned as None without a query.

    ``clock`` returns seconds since the epoch. Thread-safe. No lock is held while ``inner`` is
    queried, and none is taken to return kept records.
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
        self.ttl_s = ttl_s
        """How long a record is valid."""
        self._miss_ttl_s = miss_ttl_s
        self._clock = clock
        self._lock = Lock()
        self._book = _Book("")
        self._asking: list[_Asking] = []

    def __repr__(self) -> str:
        kept = f"{len(self._book.records)}/{self._records_max} records for {self.ttl_s:g} s"
        return f"<NearIndex {kept}, of {self._inner!r}>"

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        """Return kept records, and look up the rest in one query of ``inner``. Chunks from the
        first one known to be missing are not queried."""
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
        """Publish in ``inner``, and discard the kept record."""
        try:
            self._inner.publish(chunk, shards, ttl_s=ttl_s)
        finally:
            self.invalidate(chunk.namespace, chunk.prefix_hash)

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        """Forget in ``inner``, and discard the kept record."""
        try:
            return self._inner.forget(namespace, prefix_hash, field, expected)
        finally:
            self.invalidate(namespace, prefix_hash)

    def invalidate(self, namespace: str, *prefix_hashes: bytes) -> None:
        """Discard all knowledge of these chunks, stored or missing, including results of lookups in
        flight."""
        with self._lock:
            for asking in self._asking:
                if asking.book.namespace == namespace:
                    asking.spoiled.update(prefix_hashes)
            if self._book.namespace == namespace:
                for prefix_hash in prefix_hashes:
                    self._book.records.pop(prefix_hash, None)
                    self._book.missing.pop(prefix_hash, None)

    def doubt(self, namespace: str, prefix_hashes: Sequence[bytes]) -> None:
        """Query for these chunks again, if they are known to be missing."""
        with self._lock:
            if self._book.namespace == namespace:
                for prefix_hash in prefix_hashes:
                    self._book.missing.pop(prefix_hash, None)

    def kept_until(
        self, namespace: str, prefix_hashes: Sequence[bytes], found: Sequence[Shards | None]
    ) -> float | None:
        """Return when the first of these records ends, or None unless just these are kept. Records
        that ended may be among them."""
        book = self._book
        if book.namespace != namespace:
            return None
        get = book.records.get
        kept = [one for prefix_hash in prefix_hashes if (one := get(prefix_hash)) is not None]
        if len(kept) < len(prefix_hashes):
            return None
        for one, shards in zip(kept, found, strict=True):
            if one.shards is not shards and one.shards != shards:  # equal if a chunk is named twice
                return None
        return min((one.ends_s for one in kept), default=None)

    def keep_only(self, fields: Collection[str], complete: Callable[[Shards], bool]) -> None:
        """From now on keep records that are found with exactly these fields and that are
        ``complete``. Discards all kept records."""
        with self._lock:
            self._fields, self._complete = frozenset(fields), complete
            self._book = _Book(self._book.namespace)

    def clear(self) -> None:
        """Discard all kept records, and results of lookups in flight."""
        with self._lock:
            self._book = _Book(self._book.namespace)

    def _kept(
        self, namespace: str, prefix_hashes: Sequence[bytes], now: float
    ) -> tuple[list[Shards | None], list[int]]:
        """Return the kept records, and the positions of the chunks to query.

        Takes no lock: a record that another thread removes meanwhile was valid when this call
        began.
        """
        book = self._book
        if book.namespace != namespace:
            return [None] * len(prefix_hashes), list(range(len(prefix_hashes)))
        get, missing = book.records.get, book.missing
        ttl_s, miss_ttl_s = self.ttl_s, self._miss_ttl_s
        found: list[Shards | None] = []
        places = []
        for prefix_hash in prefix_hashes:
            kept = get(prefix_hash)
            # An end beyond the maximum means that the clock was set back meanwhile.
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
            (prefix_hash, _Kept(shards, asked_s + self.ttl_s))
            for prefix_hash, shards in zip(prefix_hashes, fresh, strict=True)
            if shards is not None
            and self._complete(shards)
            and max(shard.created_s for shard in shards.values()) <= settled_s
        ]
        lacked = next((h for h, s in zip(prefix_hashes, fresh, strict=True) if s is None), None)
        with self._lock:
            book = asking.book  # if the cache was cleared meanwhile, this book is no longer read
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
    """The kept record of one chunk."""

    __slots__ = ("ends_s", "shards", "used")

    def __init__(self, shards: Shards, ends_s: float) -> None:
        self.shards = shards
        self.ends_s = ends_s
        self.used = False


class _Book:
    """The kept records of one namespace; another namespace starts a new book."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.records: OrderedDict[bytes, _Kept] = OrderedDict()
        self.missing: OrderedDict[bytes, float] = OrderedDict()
        """Until when each of these chunks is assumed missing; the first to expire comes first."""

    def shrink(self, records_max: int) -> None:
        """Evict the oldest records above ``records_max``, unused ones first."""
        chances = _SECOND_CHANCES
        while len(self.records) > records_max:
            prefix_hash, kept = self.records.popitem(last=False)
            if kept.used and chances and records_max:
                kept.used = False
                self.records[prefix_hash] = kept
                chances -= 1

    def lack(self, prefix_hash: bytes, now: float, ends_s: float, missing_max: int) -> None:
        """Remember that a chunk is missing. Above ``missing_max``, the oldest are forgotten."""
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
