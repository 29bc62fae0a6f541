"""Verifies all or some stored payloads, and moves bad ones to quarantine on request.

Quarantining starts only after everything has been checked: if most payloads are bad, the cause is
elsewhere. For each bad payload the record is forgotten, the payload is copied to ``quarantine/``
under its own path, and then deleted. Replicas compute it again. A lease excludes writers meanwhile,
but it may expire, and a folder that is its own index has no leases. Therefore the copied bytes are
checked again, and an entry is deleted only if it is unchanged.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from threading import Lock

from objkv.codec.seal import Seal
from objkv.errors import ConfigError, PayloadError, StoreError
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.ops.backends_view import (
    QUARANTINE,
    BackendsView,
    NamespacePart,
    StoredNamespace,
    looks,
    publish_payload,
    record_keys,
    stored_entries,
    stored_payloads,
)
from objkv.ops.retrying import once, pauses
from objkv.ops.runs import Check, Counters, Finding, Unit
from objkv.ops.verify_payload import Budget, Checked, Checker
from objkv.stores.base import Entry

LISTED_MAX = 2_000


@dataclass(frozen=True, slots=True)
class VerifySample:
    """A random sample of payloads."""

    keys: list[ChunkKey]
    chosen_of: int
    """The approximate number it was chosen from: a scan of a changing index may repeat keys."""


def choose_sample(
    view: BackendsView,
    names: Sequence[str],
    parts: Sequence[NamespacePart],
    *,
    size: int,
    seed: int | None,
) -> VerifySample:
    """Return ``size`` payloads, chosen uniformly at random. Scans all records (or all entries if
    the folder is its own index) and keeps no more keys than it returns."""
    chance, chosen = random.Random(seed), list[ChunkKey]()  # noqa: S311  # not a secret
    number = -1
    for number, key in enumerate(_every_key(view, names, parts)):
        if len(chosen) < size:
            chosen.append(key)
        elif (place := chance.randrange(number + 1)) < size:
            chosen[place] = key
    return VerifySample(list(dict.fromkeys(chosen)), number + 1)


def unindexed(view: BackendsView, parts: Sequence[NamespacePart]) -> Iterator[Unit]:
    """Count about ``LISTED_MAX`` payloads as ``listed``, and those without a record as
    ``unindexed``: a sample of records never contains them."""

    def work(counters: Counters, check: Check) -> None:
        for part in parts:
            for batch in stored_payloads(view, part):
                check(len(batch))
                for stored in batch:
                    counters.count("listed")
                    if stored.shard is None:
                        counters.count("unindexed", stored.entry.nbytes)
                if counters.counts["listed"] >= LISTED_MAX:
                    return

    if not view.is_own_index:
        yield Unit(work)


def _every_key(
    view: BackendsView, names: Sequence[str], parts: Sequence[NamespacePart]
) -> Iterator[ChunkKey]:
    if view.is_own_index:
        for part in parts:
            yield from (key for key, _ in stored_entries(view.bulk, part) if key is not None)
        return
    for name in names:
        for record in view.index.scan(name):
            yield from record_keys(name, record)


COPY_BYTES_MAX = 1 << 30
"""Larger entries are deleted without a copy: no payload is that large."""
MOST_AT_LEAST = 20
"""The minimum number of bad payloads before they can count as most of them."""
_RECORDS_AT_ONCE = 250
_FINDINGS_AT_ONCE = 100
_NO_NAMESPACE = StoredNamespace("", is_known=False)


@dataclass(slots=True)
class _Share:
    """The number of payloads checked, and of the bad ones among them."""

    seen: int = 0
    wrong: int = 0

    @property
    def is_most(self) -> bool:
        """Whether so many are bad that the cause is elsewhere."""
        return self.wrong >= MOST_AT_LEAST and 2 * self.wrong > self.seen

    def refusal(self, why: str) -> str:
        """Return the reason why nothing is quarantined. ``why`` describes the bad ones."""
        return (
            f"{self.wrong} of {self.seen} payloads are bad, {why}: nothing was quarantined; check "
            "the keys and settings, and that bulk_url and index_url belong together; objkv verify "
            "without --apply lists the payloads, --force quarantines them"
        )


class Verify:
    """Makes the units of work of ``objkv verify``. They count the verdicts ``ok``, ``unindexed``
    and ``changed``; every other verdict is a finding. ``settle`` also counts ``quarantined``,
    ``forgotten`` and ``mended`` (repaired)."""

    def __init__(
        self,
        view: BackendsView,
        namespaces: Mapping[str, StoredNamespace],
        *,
        quarantine: bool,
        budget: Budget,
        workers: int,
        force: bool = False,
    ) -> None:
        """``workers``: concurrent HEAD requests of a unit of ``missing``. ``force``: quarantine
        even if most payloads are bad."""
        self._view = view
        self._namespaces = namespaces
        self._quarantine = quarantine
        self._budget = budget
        self._checker = Checker(view, budget)
        self._workers = workers
        self._force = force
        self._lock = Lock()
        self._payloads, self._records = _Share(), _Share()
        self.refusal: str | None = None
        """Why bad payloads must not be quarantined without ``force``; None if they may be."""

    def parts(self, parts: Sequence[NamespacePart]) -> Iterator[Unit]:
        """Check every indexed payload; every payload if the folder is its own index."""
        for part in parts:
            yield Unit(self._part_work(part), items=part.payloads)

    def missing(self, names: Sequence[str], totals: Mapping[str, int]) -> Iterator[Unit]:
        """Find the records of these namespaces whose payloads are gone. ``totals``: the expected
        number of payloads per namespace."""
        for name in names:
            items = totals.get(name, 0)
            yield Unit(self._missing_work(name), items=items)

    def sample(self, keys: Sequence[ChunkKey]) -> Iterator[Unit]:
        """Check the payloads of these keys."""
        for key in keys:
            yield Unit(self._one_work(key), items=1)

    def settle(self, found: Counters) -> Iterator[Unit]:
        """Quarantine or repair the findings of the units above. Only findings
        kept by the counters are handled; a later run finds the others again.

        Raises ``ConfigError`` before anything is changed, see ``refuse_doubtful``.
        """
        if not self._force:
            self.refuse_doubtful(found)
        for start in range(0, len(found.findings), _FINDINGS_AT_ONCE):
            some = found.findings[start : start + _FINDINGS_AT_ONCE]
            work = self._settle_work(some)
            yield Unit(work, items=len(some))

    def _settle_work(self, findings: Sequence[Finding]) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            for finding in findings:
                check()
                done = self._set_right(ChunkKey.parse(finding.key), finding.kind)
                if done is not None:
                    counters.count(done, finding.nbytes)

        return work

    def refuse_doubtful(self, found: Counters) -> None:
        """Raise ``ConfigError`` if most payloads of a namespace are sealed with other keys."""
        for name in self._namespaces:
            seen, other = found.counts[f"seen {name}"], found.counts[f"other keys {name}"]
            if 2 * other > seen:
                seal = self._seal_of(name)
                raise ConfigError(
                    f"{name}: {other} of {seen} payloads are sealed with keys other than the "
                    f"configured ones ({seal.key_ids if seal else 'none'}): nothing was "
                    "quarantined; check the keys, or use --force"
                )

    def _one_work(self, key: ChunkKey) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            self._verify(key, counters)

        return work

    def _part_work(self, part: NamespacePart) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            for batch in stored_payloads(self._view, part):
                for stored in batch:
                    check()
                    if stored.shard is None and not self._view.is_own_index:
                        counters.count("unindexed", stored.entry.nbytes)
                    else:
                        self._verify(stored.key, counters)

        return work

    def _missing_work(self, name: str) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            bulk = self._view.bulk
            records = self._view.index.scan(name)
            with ThreadPoolExecutor(self._workers, thread_name_prefix="objkv-heads") as pool:
                while batch := list(islice(records, _RECORDS_AT_ONCE)):
                    keys = [key for record in batch for key in record_keys(name, record)]
                    check(len(keys))
                    found = looks(bulk, pool, keys, at_once=self._workers)
                    gone = [key for key, one in zip(keys, found, strict=True) if one is None]
                    self._judge_all(self._records, len(keys), len(gone), "they are missing")
                    for key in gone:
                        self._tell(key, self._checker.check(key, self._seal(key))[0], counters)

        return work

    def _verify(self, key: ChunkKey, counters: Counters) -> None:
        checked, _ = self._checker.check(key, self._seal(key))
        is_wrong = checked.verdict in ("corrupt", "foreign", "missing")
        self._judge_all(self._payloads, 1, int(is_wrong), checked.detail)
        if checked.verdict != "changed":
            counters.count(f"seen {key.namespace}")
        if checked.is_of_other_keys:
            counters.count(f"other keys {key.namespace}")
        self._tell(key, checked, counters)

    def _tell(self, key: ChunkKey, checked: Checked, counters: Counters) -> None:
        if checked.verdict in ("ok", "changed"):
            counters.count(checked.verdict, checked.nbytes)
            return
        counters.find(checked.verdict, key.path(), checked.nbytes, checked.detail)

    def _judge_all(self, share: _Share, seen: int, wrong: int, why: str) -> None:
        """Raise ``ConfigError`` if most payloads are bad, because the cause is then elsewhere."""
        with self._lock:
            share.seen += seen
            share.wrong += wrong
            is_most = wrong > 0 and share.is_most
        if is_most and not self._force:
            self.refusal = share.refusal(f"the last one with {why!r}")
            if self._quarantine:
                raise ConfigError(self.refusal)

    def _set_right(self, key: ChunkKey, verdict: str) -> str | None:
        """Repair or quarantine a payload; return the counter to increment, or None."""
        if not self._has_lease(key):
            return None
        view, path = self._view, key.path()
        try:
            now, now_record = self._checker.look(key, self._seal(key))
            if now.verdict != verdict:
                return None
            if not self._has_lease(key):  # it may have expired during the check
                return None
            if now.verdict == "hot" and view.hot is not None:
                view.hot.delete(path)
            if now.verdict in ("mismatch", "hot"):
                assert now.header is not None
                assert now_record is not None
                is_hot = now.verdict != "hot" and now_record.shards[key.field].hot
                publish_payload(view, now.header, is_hot=is_hot)
                return "mended"
            return self._take_away(key, now, now_record)
        finally:
            view.index.release(path, view.owner)

    def _take_away(self, key: ChunkKey, found: Checked, record: Record | None) -> str | None:
        view, path = self._view, key.path()
        shard = None if record is None else record.shards.get(key.field)
        if shard is not None and not view.index.forget(
            key.namespace, key.prefix_hash, key.field, shard
        ):
            return None
        if shard is not None and shard.hot and view.hot is not None:
            view.hot.delete(path)
        if found.verdict == "missing":
            return "forgotten"
        entry = Entry(path, found.nbytes, found.written_s)
        if view.bulk.head(path) != entry or not self._copy(key, entry.nbytes):
            return None
        return "quarantined" if self._delete(key, entry) else None

    def _copy(self, key: ChunkKey, nbytes: int) -> bool:
        """Copy a bad payload to quarantine; False if it is missing or no longer bad."""
        bulk, path = self._view.bulk, key.path()
        if nbytes > COPY_BYTES_MAX:
            return True
        with self._budget.taking(nbytes):
            payload = bulk.get(path)
            if payload is None:
                return False
            try:
                if self._checker.read(payload, self._seal(key)).claim.key == key:
                    return False
            except PayloadError:
                pass
            bulk.put(f"{QUARANTINE}/{path}", payload)
            return True

    def _delete(self, key: ChunkKey, entry: Entry) -> bool:
        """Delete ``entry``; False if the key may hold another payload by now. A failed delete may
        have succeeded on the server, and a writer may have saved since, so the entry is checked
        before each attempt."""
        bulk = self._view.bulk
        waits = pauses()
        while self._has_lease(key) and bulk.head(entry.key) == entry:
            try:
                once(bulk).delete(entry.key)
            except StoreError as exc:
                pause_s = next(waits, None)
                if not exc.transient or pause_s is None:
                    raise
                time.sleep(pause_s)
                if bulk.head(entry.key) is None:
                    return True
            else:
                return True
        return False

    def _has_lease(self, key: ChunkKey) -> bool:
        """Take or renew the lease that writers take; False if another process has it."""
        view = self._view
        return view.index.lease(key.path(), view.owner, ttl_ms=view.lease_ms)

    def _seal(self, key: ChunkKey) -> Seal | None:
        return self._seal_of(key.namespace)

    def _seal_of(self, namespace: str) -> Seal | None:
        return self._view.seal_of(self._namespaces.get(namespace, _NO_NAMESPACE))
