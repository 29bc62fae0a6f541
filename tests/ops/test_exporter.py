"""What is watched is told as it was last seen, whatever the ends do meanwhile."""

from collections.abc import Callable
from importlib.metadata import version

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from objkv.config import load_config
from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.index.base import ServerFacts, Usage
from objkv.keys.chunk import ChunkKey
from objkv.ops.exporter.metrics import StoreCollector
from objkv.ops.exporter.watch import BackendsWatch, Scans
from tests.contracts.clock import ManualClock
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import IDENTITY, NAMESPACE, save, save_identity, view_of

Told = dict[str, dict[str, float]]
CONFIG = load_config(
    {"bulk_url": "s3://bucket/kv", "index_url": "rediss://me:secret@host", "ttl_s": 3600}
    | {"quota_bytes": 1 << 30},
    environ={},
)


class World:
    """Both ends, which fail or hang when told."""

    def __init__(self) -> None:
        self.clock = ManualClock(1_000.0)
        self.bulk = MemoryStore()
        self.usage: list[Usage] = []
        self.errors: dict[str, StoreError] = {}
        self.during: Callable[[], None] = lambda: None
        self.watch = BackendsWatch(
            {"bulk": lambda: self._asked("bulk"), "index": lambda: self._asked("index")},
            self.bulk,
            usage=self._usage,
            facts=lambda: ServerFacts("valkey", "8.0", "standalone", 0, "noeviction", 4096, 0.25),
            every_s=15.0,
            late_s=10.0,
            clock=self.clock,
            monotonic=self.clock,
        )

    def _asked(self, end: str) -> None:
        self.during()
        if error := self.errors.get(end):
            raise error

    def _usage(self) -> list[Usage]:
        if error := self.errors.get("usage"):
            raise error
        return self.usage

    def page(self, scans: Scans | None = None) -> Told:
        """What a scrape reads: values by metric, and within that by the labels' values."""
        told: Told = {}
        for family in StoreCollector(CONFIG, self.watch, scans).collect():
            for sample in family.samples:
                labels = "|".join(sample.labels.values())
                assert labels not in told.setdefault(sample.name, {})
                told[sample.name][labels] = sample.value
        return told


@pytest.fixture
def world() -> World:
    return World()


def test_nothing_is_told_of_what_was_not_asked_yet(world: World) -> None:
    assert world.page() == {
        "objkv_info": {f"{version('objkv')}|s3://bucket/kv|rediss://***@host": 1},
        "objkv_ttl_seconds": {"": 3600},
        "objkv_usage_failures_total": {"": 0},
    }


def test_what_is_stored_is_told_with_whose_it_is(world: World) -> None:
    save_identity(world.bulk)
    world.usage = [Usage(NAMESPACE, 4_000, 7, counted_s=900)]
    world.watch.ask_all()
    page = world.page()
    whose = f"{NAMESPACE}|{IDENTITY.tenant}|{IDENTITY.model}"
    assert page["objkv_stored_bytes"] == {whose: 4_000}
    assert page["objkv_stored_payloads"] == {whose: 7}
    assert page["objkv_counted_timestamp_seconds"] == {whose: 900}
    assert page["objkv_tenant_stored_bytes"] == {IDENTITY.tenant: 4_000}
    assert page["objkv_tenant_quota_bytes"] == {IDENTITY.tenant: 1 << 30}
    assert page["objkv_up"] == {"bulk": 1, "index": 1}
    assert page["objkv_index_memory_bytes"] == {"": 4096}
    assert "objkv_index_memory_max_bytes" not in page


