"""Payloads on a local disk: written once they were read, read back verified, and never needed."""

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.agent import disk as module
from objkv.agent import spill as spill_module
from objkv.agent.arena_cache import CachedPayload
from objkv.agent.client import AgentConnection
from objkv.agent.disk import Disk, DiskFolder
from objkv.agent.fill import PayloadRequest
from objkv.agent.http.metrics import PREFIX
from objkv.agent.memory.arena import PAGE, CellState
from objkv.agent.messages import CommitStatus, Urgency
from objkv.assembly.backends import open_backends
from objkv.codec.seal import Seal
from objkv.config import Config
from objkv.errors import ConfigError, PayloadError, StoreUnavailable
from objkv.net.breaker import BreakerLimits
from objkv.ops.top import values_of
from objkv.telemetry import NullRecorder
from tests.agent import world
from tests.agent.consistency import is_consistent
from tests.agent.test_core import fetch, right
from tests.agent.test_http import Router
from tests.agent.world import PATIENCE_S, RIGHT, Node, Paused, making, paths, payloads, raising
from tests.codec.seals import SEALS
from tests.support.agents import AgentProcess
from tests.support.samples import save
from tests.support.waiting import wait_until

BOUND = 1 << 20


class DiskNode(Node):
    """A node with a disk in a folder, over stores that may outlive it."""

    def __init__(
        self, folder: Path, *, disk_bytes: int = BOUND, waits: bool = True, **options: object
    ) -> None:
        seal = options.get("seal")
        assert seal is None or isinstance(seal, Seal)
        form = "plain" if seal is None else "encrypted"
        self.disk = Disk(DiskFolder(folder), disk_bytes, form)
        super().__init__(disk=self.disk, **options)  # type: ignore[arg-type]
        assert self.core.spill is not None
        self.spill = self.core.spill
        if waits:
            wait_until(lambda: self.disk.is_loaded)

    def gets(self) -> int:
        return sum(self.store.gets.values())

    def load(self, *wanted: PayloadRequest) -> None:
        """Load payloads as a replica does; they are right. Waits for the disk."""
        for one in fetch(self, *wanted):
            assert right(self, one)
            wait_until(lambda one=one: one.is_spilled)  # type: ignore[misc]
            self.arena_cache.release(one)
        self.settle()

    def settle(self) -> None:
        assert self.spill.drain(PATIENCE_S)

    def evict(self, *wanted: PayloadRequest) -> None:
        for one in wanted:
            self.arena_cache.forget(one.claim.key.path())

    def count(self, name: str) -> float:
        return self.recorder.value(f"agent_disk_{name}")

    def close(self) -> None:
        super().close()
        assert self.arena_cache.leased() == 0
        assert adds_up(self.disk)


Make = Callable[..., DiskNode]


