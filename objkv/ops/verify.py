"""Checks stored payloads, all or some of them, and takes what is corrupt out of use if asked to.

What is found wrong is moved: first its record is forgotten, then it is copied to ``quarantine/``
under its own path and deleted. Replicas compute it again.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from threading import Lock

from objkv.cache.tiered import shard_record
from objkv.codec.payload import Header
from objkv.codec.seal import Seal
from objkv.errors import ConfigError
from objkv.index.base import ChunkEntry, Record, ShardRecord
from objkv.index.shapes import is_shapes
from objkv.keys.chunk import ChunkKey
from objkv.ops.crew import Check, Unit
from objkv.ops.ends import (
    QUARANTINE,
    Ends,
    Namespace,
    Part,
    looks,
    record_keys,
    stored_entries,
    stored_payloads,
)
from objkv.ops.tally import Tally
from objkv.ops.verify_payload import Budget, Checked, Checker

COPY_BYTES_MAX = 1 << 30
"""Larger ones are deleted without a copy: no payload is that large."""
MOST_AT_LEAST = 20
"""Payloads that must be wrong before that can be most of them."""
_RECORDS_AT_ONCE = 250
_NO_NAMESPACE = Namespace("", is_known=False)


class Verify:
    """Units of checks. Counts ``ok``, ``unindexed``, ``changed`` and finds what ``Verdict`` names
    else; with ``quarantine`` also counts ``quarantined``, ``forgotten`` and ``mended``."""

    def __init__(
        self,
        ends: Ends,
        namespaces: Mapping[str, Namespace],
        *,
        quarantine: bool,
        budget: Budget,
        workers: int,
        force: bool = False,
    ) -> None:
        """``workers``: looks at payloads at once, of a unit that looks for what is missing.
        ``force``: take out of use also where most of all payloads are wrong."""
        self._ends = ends
        self._namespaces = namespaces
        self._quarantine = quarantine
        self._checker = Checker(ends, budget)
        self._workers = workers
        self._force = force
        self._lock = Lock()
        self._seen = self._wrong = 0

    def parts(self, parts: Sequence[Part]) -> Iterator[Unit]:
        """Check every payload that the index knows; where there is no index, every payload."""
        for part in parts:
            yield Unit(f"payloads {part.name}", self._part_work(part))

    def missing(self, names: Sequence[str]) -> Iterator[Unit]:
        """Find the records of these namespaces whose payloads are gone."""
        for name in names:
            yield Unit(f"records {name}", self._missing_work(name))

    def sample(self, keys: Sequence[ChunkKey]) -> Iterator[Unit]:
        """Check these."""
        for key in keys:
            yield Unit(f"payload {key.path()}", self._one_work(key))

    def _one_work(self, key: ChunkKey) -> Callable[[Tally, Check], None]:
        def work(tally: Tally, check: Check) -> None:
            self._verify(key, tally)

        return work

    def _part_work(self, part: Part) -> Callable[[Tally, Check], None]:
        def work(tally: Tally, check: Check) -> None:
            for batch in stored_payloads(self._ends, part):
                for stored in batch:
                    check()
                    if stored.shard is None and not self._ends.is_own_index:
                        tally.count("unindexed", stored.entry.nbytes)
                    else:
                        self._verify(stored.key, tally)

        return work

    def _missing_work(self, name: str) -> Callable[[Tally, Check], None]:
        def work(tally: Tally, check: Check) -> None:
            bulk = self._ends.bulk
            records = (one for one in self._ends.index.scan(name) if not is_shapes(one))
            with ThreadPoolExecutor(self._workers, thread_name_prefix="objkv-heads") as pool:
                while batch := list(islice(records, _RECORDS_AT_ONCE)):
                    check()
                    keys = [key for record in batch for key in record_keys(name, record)]
                    found = looks(bulk, pool, keys, at_once=self._workers)
                    for key, entry in zip(keys, found, strict=True):
                        if entry is None:
                            self._verify(key, tally)

        return work

    def _verify(self, key: ChunkKey, tally: Tally) -> None:
        seal = self._seal(key)
        checked, record = self._checker.check(key, seal)
        self._judge_all(checked)
        if checked.verdict in ("ok", "changed"):
            tally.count(checked.verdict, checked.nbytes)
            return
        tally.find(checked.verdict, key.path(), checked.nbytes, checked.detail)
        if self._quarantine:
            done = self._set_right(key, checked, record, seal)
            if done is not None:
                tally.count(done, checked.nbytes)

    def _judge_all(self, checked: Checked) -> None:
        """Raises ``ConfigError`` where payloads seem to be wrong because something else is."""
        with self._lock:
            self._seen += 1
            self._wrong += checked.verdict in ("corrupt", "foreign")
            is_most = self._wrong >= MOST_AT_LEAST and 2 * self._wrong > self._seen
        if is_most and self._quarantine and not self._force:
            raise ConfigError(
                f"{self._wrong} of {self._seen} payloads are wrong, the last one because "
                f"{checked.detail!r}: are keys or settings missing here? objkv verify without "
                "--quarantine lists them; with --force they are taken out of use"
            )

    def _set_right(
        self, key: ChunkKey, found: Checked, record: Record | None, seal: Seal | None
    ) -> str | None:
        """What was done about it, None if that was not possible or somebody else did."""
        ends, path = self._ends, key.path()
        if not ends.index.lease(path, ends.owner, ttl_ms=ends.lease_ms):
            return None
        try:
            now, now_record = self._checker.look(key, seal)
            if now.verdict != found.verdict or _shard(now_record, key) != _shard(record, key):
                return None
            if now.verdict == "hot" and ends.hot is not None:
                ends.hot.delete(path)
            if now.verdict in ("mismatch", "hot"):
                assert now.header is not None
                assert now_record is not None
                is_hot = now.verdict != "hot" and now_record.shards[key.field].hot
                self._publish(key, now.header, is_hot=is_hot)
                return "mended"
            return self._take_away(key, now, now_record)
        finally:
            ends.index.release(path, ends.owner)

    def _take_away(self, key: ChunkKey, found: Checked, record: Record | None) -> str | None:
        ends, path = self._ends, key.path()
        shard = _shard(record, key)
        if shard is not None and not ends.index.forget(
            key.namespace, key.prefix_hash, key.field, shard
        ):
            return None
        if shard is not None and shard.hot and ends.hot is not None:
            ends.hot.delete(path)
        if found.verdict == "missing":
            return "forgotten"
        if found.nbytes <= COPY_BYTES_MAX and (payload := ends.bulk.get(path)) is not None:
            ends.bulk.put(f"{QUARANTINE}/{path}", payload)
        ends.bulk.delete(path)
        return "quarantined"

    def _publish(self, key: ChunkKey, header: Header, *, is_hot: bool) -> None:
        claim = header.claim
        chunk = ChunkEntry(
            key.namespace, key.prefix_hash, claim.parent_hash, claim.token_start, claim.token_end
        )
        shard = replace(shard_record(header), hot=is_hot)
        self._ends.index.publish(chunk, {key.field: shard}, ttl_s=self._ends.ttl_s)

    def _seal(self, key: ChunkKey) -> Seal | None:
        return self._ends.seal_of(self._namespaces.get(key.namespace, _NO_NAMESPACE))


def choose_sample(
    ends: Ends, names: Sequence[str], parts: Sequence[Part], *, size: int, seed: int | None
) -> list[ChunkKey]:
    """``size`` payloads, each as likely as any other; walks over all records (or, without an
    index, all entries) and keeps no more than it returns."""
    chance, chosen = random.Random(seed), list[ChunkKey]()  # noqa: S311  # not a secret
    for number, key in enumerate(_every_key(ends, names, parts)):
        if len(chosen) < size:
            chosen.append(key)
        elif (place := chance.randrange(number + 1)) < size:
            chosen[place] = key
    return list(dict.fromkeys(chosen))


def _every_key(ends: Ends, names: Sequence[str], parts: Sequence[Part]) -> Iterator[ChunkKey]:
    if ends.is_own_index:
        for part in parts:
            yield from (key for key, _ in stored_entries(ends.bulk, part) if key is not None)
        return
    for name in names:
        for record in ends.index.scan(name):
            if not is_shapes(record):
                yield from record_keys(name, record)


def _shard(record: Record | None, key: ChunkKey) -> ShardRecord | None:
    return None if record is None else record.shards.get(key.field)
