"""An agent that is replaced while replicas use it: leases stay, and no load or save is lost."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from objkv.agent import client as client_module
from objkv.agent.calls import AgentCalls, AgentIndex
from objkv.agent.client import AgentConnection
from objkv.agent.fill import Wanted
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import VERSION
from objkv.agent.queue import Urgency
from objkv.agent.residents import MissReason
from objkv.assembly.launch import AgentRuns, AgentSocket
from objkv.codec.payload import Claim
from objkv.errors import TransferError
from objkv.index.sqlite.index import SqliteIndex
from objkv.stores.local import LocalStore
from objkv.transfer.loading.arena_lane import ArenaLane
from objkv.transfer.loading.loader import Loader
from objkv.transfer.loading.loads import LoadLimits
from tests.agent.world import (
    PATIENCE_S,
    RIGHT,
    Desk,
    Node,
    ended,
    gated,
    opened,
    pages_at,
    payloads,
)
from tests.support.agents import AgentProcess
from tests.support.paged_cache import BLOCKS, Replica, same_blocks
from tests.support.samples import NAMESPACE, save
from tests.support.waiting import wait_until

CHUNKS = 4


class Old:
    """An agent that drains on a thread of its own."""

    def __init__(self, node: Node, seconds: float = PATIENCE_S) -> None:
        assert node.server is not None
        self.node, self.server = node, node.server
        self.server.stop_accepting()
        node.core.drain()
        self.is_drained: bool | None = None
        self._thread = threading.Thread(target=self._drain, args=(seconds,))
        self._thread.start()

    def _drain(self, seconds: float) -> None:
        self.is_drained = self.server.drain(seconds)

    def join(self) -> bool | None:
        self._thread.join(PATIENCE_S)
        return self.is_drained


def test_an_agent_that_drains_opens_nothing_and_waits_for_the_last_lease(node: Node) -> None:
    wanted = node.save()
    holder, idle = node.connect(), node.connect(wants_arena=False)
    (lease,) = opened(holder, wanted[:1])
    ended(holder, lease)
    old = Old(node)
    wait_until(idle.has_ended)
    assert not holder.has_ended()
    (closed,) = opened(holder, wanted[1:2])
    assert (closed.number, closed.progress.reason) == (0, MissReason.CLOSED)
    assert pages_at(holder.arena.view, ended(holder, lease)) == RIGHT
    assert old.is_drained is None
    holder.release([lease.number])
    wait_until(holder.has_ended)
    assert old.join() is True
    assert node.residents.leased() == 0


def test_what_is_being_fetched_when_an_agent_drains_arrives(node: Node) -> None:
    wanted, gate, client = node.save(), gated(node), node.connect()
    leases = opened(client, wanted)
    old = Old(node)
    gate.set()
    assert [ended(client, one).state for one in leases] == [CellState.READY] * 3
    client.close()
    assert old.join() is True


def test_a_client_that_keeps_its_lease_is_waited_for_within_bounds(node: Node) -> None:
    client = node.connect()
    (lease,) = opened(client, node.save()[:1])
    ended(client, lease)
    assert Old(node, 0.1).join() is False
    assert node.residents.leased() == 1
    assert not client.has_ended()


def test_a_client_that_is_being_answered_gets_its_answer(node: Node) -> None:
    wanted, entered, gate = node.save(), threading.Event(), threading.Event()
    find = node.index.find

    def slow(*given: object) -> object:
        entered.set()
        gate.wait(PATIENCE_S)
        return find(*given)  # type: ignore[arg-type]

    node.index.find = slow  # type: ignore[assignment, method-assign]
    calls = AgentCalls(lambda: node.connect(wants_arena=False))
    key = wanted[0].claim.key
    found: list[object] = []
    asking = threading.Thread(
        target=lambda: found.extend(
            AgentIndex(calls).find(NAMESPACE, [key.prefix_hash], [key.field])
        )
    )
    asking.start()
    assert entered.wait(PATIENCE_S)
    old = Old(node)
    gate.set()
    asking.join(PATIENCE_S)
    assert len(found) == 1
    assert found[0] is not None
    assert old.join() is True
    calls.close()


@pytest.fixture
def next_one(node: Node) -> Iterator[Callable[[], Node]]:
    """Has another agent take the place of ``node``'s."""
    made: list[Node] = []

    def replace() -> Node:
        node.path.unlink()
        made.append(Node(path=node.path, store=node.store))
        made[-1].index = node.index
        return made[-1].listen()

    yield replace
    for one in made:
        one.close()


