"""Verifies all or some stored payloads, and moves bad ones to quarantine on request.

That starts only after everything has been checked: if most payloads are bad, the cause is
elsewhere. Each is copied to ``quarantine/`` under its own path, its record is forgotten, and then
it is deleted. A lease excludes writers meanwhile, but it may expire, and a folder that is its own
index has none: the copied bytes are checked again, and only an unchanged entry is deleted.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, Lock
from typing import Final, Literal

from objkv.cache.chunks import publish_record, stored_header
from objkv.codec.header import read_header
from objkv.codec.payload import check_frames, frame_pages
from objkv.codec.seal import Seal
from objkv.codec.values import ENCRYPTED, Header
from objkv.errors import ConfigError, KeyMismatch, PayloadError
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.ops.backends_view import (
    QUARANTINE,
    BackendsView,
    Lease,
    StoredNamespace,
    delete_unchanged,
    recorded,
)
from objkv.ops.inventory.file import Inventory, Slice
from objkv.ops.rebuild import describes
from objkv.ops.runs import Check, Counters, Finding, Unit
from objkv.stores.base import Entry

RECORDED: Final = "recorded IS NOT NULL"
"""What is verified, unless the store is its own index: then all payloads are."""
PAYLOADS: Final = "nbytes IS NOT NULL"
_SAMPLE = """
SELECT n.name, f.hash, f.field FROM temp.found f JOIN main.namespaces n ON n.id = f.ns
WHERE {where} ORDER BY random() LIMIT ?
"""


def choose_sample(inventory: Inventory, where: str, size: int) -> list[ChunkKey]:
    """Return ``size`` payloads for which ``where`` holds, chosen uniformly at random."""
    return [ChunkKey.of(*row) for row in inventory.run(_SAMPLE.format(where=where), (size,))]


COPY_BYTES_MAX = 1 << 30
"""Larger entries are deleted without a copy: no payload is that large."""
MOST_AT_LEAST = 20
"""The minimum number of bad payloads before they can count as most of them."""
_FINDINGS_AT_ONCE = 100
_NO_NAMESPACE = StoredNamespace("", is_known=False)


Verdict = Literal["ok", "missing", "corrupt", "mismatch", "hot", "changed"]
"""``mismatch``: its record differs. ``hot``: its hot copy differs. ``changed``: it is gone."""

LARGE_BYTES = 64 << 20
"""From this size on, the header is checked before the whole payload is read into memory."""
_PAUSE_S = 0.3
"""Longer than a writer takes from its put to its record."""
_RECENT_S = 60.0
"""Older payloads cannot be in the middle of being written."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking one payload."""

    verdict: Verdict
    nbytes: int
    detail: str = ""
    header: Header | None = None
    """Set if it was read and is valid."""
    written_s: float = 0.0
    """Time of the payload's write; for a missing payload, the time in its record."""
    is_of_other_keys: bool = False
    """Whether it is corrupt only because it is sealed with keys other than the configured ones."""


