"""Held-back payloads that the arena evicted and the disk still has."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from objkv.agent.arena_cache import CachedPayload
from objkv.agent.messages import MissReason, PrefetchOrder
from objkv.agent.prefetch import Prefetches
from objkv.codec.payload import read_header
from objkv.index.base import ChunkEntry, ShardRecord
from tests.agent.consistency import fetches_of
from tests.agent.test_disk import DiskNode
from tests.agent.test_held_back import Holder, Service, find, read
from tests.agent.world import PATIENCE_S, Paused, down, hashes_in, making, paths, payloads
from tests.support.agents import AgentProcess
from tests.support.samples import NAMESPACE
from tests.support.waiting import wait_until

NONE = MissReason.NONE


class DiskHolder(Holder, DiskNode):
    """A node that holds payloads back and keeps all of them on a disk."""

    def keep(self, made: list[bytes]) -> None:
        """Hand payloads over, and have them on the disk alone."""
        self.commit(made)
        self.settle()
        self.leave_arena(made)

    def leave_arena(self, made: list[bytes]) -> None:
        for path in paths(made):
            self.arena_cache.forget(path)
            wait_until(lambda path=path: not self.arena_cache.contains_ready([path])[0])  # type: ignore[misc]


Make = Callable[..., DiskHolder]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., DiskHolder]]:
    with making(partial(DiskHolder, folder=tmp_path / "disk", keeps_all=True)) as make:
        yield make


def test_what_the_arena_evicted_is_found_read_from_disk_and_then_saved(make: Make) -> None:
    node, made = make(), payloads()
    node.keep(made)
    wanted = node.find(made)
    assert len(wanted) == len(made)
    assert not node.stored
    assert node.read(wanted) == [NONE] * len(made)
    assert node.count("agent_disk_hits") == len(made)
    wait_until(lambda: node.stored == set(paths(made)))  # each was seen a second time
    assert node.saves.drain(PATIENCE_S)
    assert not node.held
    assert node.count("agent_unsaved_dropped") == 0


def test_what_only_the_disk_has_is_read_and_saved_if_it_is_to_be_put(make: Make) -> None:
    node, made = make(), payloads()
    node.keep(made)
    hashes, prefetches = hashes_in(made), Prefetches(node.core, node.index, node.store)
    assert prefetches.start(NAMESPACE, hashes, PrefetchOrder(PATIENCE_S)).started == len(made)
    wait_until(lambda: fetches_of(node.core) == 0)
    assert not node.stored, "no request has read it"
    node.leave_arena(made)
    for path in paths(made):
        node.arena_cache.held_back.put(path)
    assert node.saves.drain(PATIENCE_S), "none is in memory"
    order, read_file = PrefetchOrder(PATIENCE_S, puts=True), Paused(node.disk, "get_into")
    assert prefetches.start(NAMESPACE, hashes, order).started == len(made)
    assert node.saves.drain(PATIENCE_S), "none has come to memory yet"
    read_file.go.set()
    wait_until(lambda: fetches_of(node.core) == 0)
    assert node.saves.drain(PATIENCE_S)
    assert node.stored == set(paths(made))


def test_what_is_made_again_is_saved_though_only_the_disk_had_it(make: Make) -> None:
    node, made = make(), payloads()
    node.keep(made)
    node.again(made)
    assert node.stored == set(paths(made))
    assert not node.held


@pytest.mark.parametrize("is_known", [True, False])
def test_what_the_disk_loses_is_a_miss_and_is_not_found_again(is_known: bool, make: Make) -> None:
    """Whether the agent has deleted a file, or finds that it was changed."""
    node, made = make(), payloads()
    node.keep(made)
    wanted = node.find(made)
    if is_known:
        node.spill.forget(paths(made)[0])
        assert node.held == set(paths(made[1:]))
    else:
        file = node.disk.folder.path / node.disk._name(paths(made)[0])
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    assert node.read(wanted) == [MissReason.MISSING, NONE, NONE]
    assert node.count("agent_disk_corrupt") == (not is_known)
    assert node.count("agent_unsaved_dropped") == 1
    assert node.find(made) == []
    assert paths(made)[0] not in node.held | node.stored


@pytest.mark.parametrize("is_made", [False, True])
def test_what_is_read_or_made_again_survives_the_loss_of_its_file(
    is_made: bool, make: Make
) -> None:
    node, made = make(), payloads()
    node.keep(made)
    node.store.put_if_absent = down  # type: ignore[method-assign]
    if is_made:
        node.again(made)
    else:
        assert node.read(node.find(made)) == [NONE] * len(made)
        wait_until(
            lambda: all(one and one.is_spilled for one in node.arena_cache.peek(paths(made)))
        )
    node.settle()  # nothing is written again now
    for path in paths(made):
        node.spill.forget(path)
    assert node.held == set(paths(made)), "they are in memory, and no save succeeds"
    assert node.count("agent_unsaved_dropped") == 0
    assert len(node.find(made)) == len(made)
    node.leave_arena(made)
    assert not node.held


def test_the_beginning_of_a_prompt_that_is_read_after_its_end_is_saved(make: Make) -> None:
    """It is due as soon as the end was read, but it is not in memory then."""
    node, made = make(), payloads()
    node.keep(made)
    first, *rest = node.find(made)
    assert node.read(rest) == [NONE] * len(rest)
    wait_until(lambda: node.stored == set(paths(made)[1:]))
    assert node.read([first]) == [NONE]
    wait_until(lambda: node.stored == set(paths(made)))


def test_a_payload_that_came_while_its_save_looked_for_it_is_saved(make: Make) -> None:
    node, made = make(), payloads()
    node.commit(made)
    hold, missed = node.arena_cache.lease_ready, set[str]()

    def late(path: str) -> CachedPayload | None:
        if path in missed:
            return hold(path)
        missed.add(path)
        return None

    node.arena_cache.lease_ready = late  # type: ignore[method-assign]
    assert node.read(node.find(made)) == [NONE] * len(made)
    wait_until(lambda: node.stored == set(paths(made)))
    assert missed == set(paths(made))


def test_a_payload_for_which_there_was_no_room_is_still_found(make: Make) -> None:
    node, made = make(), payloads()
    node.keep(made)
    allot = node.arena_cache.allocate
    node.arena_cache.allocate = lambda *_, **__: None  # type: ignore[method-assign]
    assert node.read(node.find(made)) == [MissReason.NO_ROOM] * len(made)
    node.arena_cache.allocate = allot  # type: ignore[method-assign]
    assert node.held == set(paths(made))


def test_what_a_disk_holds_back_is_listed_for_the_next_agent(make: Make) -> None:
    first, made = make(), payloads()
    first.keep(made)
    wanted = first.find(made)
    first.close()
    assert (len(first.arena_cache.held_back), first.arena_cache.held_back.nbytes) == (0, 0)
    node = make()
    wait_until(lambda: node.held == set(paths(made)), bound_s=PATIENCE_S)
    assert node.read(wanted) == [MissReason.NONE] * len(made), "no lookup of this agent found them"


def test_a_rejected_payload_that_is_held_back_leaves_the_record_of_another_node(make: Make) -> None:
    node, made = make(), payloads()
    node.commit(made)
    claim = read_header(made[0]).claim
    key, record = claim.key, ShardRecord(1, 2, True, False, "ab" * 8, 3)
    span = claim.token_start, claim.token_end
    entry = ChunkEntry(NAMESPACE, key.prefix_hash, claim.parent_hash, *span)
    node.index.publish(entry, {key.field: record}, ttl_s=100)
    node.core.reject(claim)
    assert node.cache.record_of(key) == record


def end_by(how: str, service: Service) -> AgentProcess:
    """End an agent; the next one."""
    agent = service.agent
    if how == "replaced":
        return AgentProcess(service.settings, path=agent.path, options=["--replace"])
    if how == "idle":
        assert agent.process.wait(PATIENCE_S) == 0
    else:
        agent.end()
    return AgentProcess(service.settings, path=agent.path)


@pytest.mark.parametrize("how", ["ended", "replaced", "idle"])
def test_what_is_on_an_agents_disk_is_found_by_the_next_one(how: str, tmp_path: Path) -> None:
    made = payloads()
    disk = {"agent_disk_url": f"file://{tmp_path}/disk"}
    options = ["--idle-exit", "1"] if how == "idle" else []
    service = Service(tmp_path, made, "reused", disk, options)
    with service.agent as agent:
        if how != "idle":  # otherwise its last client has gone, and it ends when it has written all
            wait_until(lambda: agent.metrics()["disk_payloads"] == len(made))
        with end_by(how, service) as after:
            wait_until(lambda: after.metrics()["unsaved_payloads"] == len(made))
            assert agent.process.wait(PATIENCE_S) == 0
            assert "lost" not in agent.log()
            with closing(service.connect()) as client:
                wanted = find(client, made)
                assert len(wanted) == len(made)
                assert [read(client, one) for one in wanted] == [NONE] * len(made)
            wait_until(lambda: after.metrics()["unsaved_payloads"] == 0)
            assert after.metrics()["saves_total"] == len(made)


@pytest.mark.parametrize("text", [b"", b"[", b"\xff\n", b'["x"]\n', b"[1, 2]\n" * 9, b"{}\n"])
def test_a_list_of_held_back_payloads_that_is_damaged_or_lacks_its_files_is_ignored(
    text: bytes, tmp_path: Path
) -> None:
    """Without a damage, the files are gone."""
    made = payloads()
    service = Service(tmp_path, made, "reused", {"agent_disk_url": f"file://{tmp_path}/disk"})
    with service.agent as agent:
        wait_until(lambda: agent.metrics()["disk_payloads"] == len(made))
        agent.end()
        kept = tmp_path / "disk" / "payloads" / "held-back"
        lines = kept.read_bytes().splitlines(keepends=True)
        kept.write_bytes(lines[0] + text + lines[1])
        for file in () if text else (tmp_path / "disk").rglob("*.plain"):
            file.unlink()
        with AgentProcess(service.settings, path=agent.path) as after:
            wait_until(lambda: after.metrics()["disk_payloads"] == (len(made) if text else 0))
            wait_until(lambda: not kept.exists())
            with closing(service.connect()) as client:
                assert find(client, made) in ([], find(client, made[:1]) if text else [])
            after.end()


def test_a_payload_that_is_handed_over_while_the_disk_loses_it_is_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, made = make(may_save=False), payloads()
    node.keep(made)
    dropped = node.arena_cache.held_back.dropped

    def late(path: str) -> None:
        again.start()
        again.join(0.2)  # it waits for the arena's lock
        dropped(path)

    again = Thread(target=node.commit_one, args=(made[0],))
    monkeypatch.setattr(node.arena_cache.held_back, "dropped", late)
    node.spill.forget(paths(made)[0])
    again.join()
    monkeypatch.undo()
    assert len(node.find(made)) == len(made)