def test_lookups_and_saves_go_on_with_the_next_agent(
    node: Node, next_one: Callable[[], Node]
) -> None:
    desk, made = Desk(node), payloads()
    calls = AgentCalls(lambda: node.connect(wants_arena=False))
    index = AgentIndex(calls)
    desk.hand_over(made[0])
    index.lookup(NAMESPACE, [bytes(20)])
    old = Old(node)
    assert old.join() is True
    after = next_one()
    desk.hand_over(made[1])
    assert after.saves.drain(PATIENCE_S)
    assert index.lookup(NAMESPACE, [bytes(20)]) == [None]
    assert node.saves.drain(PATIENCE_S)
    assert len(list(node.store.scan(""))) == 2
    desk.close()
    calls.close()


class Reader:
    """A replica that loads by whichever agent is there."""

    def __init__(self, writer: Replica, store: Any, index: Any, path: Path) -> None:
        self.writer = writer
        self.replica = Replica(store, index, seed=2)
        self.replica.loader.close()
        self.loader = self.replica.loader = Loader(  # type: ignore[assignment]
            {0: self.replica.paged},
            ArenaLane(),
            lambda: AgentConnection(path, wants_arena=True, call_s=PATIENCE_S),
            limits=LoadLimits(64, PATIENCE_S, PATIENCE_S, join_s=PATIENCE_S),
            recorder=self.replica.recorder,
        )

    def load(self) -> None:
        """Load everything. All of it must arrive."""
        for cache in self.replica.caches:
            cache.zero_()
        assert not self.replica.load(range(CHUNKS), 1).failed_blocks
        blocks = range(1, 1 + CHUNKS * BLOCKS)
        assert same_blocks(self.writer.caches, blocks, self.replica.caches, blocks)