class Budget:
    """A limit on the bytes that all threads hold. A larger request waits until it is alone."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._used = 0
        self._changed = Condition()

    @contextmanager
    def taking(self, nbytes: int) -> Iterator[None]:
        """Wait until ``nbytes`` are free, and reserve them within the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + nbytes <= self._nbytes)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Checker:
    """Checks payloads by key. Read-only. Safe from many threads."""

    view: BackendsView
    budget: Budget
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.time

    def check(self, key: ChunkKey, seal: Seal | None) -> tuple[Checked, Record | None]:
        """Return the result and the record. Checks a bad payload twice: a writer may be at work."""
        checked, record = self.look(key, seal)
        if checked.verdict in ("ok", "changed"):
            return checked, record
        if abs(self.clock() - checked.written_s) < _RECENT_S:
            self.sleep(_PAUSE_S)
        return self.look(key, seal)

    def look(self, key: ChunkKey, seal: Seal | None) -> tuple[Checked, Record | None]:
        """Like ``check``, without the second check."""
        record = None
        if not self.view.is_own_index:
            record, shard = recorded(self.view.index, key)
            if shard is None:
                return Checked("changed", 0), None
        entry = self.view.bulk.head(key.path())
        if entry is None:
            if record is None:
                return Checked("changed", 0), None
            shard, detail = record.shards[key.field], "the payload is missing in the bulk store"
            return Checked("missing", shard.nbytes, detail, written_s=shard.created_s), record
        checked = self._check(key, entry, record, seal)
        return replace(checked, written_s=entry.modified_s), record

    def _check(
        self, key: ChunkKey, entry: Entry, record: Record | None, seal: Seal | None
    ) -> Checked:
        nbytes = entry.nbytes
        try:
            if nbytes > LARGE_BYTES:
                stored_header(self.view.bulk, entry, seal)
            with self.budget.taking(nbytes):
                payload = self.view.bulk.get(key.path())
                if payload is None:
                    return Checked("changed", 0)
                header = self.read(payload, seal)
                if header.claim.key != key:
                    return Checked("corrupt", nbytes, f"claims to be {header.claim.key.path()}")
                if record is None:
                    return Checked("ok", nbytes, header=header)
                if not describes(record, header):
                    return Checked("mismatch", nbytes, "its record differs", header)
                if record.shards[key.field].hot and self._is_copy_wrong(key, payload):
                    return Checked("hot", nbytes, "its copy in the hot store differs", header)
                return Checked("ok", nbytes, header=header)
        except PayloadError as exc:
            of_other_keys = isinstance(exc, KeyMismatch)
            return Checked("corrupt", nbytes, str(exc), is_of_other_keys=of_other_keys)

    def read(self, payload: bytes, seal: Seal | None) -> Header:
        """Check every byte of a payload; the caller compares the key. Raises ``PayloadError``."""
        header = read_header(payload, seal=seal)
        if header.nbytes != len(payload):
            raise PayloadError(f"{len(payload)} bytes, but the header states {header.nbytes}")
        if not header.is_sealed and any(f.codec.endswith(ENCRYPTED) for f in header.frames):
            check_frames(header, payload)  # without a key only the checksums can be checked
            return header
        import numpy as np  # late: a command line that only prints does without

        coded = [f.layer.nbytes for f in header.frames if f.codec != "none"]
        scratch = np.empty(max(coded), np.uint8).data if coded else None
        for index in range(len(header.frames)):
            frame_pages(header, index, payload, scratch)
        return header

    def _is_copy_wrong(self, key: ChunkKey, payload: bytes) -> bool:
        copy = None if self.view.hot is None else self.view.hot.get(key.path())
        return copy is not None and copy != payload


@dataclass(slots=True)
class _Share:
    """The number of payloads checked, and of the bad ones among them."""

    seen: int = 0
    wrong: int = 0