@pytest.fixture(autouse=True)
def slow_machines_hang_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "_HANGS_S", PATIENCE_S)


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A circuit that opens stays open."""
    for_ever = BreakerLimits(reset_s=10_000.0, reset_max_s=10_000.0)
    monkeypatch.setattr(spill_module, "BreakerLimits", lambda: for_ever)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with making(partial(DiskNode, tmp_path / "disk")) as make:
        yield make


def adds_up(disk: Disk) -> bool:
    """Whether sizes, order and bound agree."""
    with disk._lock:
        return (
            len(disk._ranking) == len(disk._sizes) <= module.FILES_MAX
            and all(name in disk._ranking for name in disk._sizes)
            and disk.nbytes == sum(map(module._blocks, disk._sizes.values()))
            and (not disk.is_loaded or disk.nbytes <= disk.nbytes_max)
        )


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "disk" / module.FOLDER).glob("*.*"))


@pytest.mark.parametrize("codec", ["none", "blosc"])
def test_what_was_loaded_comes_back_from_disk(codec: str, make: Make, tmp_path: Path) -> None:
    node = make()
    wanted = node.save(codec=codec)
    node.load(*wanted)
    assert (node.count("writes"), len(node.disk)) == (3, 3)
    node.evict(*wanted)
    node.load(*wanted)
    assert node.gets() == 3, "once each, the second time from disk"
    with world.http_of(node) as http:
        _, page = Router(http).ask("GET", "/metrics")
    due = {"disk_payloads": 3, "disk_bytes": node.disk.nbytes, "disk_max_bytes": BOUND}
    due |= {"disk_hits_total": 3, "disk_writes_total": 3}
    assert values_of(page).items() >= {(PREFIX + name, value) for name, value in due.items()}
    for file in files(tmp_path):
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700


def test_what_was_only_saved_or_prefetched_is_not_written_until_it_is_read(make: Make) -> None:
    node = make()
    wanted, other, _ = node.save()
    assert node.commit_one(payloads()[0]) is CommitStatus.ACCEPTED
    assert node.saves.drain(PATIENCE_S)
    (ahead,) = node.open(other, urgency=Urgency.PREFETCH)
    wait_until(lambda: ahead.state is CellState.READY)
    node.arena_cache.release(ahead)
    node.settle()
    assert len(node.disk) == 0
    node.load(wanted, other)
    assert len(node.disk) == 2
    assert node.gets() == 1


def test_the_next_agent_finds_the_files(make: Make, tmp_path: Path) -> None:
    first = make()
    wanted = first.save()
    first.load(*wanted)
    first.core.close(PATIENCE_S)
    folder = tmp_path / "disk" / module.FOLDER
    (folder / "unfinished").write_bytes(b"half of")
    (folder / ("0" * 40 + ".signed")).write_bytes(b"of other settings")
    (folder / ("1" * 40 + ".plain")).write_bytes(b"")
    (folder / "readme.txt").write_bytes(b"somebody else's")
    second = make(store=world.WatchedStore())
    second.settle()
    assert {file.name[40:] for file in files(tmp_path)} == {".plain", ""}
    assert not (folder / "unfinished").exists()
    assert (folder / "readme.txt").exists()
    second.load(*wanted)
    assert (second.gets(), second.count("hits")) == (0, 3)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from([None, "encrypted"]))
def test_no_changed_byte_is_served(data: st.DataObject, kind: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        seal = None if kind is None else SEALS[kind]
        node = DiskNode(Path(folder) / "disk", seal=seal)
        try:
            wanted = sealed(node) if seal else node.save()
            node.load(*wanted)
            (file, *_) = files(Path(folder))
            content = bytearray(file.read_bytes())
            at = data.draw(st.integers(0, len(content) - 1))
            if data.draw(st.booleans()):
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            else:
                del content[at:]
            file.write_bytes(content)
            before = node.gets()
            node.evict(*wanted)
            node.load(*wanted)
            assert node.count("hits") == 2
            assert node.count("corrupt") == 1
            assert node.gets() == before + 1
            assert node.recorder.value("load_corrupt") == 0, "the store's record stays"
            node.evict(*wanted)
            node.load(*wanted)
            assert node.count("hits") == 5, "it was written again"
        finally:
            node.close()
        assert is_consistent(node.arena_cache)


def sealed(node: Node) -> list[PayloadRequest]:
    """Payloads that were saved through the node, and so sealed."""
    for payload in payloads():
        assert node.commit_one(payload) is CommitStatus.ACCEPTED
    assert node.saves.drain(PATIENCE_S)
    for path in paths(payloads()):
        node.arena_cache.forget(path)
    return node.wanted([claim.key for claim in world.claims_in(payloads())])


def test_what_is_encrypted_in_the_bucket_is_encrypted_on_disk(make: Make, tmp_path: Path) -> None:
    node = make(seal=SEALS["encrypted"])
    wanted = sealed(node)
    node.load(*wanted)
    for file in files(tmp_path):
        assert file.suffix == ".encrypted"
        assert all(pages[:64] not in file.read_bytes() for pages in RIGHT)
    before = node.gets()
    node.evict(*wanted)
    node.load(*wanted)
    assert (node.gets(), node.count("hits")) == (before, 3)


def test_another_payload_under_the_name_is_refused(make: Make, tmp_path: Path) -> None:
    node = make()
    wanted = node.save()
    node.load(*wanted)
    one, two, three = files(tmp_path)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    three.unlink()
    node.evict(*wanted)
    node.load(*wanted)
    assert node.count("hits") == 0
    assert node.count("corrupt") == 2
    assert node.gets() == 6


def test_nothing_is_announced_before_all_is_verified(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make()
    wanted = node.save()[0]
    node.load(wanted)
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    node.evict(wanted)
    fetching, announced = threading.Event(), list[bool]()
    advance = node.arena_cache.advance
    node.store.on_get = lambda key: fetching.set()
    monkeypatch.setattr("objkv.agent.disk._SLICE_BYTES", 64)

    def watched(one: CachedPayload, frames: int) -> None:
        announced.append(fetching.is_set())
        advance(one, frames)

    monkeypatch.setattr(node.arena_cache, "advance", watched)
    node.load(wanted)
    assert announced
    assert all(announced), "only frames of the store"


@pytest.mark.usefixtures("no_probes")
def test_a_full_disk_is_left_out_and_leaves_nothing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make()
    wanted = node.save(tuple(range(16 * 12)))
    with monkeypatch.context() as full:
        full.setattr(module.os, "write", raising(OSError(errno.ENOSPC, "no space")))
        for one in wanted:
            node.load(one)
    assert (node.count("errors"), node.count("drops")) == (5, 7), "then it is paused"
    assert node.recorder.value("breaker_open_disk_write") == 1
    assert (len(node.disk), files(tmp_path)) == (0, [])
    assert not (tmp_path / "disk" / module.FOLDER / "unfinished").exists()


@pytest.mark.usefixtures("no_probes")
def test_a_failing_disk_is_left_out_and_the_stores_are_read(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = make()
    wanted = node.save(tuple(range(16 * 12)))
    node.load(*wanted)
    node.evict(*wanted)
    with monkeypatch.context() as broken:
        broken.setattr(module.os, "preadv", raising(OSError(errno.EIO, "broken")))
        for one in wanted:
            node.load(one)
    assert (node.count("hits"), node.count("errors"), node.count("busy")) == (0, 5, 7)
    assert node.gets() == 24
    assert len(node.disk) == 12, "what could not be read was written again"
    assert len(files(tmp_path)) == 12


@pytest.mark.usefixtures("no_probes")
@pytest.mark.parametrize(
    ("clock", "hangs_for_all"),
    [(count(1).__next__, True), (lambda: 1.0, False)],
    ids=["nothing since", "a byte just now"],
)
def test_a_slow_read_keeps_not_all_threads_and_only_one_that_hangs_closes_the_disk(
    clock: Callable[[], float], hangs_for_all: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(threads=2)
    wanted = node.save()
    node.load(*wanted)
    node.evict(*wanted)
    hangs, mends = threading.Event(), threading.Event()
    preadv = os.preadv

    def slow(fd: int, buffers: list[memoryview], at: int) -> int:
        if not at:
            return preadv(fd, [buffers[0][:1]], at)
        hangs.set()
        assert mends.wait(PATIENCE_S)
        return preadv(fd, buffers, at)

    with monkeypatch.context() as hanging:
        hanging.setattr(module.os, "preadv", slow)
        hanging.setattr(spill_module, "_HANGS_S", 0.05)
        hanging.setattr(spill_module, "monotonic", clock)
        (first,) = node.open(wanted[0])
        assert hangs.wait(PATIENCE_S)
        for one in fetch(node, *wanted[1:]):
            assert right(node, one)
            node.arena_cache.release(one)
        assert node.count("busy") == 2
        assert node.recorder.value("breaker_open_disk_read") == hangs_for_all
        mends.set()
        wait_until(lambda: first.state is not CellState.FILLING)
    assert right(node, first)
    node.arena_cache.release(first)


def test_a_payload_that_is_refused_is_not_kept_also_if_it_is_being_written(
    make: Make, tmp_path: Path
) -> None:
    node = make()
    other, wanted, _ = node.save()
    node.load(other)
    node.core.reject(other.claim)
    node.settle()
    assert (len(node.disk), files(tmp_path)) == (0, [])
    write = Paused(node.disk.folder, "write")
    (one,) = fetch(node, wanted)
    assert write.begun.wait(PATIENCE_S)
    node.core.reject(wanted.claim)
    write.go.set()
    node.settle()
    node.arena_cache.release(one)
    assert (len(node.disk), files(tmp_path)) == (0, [])


def test_a_long_queue_is_cut_and_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make()
    wanted = node.save()
    with monkeypatch.context() as full:
        full.setattr(spill_module, "_QUEUE_MAX", 0)
        for one in fetch(node, *wanted):
            wait_until(lambda: node.count("drops") > 0)
            node.arena_cache.release(one)
        wait_until(lambda: node.count("drops") == 3)
    node.load(*wanted)
    assert len(node.disk) == 3, "they are offered again when they are read again"


def test_two_agents_do_not_share_a_folder_and_the_second_serves_without_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_module, "_LOOK_S", 0.01)
    first = make()
    wanted = first.save()
    first.load(*wanted)
    second = make(store=first.store, index=first.index, waits=False)
    for one in fetch(second, *wanted):
        assert right(second, one)
        second.arena_cache.release(one)
    assert not second.disk.is_loaded
    first.core.close(PATIENCE_S)
    wait_until(lambda: second.disk.is_loaded)
    second.evict(*wanted)
    second.load(*wanted)
    assert (first.gets(), second.count("hits")) == (6, 3)


def test_an_agent_that_waits_for_a_folder_can_end(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path / "disk")
    assert folder.lock()
    node = DiskNode(tmp_path / "disk", waits=False)
    node.close()
    assert not node.disk.is_loaded
    folder.close()
    again = DiskFolder(tmp_path / "disk")
    assert again.lock()
    again.close()


def test_a_folder_that_others_may_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / module.FOLDER).mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="not a private folder"):
        DiskFolder(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="agent_disk_url: no folder"):
        DiskFolder(tmp_path / "file")


def test_without_a_bound_it_is_half_of_what_is_free(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path)
    disk = Disk(folder, 0)
    free = folder.free_bytes()
    disk.load(lambda: False)
    assert disk.nbytes_max == pytest.approx(free / 2, rel=0.1)
    folder.close()


def test_a_smaller_bound_keeps_the_newest(tmp_path: Path) -> None:
    disk = Disk(DiskFolder(tmp_path), 10 * PAGE)
    disk.load(lambda: False)
    folder, known = tmp_path / module.FOLDER, set[Path]()
    for number in range(10):
        disk.begin(str(number))
        disk.make_room(PAGE)
        assert disk.write(str(number), memoryview(bytes([number]) * PAGE))
        (file,) = set(folder.glob("*.plain")) - known
        os.utime(file, ns=(number, number))
        known.add(file)
    disk.folder.close()
    disk = Disk(DiskFolder(tmp_path), 3 * PAGE)
    disk.load(lambda: False)
    assert [n for n in range(10) if disk.size_of(str(n)) is not None] == [7, 8, 9]
    assert len(list(folder.glob("*.plain"))) == 3
    disk.begin("new")
    assert disk.make_room(PAGE) == [None]
    assert disk.write("new", memoryview(bytes(PAGE)))
    assert disk.nbytes == 3 * PAGE
    disk.folder.close()


def test_errors_of_the_file_system_are_translated(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path)
    folder.write("0" * 40 + ".plain", memoryview(b"123"))
    with pytest.raises(PayloadError, match="3 bytes, expected 5"):
        folder.read_into("0" * 40 + ".plain", memoryview(bytearray(5)), lambda _: None)
    assert folder.read_into("1" * 40 + ".plain", memoryview(bytearray(5)), lambda _: None) is None
    (tmp_path / module.FOLDER / ("2" * 40 + ".plain")).mkdir()
    with pytest.raises(StoreUnavailable, match="disk, remove 222"):
        folder.remove("2" * 40 + ".plain")
    folder.close()


def test_a_killed_agent_leaves_its_files_to_the_next(tmp_path: Path) -> None:
    config = Config(bulk_url=f"file://{tmp_path}/bulk")
    urls = {"bulk_url": config.bulk_url, "agent_disk_url": f"file://{tmp_path}/disk"}
    with closing(open_backends(config, NullRecorder())) as backends:
        wanted = world.wanted_of(backends.index, save(backends.bulk, backends.index))
    with AgentProcess(urls) as agent:
        load_all(agent, wanted)
        wait_until(lambda: len(files(tmp_path)) == 3)
        agent.kill()
    with AgentProcess(urls) as agent:
        load_all(agent, wanted)
        numbers = agent.end()
    assert (numbers["disk_hits"], numbers["load_bytes"]) == (3, 0)


def load_all(agent: AgentProcess, wanted: list[PayloadRequest]) -> None:
    with closing(AgentConnection(agent.path, wants_arena=True)) as client:
        for lease in world.opened(client, wanted):
            progress = world.ended(client, lease)
            assert progress.state is CellState.READY
            assert world.pages_at(client.arena.view, progress) == RIGHT