def test_a_load_that_an_old_agent_does_not_open_is_loaded_by_the_next(
    node: Node, next_one: Callable[[], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Replica(node.store, node.index, seed=1)  # type: ignore[arg-type]
    writer.save(range(CHUNKS))
    reader = Reader(writer, node.store, node.index, node.path)
    reader.load()
    gate, entered = threading.Event(), threading.Event()
    step = reader.loader._open

    def held(agent: AgentConnection) -> None:
        if reader.loader._waiting and not gate.is_set():
            entered.set()
            gate.wait(PATIENCE_S)
        step(agent)

    monkeypatch.setattr(reader.loader, "_open", held)
    loading = threading.Thread(target=reader.load)
    loading.start()
    assert entered.wait(PATIENCE_S)  # between having seen its job and opening it
    node.core.drain()
    next_one()
    gate.set()
    loading.join(PATIENCE_S)
    assert not loading.is_alive()
    reader.load()
    assert reader.replica.recorder.value("load_errors") == 0
    reader.replica.close()
    writer.close()
    assert Old(node).join() is True


def test_two_agents_change_places_under_a_lease(tmp_path: Path) -> None:
    """In processes: the old one serves the lease to its end, the new one all else at once."""
    store, index = LocalStore(tmp_path / "c"), SqliteIndex(tmp_path / "i")
    settings = {"bulk_url": f"file://{tmp_path}/c", "index_url": f"sqlite://{tmp_path}/i"}
    keys = save(store, index)
    writer = Replica(store, index, seed=1)  # type: ignore[arg-type]
    writer.save(range(CHUNKS))
    with AgentProcess(settings) as old:
        reader = Reader(writer, store, index, old.path)
        reader.load()
        holder = AgentConnection(old.path, wants_arena=True, call_s=PATIENCE_S)
        wanted = _wanted(index, keys[0])
        (lease,) = holder.open([wanted], deadline_s=PATIENCE_S, urgency=Urgency.BETWEEN_STEPS)
        before = pages_at(holder.arena.view, ended(holder, lease))
        with AgentProcess(settings, path=old.path, options=["--replace"]) as new:
            wait_until(lambda: not reader.replica.load(range(CHUNKS), 1).failed_blocks)
            for _ in range(3):
                reader.load()
            assert reader.loader._agent is not None
            assert not reader.loader._agent.has_ended()
            assert old.process.poll() is None, "it waits for the lease"
            assert not holder.has_ended()
            assert pages_at(holder.arena.view, ended(holder, lease)) == before == RIGHT
            again = subprocess.run(
                [sys.executable, "-m", "objkv", "agent", "--socket", str(new.path)],
                capture_output=True,
                text=True,
                check=False,
                env=_environ(settings),
            )
            assert "another agent serves" in again.stderr
            holder.close()
            assert old.process.wait(PATIENCE_S) == 0, old.log()
            assert new.path.exists(), "the old one removed only its own name"
            assert Path(f"{new.path}.http").exists()
            reader.load()
            assert new.end()["fills"] >= CHUNKS
    reader.replica.close()
    writer.close()
    index.close()
    store.close()


def _environ(settings: dict[str, str]) -> dict[str, str]:

    return dict(os.environ) | {f"OBJKV_{name.upper()}": value for name, value in settings.items()}


def _wanted(index: SqliteIndex, key: object) -> Wanted:
    (record,) = index.lookup(NAMESPACE, [key.prefix_hash])  # type: ignore[attr-defined]
    assert record is not None
    claim = Claim(key, record.parent_hash, record.token_start, record.token_end)  # type: ignore[arg-type]
    return Wanted(claim, record.shards[key.field])  # type: ignore[attr-defined]


def test_an_agent_that_cannot_start_replaces_none(tmp_path: Path) -> None:
    settings = {"bulk_url": f"file://{tmp_path}/c", "index_url": f"sqlite://{tmp_path}/i"}
    with AgentProcess(settings) as old:
        wrong = settings | {"bulk_url": f"file://{tmp_path}/i"}  # a file
        command = [sys.executable, "-m", "objkv", "agent", "--socket", str(old.path), "--replace"]
        run = subprocess.run(
            command, capture_output=True, text=True, check=False, env=_environ(wrong)
        )
        assert run.returncode == 2
        AgentConnection(old.path, call_s=PATIENCE_S).close()
        assert old.process.poll() is None


def test_an_agent_whose_address_is_taken_replaces_none(tmp_path: Path) -> None:
    settings = {"bulk_url": f"file://{tmp_path}/c", "index_url": f"sqlite://{tmp_path}/i"}
    with (
        socket.create_server(("127.0.0.1", 0)) as free,
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        ports = [one.getsockname()[1] for one in (free, taken)]
        free.close()
        own, foreign = (
            settings
            | {"agent_listen": f"127.0.0.1:{port}", "agent_token": "sixteen-or-more-characters"}
            for port in ports
        )
        with AgentProcess(own) as old:
            command = [sys.executable, "-m", "objkv", "agent", "--socket", str(old.path)]
            run = subprocess.run(
                [*command, "--replace"],
                capture_output=True,
                text=True,
                check=False,
                env=_environ(foreign),
            )
            assert run.returncode == 2
            assert f"cannot listen on 127.0.0.1:{ports[1]}" in run.stderr
            AgentConnection(old.path, call_s=PATIENCE_S).close()
            assert old.process.poll() is None
            with AgentProcess(own, path=old.path, options=["--replace"]):
                assert old.process.wait(PATIENCE_S) == 0, "its own address is no obstacle"


def test_an_agent_that_is_stopped_is_not_replaced_and_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("objkv.assembly.launch._REPLACE_S", 0.1)
    settings = {"bulk_url": f"file://{tmp_path}/c", "index_url": f"sqlite://{tmp_path}/i"}
    with AgentProcess(settings) as old:
        old.freeze()
        new = AgentSocket(old.path, replace=True)
        with pytest.raises(AgentRuns):
            new.listen()
        new.close()
        old.process.send_signal(signal.SIGCONT)
        assert old.process.wait(PATIENCE_S) == 0, "it was asked to end"


def test_a_replica_of_another_version_says_so_once_and_runs_without(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("objkv.transfer.loading.loader._RETRY_S", 0.0)
    monkeypatch.setattr(client_module, "VERSION", VERSION + 1)
    writer = Replica(node.store, node.index, seed=1)  # type: ignore[arg-type]
    writer.save(range(CHUNKS))
    reader = Reader(writer, node.store, node.index, node.path)
    for _ in range(3):
        assert reader.replica.load(range(CHUNKS), 1).failed_blocks
    with pytest.raises(TransferError, match="speaks version"):
        node.connect()
    assert caplog.text.count("loads from the agent") == 1
    assert caplog.text.count("speaks version") >= 1
    reader.replica.close()
    writer.close()