def test_an_end_that_fails_is_down_and_the_rest_is_told_as_before(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.usage = [Usage(NAMESPACE, 4_000, 7, 0)]
    world.watch.ask_all()
    world.errors = {"index": StoreUnavailable("no answer"), "bulk": StoreDenied("403")}
    world.clock.advance(60)
    for _ in range(3):
        world.watch.ask_all()
    page = world.page()
    assert page["objkv_up"] == {"bulk": 0, "index": 0}
    assert page["objkv_stored_bytes"] == {f"{NAMESPACE}||": 4_000}
    assert page["objkv_usage_timestamp_seconds"] == {"": 1_000}
    world.errors = {}
    world.watch.ask_all()
    assert world.page()["objkv_up"] == {"bulk": 1, "index": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "end down end=index reason=no answer",
        "end down end=bulk reason=403",
        "end up again end=index",
        "end up again end=bulk",
    ]


def test_an_end_that_hangs_is_down_and_a_scrape_does_not_wait(world: World) -> None:
    world.watch.ask_all()
    seen: list[float] = []

    def scraped_meanwhile() -> None:
        for waited_s in (9.0, 2.0):
            world.clock.advance(waited_s)
            seen.append(world.page()["objkv_up"]["index"])

    world.during = scraped_meanwhile
    world.watch.ask("index")
    assert seen == [1, 0]
    assert world.page()["objkv_up"]["index"] == 1  # it did answer in the end
    assert world.page()["objkv_answer_seconds"]["index"] == 11


# Scans.


def scans(bulk: MemoryStore, index: MemoryIndex, *, now_s: float, grace_s: float = 100) -> Scans:
    view = view_of(bulk, index)
    return Scans(view, every_s=60, grace_s=grace_s, clock=lambda: now_s)


def stored_at(bulk: MemoryStore) -> float:
    return min(entry.modified_s for entry in bulk.scan(""))


def test_a_scan_counts_payloads_and_those_without_a_record() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_identity(bulk)
    keys = save(bulk, index)
    for key in keys[:2]:
        index.drop(NAMESPACE, key.prefix_hash)
    bulk.put(f"quarantine/{keys[0].path()}", b"x")
    found = scans(bulk, index, now_s=stored_at(bulk) + 1_000)
    found.scan()
    page = World().page(scans=found)
    sizes = [entry.nbytes for entry in bulk.scan(f"{NAMESPACE}/") if "identity" not in entry.key]
    (label,) = page["objkv_scan_payloads"]
    assert page["objkv_scan_payloads"][label] == len(keys) == 3
    assert page["objkv_scan_bytes"][label] == sum(sizes)
    found_none = ("missing", "unidentified", "corrupt", "expired")
    assert page["objkv_scan_findings"] == {
        **{f"{kind}|{label}": 0 for kind in found_none},
        f"orphan|{label}": 2,
        "quarantined|||": 1,
    }
    assert page["objkv_scan_finding_bytes"][f"orphan|{label}"] == sum(
        len(bulk.get(key.path()) or b"") for key in keys[:2]
    )


def test_the_bytes_of_findings_are_those_of_the_ones_counted() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_identity(bulk)
    save(bulk, None)
    found = scans(bulk, index, now_s=stored_at(bulk), grace_s=60)
    found.scan()
    page = World().page(scans=found)
    for name in ("objkv_scan_findings", "objkv_scan_finding_bytes"):
        assert set(page[name].values()) == {0}


def test_what_is_evicted_during_a_scan_is_not_missing() -> None:
    index = MemoryIndex()

    class Evicted(MemoryStore):
        def folders(self, folder: str) -> list[str]:
            if folder:  # the records have been read
                for record in list(index.scan(NAMESPACE)):
                    for text, shard in record.shards.items():
                        index.forget(NAMESPACE, record.prefix_hash, text, shard)
                        self.delete(ChunkKey.of(NAMESPACE, record.prefix_hash, text).path())
            return super().folders(folder)

    bulk = Evicted()
    save_identity(bulk)
    save(bulk, index)
    found = scans(bulk, index, now_s=stored_at(bulk))
    found.scan()
    assert set(World().page(scans=found).get("objkv_scan_findings", {"": 0.0}).values()) == {0}


def test_a_scan_that_breaks_off_is_counted_and_the_last_whole_one_stays() -> None:
    bulk, index = FlakyStore(MemoryStore()), MemoryIndex()
    save(bulk, index)
    view = view_of(bulk, index)
    found = Scans(view, every_s=60, grace_s=0)
    found.scan()
    whole = found.last
    bulk.fail_next(StoreUnavailable("gone"))
    found.scan()
    assert found.failures == 1
    assert found.last is whole is not None


def test_prometheus_parses_the_page(world: World) -> None:
    world.usage = [Usage('a"b\\c\nd', 5, 1, 0)]
    world.watch.ask_all()
    registry = CollectorRegistry()
    registry.register(StoreCollector(CONFIG, world.watch))
    text = generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (sample,) = families["objkv_stored_bytes"].samples
    assert (sample.labels["namespace"], sample.value) == ('a"b\\c?d', 5)