class Verify:
    """Units of work that count the verdicts ``ok`` and ``changed``; any other is a finding.
    ``settle`` also counts ``quarantined``, ``forgotten`` and ``mended`` (repaired)."""

    def __init__(
        self,
        view: BackendsView,
        namespaces: Mapping[str, StoredNamespace],
        *,
        quarantine: bool,
        budget: Budget,
        force: bool = False,
    ) -> None:
        """``force``: quarantine even if most payloads are bad."""
        self._view = view
        self._namespaces = namespaces
        self._quarantine = quarantine
        self._budget = budget
        self._checker = Checker(view, budget)
        self._force = force
        self._lock = Lock()
        self._payloads, self._records = _Share(), _Share()
        self.refusal: str | None = None
        """Why bad payloads must not be quarantined without ``force``; None if they may be."""

    def parts(self, inventory: Inventory, parts: Sequence[Slice], where: str) -> Iterator[Unit]:
        """Check the payloads of ``parts`` for which ``where`` holds."""
        for part in parts:
            yield Unit(partial(self._part, inventory, part, where), items=part.number)

    def refuse_missing(self, records: int, missing: int) -> None:
        """Raise ``ConfigError``, or note why, if most of the records have no payload."""
        self._judge_all(self._records, records, missing, "they are missing")

    def sample(self, keys: Sequence[ChunkKey]) -> Iterator[Unit]:
        for key in keys:
            yield Unit(partial(self._verify, key), items=1)

    def settle(self, found: Counters) -> Iterator[Unit]:
        """Quarantine or repair the findings that the counters keep; a later run finds the others.
        Raises ``ConfigError`` before anything is changed, see ``other_keys``."""
        if not self._force and (why := self.other_keys(found)):
            raise ConfigError(why)
        for start in range(0, len(found.findings), _FINDINGS_AT_ONCE):
            some = found.findings[start : start + _FINDINGS_AT_ONCE]
            yield Unit(partial(self._settle, some), items=len(some))

    def _settle(self, findings: Sequence[Finding], counters: Counters, check: Check) -> None:
        for finding in findings:
            check()
            done = self._set_right(ChunkKey.parse(finding.key), finding.kind)
            if done is not None:
                counters.count(done, finding.nbytes)

    def other_keys(self, found: Counters) -> str | None:
        """Return why nothing may be quarantined if other keys sealed most of a namespace."""
        for name in self._namespaces:
            seen, other = found.counts[f"seen {name}"], found.counts[f"other keys {name}"]
            if 2 * other > seen:
                seal = self._seal_of(name)
                return (
                    f"{name}: {other} of {seen} payloads are sealed with keys other than the "
                    f"configured ones ({seal.key_ids if seal else 'none'}): nothing was "
                    "quarantined; check the keys, or use --force"
                )
        return None

    def _part(
        self, inventory: Inventory, part: Slice, where: str, counters: Counters, check: Check
    ) -> None:
        for items in inventory.items(part, where):
            for key, entry in items:
                check()
                self._verify(key, counters, check, is_listed=entry is not None)

    def _verify(
        self, key: ChunkKey, counters: Counters, check: Check, *, is_listed: bool = True
    ) -> None:
        checked, _ = self._checker.check(key, self._seal_of(key.namespace))
        if is_listed:
            is_wrong = checked.verdict in ("corrupt", "missing")
            self._judge_all(self._payloads, 1, int(is_wrong), checked.detail)
        if checked.verdict != "changed":
            counters.count(f"seen {key.namespace}")
        if checked.is_of_other_keys:
            counters.count(f"other keys {key.namespace}")
        if checked.verdict in ("ok", "changed"):
            counters.count(checked.verdict, checked.nbytes)
            return
        counters.find(checked.verdict, key.path(), checked.nbytes, checked.detail)

    def _judge_all(self, share: _Share, seen: int, wrong: int, why: str) -> None:
        """Raise ``ConfigError`` if most payloads are bad, because the cause is then elsewhere."""
        with self._lock:
            share.seen += seen
            share.wrong += wrong
            is_most = wrong > 0 and share.wrong >= MOST_AT_LEAST and 2 * share.wrong > share.seen
        if is_most and not self._force:
            self.refusal = (
                f"{share.wrong} of {share.seen} payloads are bad, the last one with {why!r}: "
                "nothing was quarantined; check the keys and settings, and that bulk_url and "
                "index_url belong together; objkv verify without --apply lists the payloads, "
                "--force quarantines them"
            )
            if self._quarantine:
                raise ConfigError(self.refusal)

    def _set_right(self, key: ChunkKey, verdict: str) -> str | None:
        """Repair or quarantine a payload; return the counter to increment, or None."""
        view, path = self._view, key.path()
        with Lease(view, path) as lease:
            if lease is None:
                return None
            now, now_record = self._checker.look(key, self._seal_of(key.namespace))
            if now.verdict != verdict or not lease.renew():
                return None
            if now.verdict == "hot" and view.hot is not None:
                view.hot.delete(path)
            if now.verdict in ("mismatch", "hot"):
                assert now.header is not None
                assert now_record is not None
                is_hot = now.verdict != "hot" and now_record.shards[key.field].hot
                publish_record(view.index, now.header, hot=is_hot, ttl_s=view.ttl_s)
                return "mended"
            return self._take_away(key, now, now_record, lease)

    def _take_away(
        self, key: ChunkKey, found: Checked, record: Record | None, lease: Lease
    ) -> str | None:
        view, path = self._view, key.path()
        entry = Entry(path, found.nbytes, found.written_s)
        is_there = found.verdict != "missing"
        if is_there and (view.bulk.head(path) != entry or not self._copy(key, entry.nbytes)):
            return None
        shard = None if record is None else record.shards.get(key.field)
        if shard is not None and not view.index.forget(
            key.namespace, key.prefix_hash, key.field, shard
        ):
            return None
        if shard is not None and shard.hot and view.hot is not None:
            view.hot.delete(path)
        if not is_there:
            return "forgotten"
        if view.bulk.head(path) != entry or not delete_unchanged(view, entry, lease):
            return None
        return "quarantined"

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
                if self._checker.read(payload, self._seal_of(key.namespace)).claim.key == key:
                    return False
            except PayloadError:
                pass
            bulk.put(f"{QUARANTINE}/{path}", payload)
            return True

    def _seal_of(self, namespace: str) -> Seal | None:
        return self._view.seal_of(self._namespaces.get(namespace, _NO_NAMESPACE))
