"""An agent that is replaced while replicas use it: leases stay, and no load or save is lost."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from objkv.agent import client as client_module
from objkv.agent.client import AgentCalls, AgentConnection
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import VERSION, MissReason
from objkv.assembly.launch import AgentRuns, AgentSocket
from objkv.errors import TransferError
from objkv.index.sqlite.index import SqliteIndex
from objkv.stores.local import LocalStore
from tests.agent import world
from tests.agent.test_launch import run_agent
from tests.agent.world import PATIENCE_S, RIGHT, Desk, Node, Paused, ended, gated, opened, pages_at
from tests.support.agents import AgentProcess
from tests.support.samples import NAMESPACE, save
from tests.support.steps import Completed
from tests.support.waiting import wait_until


class Old:
    """An agent that drains on a thread of its own."""

    def __init__(self, node: Node, seconds: float = PATIENCE_S) -> None:
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
    assert node.arena_cache.leased() == 0


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
    assert node.arena_cache.leased() == 1
    assert not client.has_ended()


def test_a_client_that_is_being_answered_gets_its_answer(node: Node) -> None:
    key, find = node.save()[0].claim.key, Paused(node.index, "find")
    calls = AgentCalls(lambda: node.connect(wants_arena=False))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(Completed(calls).find, NAMESPACE, [key.prefix_hash], [key.field])
        assert find.begun.wait(PATIENCE_S)
        old = Old(node)
        find.go.set()
        (found,) = asked.result(PATIENCE_S)
    assert found is not None
    assert old.join() is True
    calls.close()


@pytest.fixture
def next_one(node: Node) -> Iterator[Callable[[], Node]]:
    """Has another agent take the place of ``node``'s."""
    made: list[Node] = []

    def replace() -> Node:
        node.path.unlink()
        made.append(Node(path=node.path, store=node.store, index=node.index))
        return made[-1].listen()

    yield replace
    for one in made:
        one.close()


def test_lookups_and_saves_go_on_with_the_next_agent(
    node: Node, next_one: Callable[[], Node]
) -> None:
    desk, made = Desk(node), world.payloads()
    calls = AgentCalls(lambda: node.connect(wants_arena=False))
    index = Completed(calls)
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


@pytest.fixture
def reader_over() -> Iterator[Callable[..., Any]]:
    from tests.agent.reader import Reader

    with ExitStack() as made:
        yield lambda *given: made.enter_context(closing(Reader(*given)))


def test_a_load_that_an_old_agent_does_not_open_is_loaded_by_the_next(
    node: Node,
    next_one: Callable[[], Node],
    reader_over: Callable[..., Any],
) -> None:
    reader = reader_over(node.store, node.index, node.path)
    assert reader.can_load()
    opening = Paused(reader.loader.link.agent, "open")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(reader.can_load)
        assert opening.begun.wait(PATIENCE_S)  # between having seen its job and opening it
        node.core.drain()
        next_one()
        opening.go.set()
        assert loading.result(PATIENCE_S)
    assert reader.can_load()
    assert reader.replica.recorder.value("load_errors") == 0
    reader.close()
    assert Old(node).join() is True


def test_two_agents_change_places_under_a_lease(
    tmp_path: Path, settings: dict[str, str], reader_over: Callable[..., Any]
) -> None:
    """In processes: the old one serves the lease to its end, the new one all else at once."""
    with (
        closing(LocalStore(tmp_path / "c")) as store,
        closing(SqliteIndex(tmp_path / "i")) as index,
        AgentProcess(settings) as old,
    ):
        wanted = world.wanted_of(index, save(store, index))[:1]
        reader = reader_over(store, index, old.path)
        assert reader.can_load()
        holder = AgentConnection(old.path, wants_arena=True, call_s=PATIENCE_S)
        (lease,) = opened(holder, wanted)
        before = pages_at(holder.arena.view, ended(holder, lease))
        with AgentProcess(settings, path=old.path, options=["--replace"]) as new:
            wait_until(reader.can_load)
            for _ in range(3):
                assert reader.can_load()
            assert not reader.loader.link.agent.has_ended()
            assert old.process.poll() is None, "it waits for the lease"
            assert not holder.has_ended()
            assert pages_at(holder.arena.view, ended(holder, lease)) == before == RIGHT
            holder.close()
            assert old.process.wait(PATIENCE_S) == 0, old.log()
            assert new.path.exists(), "the old one removed only its own name"
            assert Path(f"{new.path}.http").exists()
            assert reader.can_load()
            assert new.end()["fills"] >= 4
        reader.close()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    return {"bulk_url": f"file://{tmp_path}/c", "index_url": f"sqlite://{tmp_path}/i"}


def test_an_agent_that_cannot_start_replaces_none(settings: dict[str, str], tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as free,
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        mine, foreign = (f"127.0.0.1:{one.getsockname()[1]}" for one in (free, taken))
        free.close()
        settings |= {"agent_listen": mine, "agent_token": "sixteen-or-more-characters"}
        with AgentProcess(settings) as old:
            for wrong, reason in (
                ({"bulk_url": f"file://{tmp_path}/i"}, "bulk store"),  # a file
                ({"agent_listen": foreign}, f"cannot listen on {foreign}"),
            ):
                run = run_agent(settings | wrong, old.path, "--replace")
                assert run.returncode == 2
                assert reason in run.stderr
                AgentConnection(old.path, call_s=PATIENCE_S).close()
                assert old.process.poll() is None
            with AgentProcess(settings, path=old.path, options=["--replace"]):
                assert old.process.wait(PATIENCE_S) == 0, "its own address is no obstacle"


def test_an_agent_that_is_stopped_is_not_replaced_and_keeps_nobody_waiting(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("objkv.assembly.launch._REPLACE_S", 0.1)
    with AgentProcess(settings) as old:
        old.freeze()
        new = AgentSocket(old.path, replace=True)
        with pytest.raises(AgentRuns):
            new.listen()
        new.close()
        old.process.send_signal(signal.SIGCONT)
        assert old.process.wait(PATIENCE_S) == 0, "it was asked to end"


def test_a_replica_of_another_version_says_so_once_and_runs_without(
    node: Node,
    reader_over: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(client_module, "_REACH_S", 0.0)
    monkeypatch.setattr(client_module, "VERSION", VERSION + 1)
    reader = reader_over(node.store, node.index, node.path)
    for _ in range(3):
        assert not reader.can_load()
    with pytest.raises(TransferError, match="speaks version"):
        node.connect()
    assert caplog.text.count("loads from the agent") == 1
    assert caplog.text.count("speaks version") >= 1
