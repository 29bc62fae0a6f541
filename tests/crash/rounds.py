"""One round: something is killed, and then everything must be either whole or sweepable."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from objkv.index.base import Record
from objkv.keys.identity import identity_path
from objkv.ops.backends_view import record_keys
from objkv.ops.runs import Counters
from tests.crash.clients import Violation
from tests.crash.places import LEASE_MS, Place
from tests.crash.saving import NAMESPACE, Save, rebuild_all, save_all, saves, sweep_all, verify_all
from tests.crash.steps import NEVER, Child

WRONG = ("corrupt", "foreign", "mismatch", "hot")
SCENARIOS = {"save": 4, "moment": 2, "race": 2, "sweep": 2, "rebuild": 2, "server": 1}
"""And how often each, relative to the others."""


@dataclass
class Seen:
    rounds: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    """By scenario, how many there were to be killed at: no step comes again before each has been
    hit once."""
    indexed: int = 0
    """Payloads that were indexed after a kill: all were read and compared."""


class Rounds:
    def __init__(self, place: Place, seed: int) -> None:
        self._place = place
        self._random = random.Random(seed)
        self._tokens = count(seed * 1_000_000, 1_000)
        self._left: dict[str, list[int]] = {}
        """By scenario, the steps at which nothing has been killed yet."""
        self._wanted: list[Save] = []
        self._promised: set[str] = set()
        """Payloads that were saved before anything was killed."""
        self._missing_planted = 0
        self.seen = Seen()
        self._took_s = 0.05

    def run(self) -> None:
        """One round of a scenario that chance chooses. Raises ``Violation``."""
        scenarios = [s for s in SCENARIOS if s != "server" or self._place.kills]
        if self._place.config.index_url == "bulk:":
            scenarios.remove("rebuild")
        scenario = self._random.choices(scenarios, [SCENARIOS[one] for one in scenarios])[0]
        self.seen.rounds[scenario] += 1
        self._place.wipe()
        self._wanted, self._promised, self._missing_planted = [], set(), 0
        lost = getattr(self, f"_{scenario}")()
        time.sleep(LEASE_MS / 1000)  # what the killed process held ends by itself
        self._settle(lost or "")

    def _some(self) -> list[Save]:
        large = int(self._random.random() < 0.15)
        made = saves(next(self._tokens), self._random.randint(1, 3), large=large)
        self._wanted += made
        return made

    def _save(self) -> None:
        """A saver that is killed at the next step; what was saved before is left alone."""
        before = self._some()
        save_all(self._place.used, before, "before")
        self._promised = {save.key.path() for save in before}
        wanted = saves(next(self._tokens), 2, large=int(self._random.random() < 0.3))
        self._wanted += wanted
        self._step_kill("save", lambda: save_all(self._place.fresh, wanted, "killed"))

    def _moment(self) -> None:
        wanted = self._some()
        child = Child(lambda: save_all(self._place.fresh, wanted, "killed"))
        self._kill_later(child)

    def _race(self) -> None:
        wanted = self._some()
        first = Child(lambda: save_all(self._place.fresh, wanted, "first"))
        at = self._random.randint(1, max(1, self.seen.steps.get("save", 60)))
        second = Child(lambda: save_all(self._place.fresh, wanted, "second"), at=at)
        self._note(second.wait())
        self._note(first.wait())

    def _sweep(self) -> None:
        """A sweep that is killed, of payloads without records and records without payloads."""
        wanted = saves(next(self._tokens), 4)
        self._wanted += wanted
        save_all(self._place.used, wanted, "before")
        if self._place.config.index_url != "bulk:":
            self._place.used.admin.drop(NAMESPACE, wanted[0].key.prefix_hash)
            self._place.used.bulk.delete(wanted[1].key.path())
            self._missing_planted = 1
            wanted = wanted[2:]
        self._promised = {save.key.path() for save in wanted}
        self._step_kill("sweep", lambda: sweep_all(self._place.view_of(self._place.fresh)).counts)

    def _rebuild(self) -> None:
        wanted = saves(next(self._tokens), 3)
        self._wanted += wanted
        save_all(self._place.used, wanted, "before")
        for save in wanted:
            self._place.used.admin.drop(NAMESPACE, save.key.prefix_hash)
        view = self._place.view_of(self._place.fresh)
        self._step_kill("rebuild", lambda: rebuild_all(view).counts)
        rebuild_all(self._place.view)
        if len(_payloads(_records(self._place))) != len(wanted):
            raise Violation("a rebuild after one that was killed did not restore everything")

    def _server(self) -> str:
        """A server that is killed while two processes save; the one it lost, if it loses things."""
        wanted, other = self._some(), self._some()
        children = [
            Child(lambda: save_all(self._place.fresh, wanted, "one")),
            Child(lambda: save_all(self._place.fresh, other, "two")),
        ]
        server = self._random.choice(self._place.kills)
        time.sleep(self._random.random() * self._took_s)
        self._place.kill(server)
        self.seen.kills += 1
        for child in children:
            self._note(child.wait())
        return server

    def _step_kill(self, scenario: str, work: Callable[[], object]) -> None:
        """Kill ``work`` at a step at which it has not been killed yet; the first time it is let
        through, to count them."""
        at = self._left[scenario].pop() if self._left.get(scenario) else NEVER
        how, what = Child(work, at=at).wait()
        if how == "error":
            raise Violation(f"{scenario}: {what}")
        if how == "done":
            steps = max(what[0], self.seen.steps.get(scenario, 0))
            self.seen.steps[scenario] = steps
            if at == NEVER:
                self._left[scenario] = list(range(1, steps + 1))
                self._random.shuffle(self._left[scenario])
            return
        self._note((how, what))

    def _kill_later(self, child: Child) -> None:
        started = time.monotonic()
        time.sleep(self._random.random() * 1.3 * self._took_s)
        child.kill()
        how = child.wait()
        if how[0] == "done":
            self._took_s = 0.8 * self._took_s + 0.2 * (time.monotonic() - started)
        else:
            self._took_s = min(0.5, self._took_s * 1.02)
        self._note(how)

    def _note(self, how: tuple[str, object]) -> None:
        if how[0] == "killed":
            self.seen.kills += 1

    def _settle(self, lost: str) -> None:
        """Look at everything, then sweep, wipe the index, rebuild: and look again."""
        view = self._place.view
        verified = verify_all(view)
        _demand(verified, WRONG, "verify")
        # A record is written last, and no server here loses payloads that it acknowledged.
        if verified.counts["missing"] > self._missing_planted:
            raise Violation(f"records without payloads: {verified.findings}")
        records = _records(self._place)
        if lost != "index" and (gone := self._promised - _payloads(records)):
            raise Violation(f"saved, and not indexed any more: {sorted(gone)}")
        if lost == "index":
            self._what_is_stored_is_found_again()
            records = _records(self._place)
        self._compare(records)
        swept = sweep_all(view)
        # A busy server may complete what a killed process sent while the sweep is under way.
        if swept.counts["busy"] or self._left_over():
            time.sleep(2 * LEASE_MS / 1000)
            swept.add(sweep_all(view))
        self._nothing_else_is_left()
        if not view.is_own_index:
            self._wiped_index_comes_back()

    def _compare(self, records: dict[bytes, Record]) -> None:
        """Every indexed payload is byte by byte what was to be saved."""
        expected = {save.key.path(): save for save in self._wanted}
        for path in _payloads(records):
            payload = self._place.used.bulk.get(path)
            if payload is not None and payload != expected[path].payload():
                raise Violation(f"{path}: other bytes")
            self.seen.indexed += 1

    def _what_is_stored_is_found_again(self) -> None:
        """An index that lost what it had: every payload of the bucket is indexed again."""
        restored = rebuild_all(self._place.view)
        _demand(restored, ("corrupt",), "rebuild after a loss")
        stored = {e.key for e in self._place.used.bulk.scan("") if e.key.endswith(".safetensors")}
        if stored != _payloads(_records(self._place)):
            raise Violation(f"not indexed again: {sorted(stored)}")

    def _left_over(self) -> set[str]:
        stored = {e.key for e in self._place.view.bulk.scan("")}
        return stored - {identity_path(NAMESPACE)} ^ _payloads(_records(self._place))

    def _nothing_else_is_left(self) -> None:
        view = self._place.view
        if left := self._left_over():
            raise Violation(f"after a sweep: {sorted(left)}")
        if unfinished := list(view.bulk.unfinished()):
            raise Violation(f"after a sweep: {unfinished}")

    def _wiped_index_comes_back(self) -> None:
        before = _records(self._place)
        for prefix_hash in before:
            self._place.used.admin.drop(NAMESPACE, prefix_hash)
        restored = rebuild_all(self._place.view)
        _demand(restored, ("corrupt", "written"), "rebuild")
        if _records(self._place) != before:
            raise Violation(f"rebuilt {_records(self._place)}, was {before}")


def _demand(counters: Counters, kinds: Sequence[str], what: str) -> None:
    if any(counters.counts[kind] for kind in kinds):
        raise Violation(f"{what}: {counters.findings} {dict(counters.counts)}")


def _records(place: Place) -> dict[bytes, Record]:
    return {one.prefix_hash: one for one in place.used.index.scan(NAMESPACE)}


def _payloads(records: dict[bytes, Record]) -> set[str]:
    return {key.path() for one in records.values() for key in record_keys(NAMESPACE, one)}
