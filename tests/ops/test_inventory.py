"""The inventory: joined once, in little memory, and what is young in it; and its tree of prefixes,
compared with a simple computation from the same prompts."""

import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.errors import ConfigError
from objkv.index.base import ChunkEntry, Record, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.ops.audit.report import AuditReport
from objkv.ops.inventory import tree as trees
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.findings import FindingCount
from objkv.ops.inventory.tree import (
    BRANCHES_MAX,
    Branch,
    branches,
    largest_branches,
    make_tree,
    prefixes,
)
from objkv.ops.inventory.walk import find_scope
from objkv.stores.base import Entry
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.audit import Auditor, Prompt, hash_of, save_prompts, stored, ways_on
from tests.support.audit import prefixes as prefixes_of
from tests.support.samples import CHUNK, CREATED_S, FIELD, NAMESPACE, save, save_identity

WHERE = "nbytes > 0"


def payload(number: int) -> tuple[ChunkKey, Entry]:
    key = ChunkKey(NAMESPACE, number.to_bytes(20, "big"), 0)
    return key, Entry(key.path(), 5_000, 0.0)


def test_a_full_disk_is_said_and_what_to_do() -> None:
    inventory = Inventory()
    pages = inventory.run("PRAGMA page_count")[0][0]
    inventory.run(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(ConfigError, match=r"full; .* free some space"):
        inventory.add_payloads(NAMESPACE, [payload(number) for number in range(10_000)])
    assert inventory.run("SELECT count(*) FROM payloads") == [(0,)]


@pytest.mark.slow
def test_pythons_memory_does_not_grow_with_the_store() -> None:
    """A setting limits SQLite's own memory."""

    def peak(chunks: int) -> int:
        inventory = Inventory()
        tracemalloc.start()
        for start in range(0, chunks, 500):
            numbers = range(start, min(start + 500, chunks))
            inventory.add_payloads(NAMESPACE, [payload(number) for number in numbers])
            records = [chain(number) for number in numbers]
            inventory.add_records(NAMESPACE, records, has_hits=True)
        make_tree(inventory, "nbytes")
        assert len(largest_branches(inventory)) <= BRANCHES_MAX
        assert sum(1 for _ in branches(inventory, NAMESPACE)) == -(-chunks // 50)
        assert (
            sum(
                len(items)
                for part in inventory.slices(WHERE)
                for items in inventory.items(part, WHERE)
            )
            == chunks
        )
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        inventory.close()
        return found

    peak(500)  # warms caches that stay allocated
    few, many = peak(1_500), peak(6_000)
    assert many < 1.5 * few


def chain(number: int) -> Record:
    """Return a record of a chain of 50 chunks."""
    place = number % 50
    shard = ShardRecord(5_000, 4_000, True, False, "", 0)
    start = place * CHUNK
    own, parent = (n.to_bytes(20, "big") for n in (number, max(0, number - 1)))
    return Record(own, parent, start, start + CHUNK, {FIELD: shard})


NOW_S = 20_000 * 86_400.0
GRACE_S = 600.0
HOUR_S = 3_600.0


def orphans(report: AuditReport) -> FindingCount:
    return next(one for one in report.findings.counts if one.kind == "orphan")


def walked(monkeypatch: pytest.MonkeyPatch, *, early: int, late: int) -> AuditReport:
    """Read the index, save payloads an hour later, and list the store an hour after that.

    ``early`` payloads had no record before the audit; ``late`` payloads are saved meanwhile.
    """
    monkeypatch.setattr("objkv.ops.inventory.walk.LOOKED_TWICE_MAX", 2)
    clock = ManualClock(NOW_S)
    bulk, index = MemoryStore(clock=clock), MemoryIndex()
    save_prompts(bulk, index, [(0,)])
    for number in range(early):
        save(bulk, None, [100 + number] * 16)
    clock.advance(GRACE_S + HOUR_S)
    auditor = Auditor(bulk, index, clock=clock, sweep_grace_s=GRACE_S, ttl_s=86_400)
    auditor.records()
    clock.advance(HOUR_S)
    for number in range(late):
        save(bulk, index, [1_000 + number] * 16)
    clock.advance(HOUR_S)
    auditor.walk.scope = find_scope(auditor.walk.view)
    auditor.payloads()
    auditor.again()
    return auditor.report()


def test_only_what_had_no_record_before_the_walk_began_is_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = walked(monkeypatch, early=0, late=60)
    found = orphans(report)
    assert found.count == found.young > 20
    assert [told for told in report.problems if "wiped" in told] == []
    report = walked(monkeypatch, early=60, late=0)
    found = orphans(report)
    assert (found.count, found.young) == (60, 0)
    assert "it looks wiped" in report.problems[0]
    assert "(60 of 61)" in report.problems[0]


def test_every_payload_is_in_one_slice_and_comes_once() -> None:
    inventory = Inventory()
    keys = [
        ChunkKey(NAMESPACE, bytes([fan]) + number.to_bytes(19, "big"), group)
        for fan in (0, 7, 255)
        for number in (0, 1, (1 << 152) - 1, *range(2, 600))
        for group in (0, 1)
    ]
    for _ in range(2):  # what is seen twice counts once
        inventory.add_payloads(NAMESPACE, [(key, Entry(key.path(), 5_000, 1.5)) for key in keys])
    parts = inventory.slices(WHERE)
    assert [(part.fan, part.number) for part in parts] == [
        (bytes([fan]), len(keys) // 3) for fan in (0, 7, 255)
    ]
    found = [one for part in parts for items in inventory.items(part, WHERE) for one in items]
    every = sorted(keys, key=lambda key: (key.prefix_hash, key.group))
    assert found == [(key, Entry(key.path(), 5_000, 1.5)) for key in every]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_file_is_left_however_the_process_ends(tmp_path: Path, ending: signal.Signals) -> None:
    program = (
        "import sys, time\n"
        "from objkv.ops.inventory.file import Inventory\n"
        "inventory = Inventory()\n"
        "inventory.run('CREATE TABLE filled (x BLOB)')\n"
        "for _ in range(40): inventory.run('INSERT INTO filled VALUES (zeroblob(1000000))')\n"
        "print('filled', flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "SQLITE_TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"filled\n"
        opened = [os.readlink(one) for one in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert any(one.startswith(str(tmp_path)) for one in opened), "it fills a file there"
        process.send_signal(ending)
        process.wait(120)
    assert list(tmp_path.iterdir()) == []


PROMPTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=8
)


def audit_of(prompts: list[Prompt]) -> AuditReport:
    bulk, index = stored(prompts)
    return Auditor(bulk, index).all()


def tree_of(index: MemoryIndex) -> Inventory:
    """Return the tree of the records, as ``ls`` makes it."""
    inventory = Inventory()
    inventory.add_records(NAMESPACE, index.scan(NAMESPACE), has_hits=True)
    make_tree(inventory, "recorded")
    return inventory


@settings(max_examples=25, deadline=None)
@given(PROMPTS)
def test_the_tree_is_that_of_the_prompts(prompts: list[Prompt]) -> None:
    chunks = prefixes_of(prompts)
    report = audit_of(prompts)
    ends = {one for one in chunks if ways_on(chunks, one) != 1}
    by_hash = {one.hash: one for one in report.tree}
    assert by_hash.keys() == {hash_of(one) for one in ends}
    for end in ends:
        branch = by_hash[hash_of(end)]
        above = max((one for one in ends if end[: len(one)] == one != end), default=(), key=len)
        below = [one for one in chunks if one[: len(end)] == end]
        assert branch.first == hash_of(end[: len(above) + 1])
        assert (branch.token_start, branch.token_end) == (len(above) * CHUNK, len(end) * CHUNK)
        assert branch.chunks == len(end) - len(above)
        assert branch.tree_chunks == branch.chunks - 1 + len(below)
        assert branch.branches == ways_on(chunks, end)
        assert branch.leaves == sum(ways_on(chunks, one) == 0 for one in below)
        parent = next((one.hash for one in report.tree if one.id == branch.parent), None)
        assert parent == (hash_of(above) if above else None)
    check_links(report.tree)
    assert len(report.roots) == report.totals.roots == len({one[0] for one in chunks})
    for values in ("chunks", "nbytes"):
        every = getattr(report.totals, values)
        assert sum(getattr(one, values) for one in report.tree) == every
    assert sum(one.tree_bytes for one in report.roots) == report.totals.nbytes


@settings(max_examples=15, deadline=None)
@given(PROMPTS, st.integers(1, 8))
def test_the_largest_branches_come_first_with_what_they_continue(
    prompts: list[Prompt], most: int
) -> None:
    whole = audit_of(prompts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees, "BRANCHES_MAX", most)
        few = audit_of(prompts).tree
    assert [one.hash for one in few] == [one.hash for one in whole.tree[:most]]
    check_links(whole.tree[:most])


def check_links(tree: tuple[Branch, ...]) -> None:
    seen: dict[int | None, Branch] = {}
    for one in tree:
        assert one.parent is None or seen[one.parent].token_end == one.token_start
        seen[one.id] = one


@settings(max_examples=15, deadline=None)
@given(PROMPTS)
def test_each_branch_is_followed_by_those_that_continue_it(prompts: list[Prompt]) -> None:
    _, index = stored(prompts)
    inventory = tree_of(index)
    every = list(branches(inventory, NAMESPACE))
    above: list[Branch] = []
    ends = []
    for one in every:
        while above and above[-1].id != one.parent:
            above.pop()
        assert (one.parent is None) == (not above)
        above.append(one)
        if not one.branches:
            ends.append(
                (
                    one.hash,
                    above[0].first,
                    sum(b.chunks for b in above),
                    sum(b.nbytes for b in above),
                )
            )
    found = list(prefixes(inventory, NAMESPACE))
    assert [(one.leaf, one.root, one.chunks, one.nbytes) for one in found] == ends
    whole = audit_of(prompts).tree
    assert {(one.hash, one.tree_chunks) for one in every} == {
        (one.hash, one.tree_chunks) for one in whole
    }


def test_a_prefix_without_its_beginning_is_a_root_that_says_so() -> None:
    bulk, index = stored([(0, 1, 2)])
    first = bytes.fromhex(hash_of((0,)))
    bulk.delete(ChunkKey(NAMESPACE, first, 0).path())
    index.drop(NAMESPACE, first)
    report = Auditor(bulk, index).all()
    [root] = report.roots
    assert (root.first, root.token_start) == (hash_of((0, 1)), CHUNK)
    assert any("has lost its first chunks" in problem for problem in report.problems)
    [prefix] = prefixes(tree_of(index), NAMESPACE)
    assert (prefix.token_start, prefix.token_end, prefix.chunks) == (CHUNK, 3 * CHUNK, 2)


def test_records_that_lie_about_their_parents_make_no_loop() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_identity(bulk)
    one, other = b"\1" * 20, b"\2" * 20
    claims = {one: (other, 16, 32), other: (one, 16, 32), b"\3" * 20: (b"\3" * 20, 0, 16)}
    claims[b"\4" * 20] = (b"\3" * 20, 32, 16)  # ends before it starts
    for prefix_hash, (parent, start, end) in claims.items():
        bulk.put(ChunkKey(NAMESPACE, prefix_hash, 0).path(), bytes(5_000))
        shard = ShardRecord(5_000, 4_000, True, False, "0" * 32, 0)
        entry = ChunkEntry(NAMESPACE, prefix_hash, parent, start, end)
        index.publish(entry, {FIELD: shard}, ttl_s=100)
    report = Auditor(bulk, index).all()
    assert report.totals.chunks == 4
    assert {root.hash for root in report.roots} == {h.hex() for h in (one, other, b"\3" * 20)}
    check_links(report.tree)
    assert [one.chunks for one in prefixes(tree_of(index), NAMESPACE)] == [1, 1, 1]


def test_hits_and_times_are_those_of_the_whole_prefix() -> None:
    bulk, index = MemoryStore(), MemoryIndex(clock=lambda: 5_000.0)
    save_prompts(bulk, index, [(0, 1), (0, 2)])
    hashes = [bytes.fromhex(hash_of(one)) for one in ((0,), (0, 1))]
    index.touch(NAMESPACE, hashes, ttl_s=100)
    index.touch(NAMESPACE, hashes[:1], ttl_s=100)
    [root] = Auditor(bulk, index).all().roots
    assert (root.hits, root.tree_hits, root.last_used_s) == (2, 3, 5_000)
    used, unused = prefixes(tree_of(index), NAMESPACE)
    assert (used.hits, unused.hits) == (2, 2)
    assert (used.oldest_s, used.newest_s) == (CREATED_S, CREATED_S + CHUNK)
