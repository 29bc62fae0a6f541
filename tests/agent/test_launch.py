"""Agents as processes: one for each socket, started by the first replica, gone when idle."""

import ctypes
import errno
import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from objkv.agent.client import AgentConnection, AgentRefused, is_listening
from objkv.agent.http import listener
from objkv.agent.memory.arena import BOARD_BYTES, CellState
from objkv.agent.messages import Drop
from objkv.agent.server import AgentServer
from objkv.assembly import agent as agent_module
from objkv.assembly import fetchers, launch
from objkv.assembly.agent import NodeAgent
from objkv.assembly.backends import open_backends
from objkv.assembly.fetchers import open_s3, process_count
from objkv.assembly.launch import IDLE_EXIT_S, AgentRuns, AgentSocket, failure_of, start_agent
from objkv.assembly.link import AgentLink, Replica
from objkv.cache.chunks import CacheSettings, shard_record
from objkv.codec.payload import Claim, LayerSpec, Provenance, encode, read_header
from objkv.config import Config, load_config, node
from objkv.config.node import agent_environment, agent_socket, http_path, replica_socket
from objkv.errors import ConfigError, StoreUnavailable, TransferError
from objkv.index.base import ChunkEntry
from objkv.index.redis.index import RedisIndex
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.agent.test_http import Router
from tests.agent.world import Node, Paused, ended, opened, payloads, raising, wanted_of
from tests.contracts.clock import ManualClock
from tests.support.agents import AgentProcess, agent_folder
from tests.support.samples import CHUNK, NAMESPACE
from tests.support.servers.certificates import make_certificates
from tests.support.servers.process import has_ended
from tests.support.servers.quick_s3 import QuickS3
from tests.support.servers.redis import RedisServer
from tests.support.waiting import PATIENCE_S, wait_until

REPLICA = Replica("engine")
_PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    with agent_folder() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield Config(
            bulk_url=f"file://{tmp_path}/chunks",
            index_url=f"sqlite://{tmp_path}/index",
            agent="auto",
            agent_memory_bytes=1 << 20,
        )


@pytest.fixture
def path(config: Config) -> Path:
    path = agent_socket(config)
    assert path is not None
    return path


def test_a_path_has_one_agent_and_a_stale_socket_is_no_obstacle(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(path))
    first = AgentSocket(path)
    with pytest.raises(AgentRuns):
        AgentSocket(path)
    assert not is_listening(path), "nobody may wait for what could still fail"
    first.listen()
    assert is_listening(path)
    assert path.stat().st_mode & 0o077 == 0, "only its user may connect"
    first.close()
    assert not path.exists()


def test_a_socket_that_cannot_be_made_is_reported_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.* give another --socket"):
        AgentSocket(tmp_path / "missing" / "agent.sock")


def test_an_agent_that_cannot_be_ended_keeps_its_socket(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in another container."""
    monkeypatch.setattr("objkv.assembly.launch.agent_at", lambda path: 0)
    monkeypatch.setattr("objkv.assembly.launch._REPLACE_S", 0.05)
    old, new = AgentSocket(path), AgentSocket(path, replace=True)
    old.listen()
    with pytest.raises(AgentRuns, match="end it"):
        new.listen()
    new.close()
    assert is_listening(path)
    old.close()
    third = AgentSocket(path, replace=True)
    third.listen()
    assert is_listening(path)
    third.close()


def test_an_agent_that_has_replaced_another_leaves_the_next_ones_name_alone(path: Path) -> None:
    agent = AgentSocket(path, replace=True)
    agent.listen()
    others = Path(f"{path}.next")
    others.touch()
    path.unlink()
    before = agent.listener
    assert agent.restore() is not None
    before.close()
    assert others.exists()
    assert is_listening(path)
    agent.close()


def test_a_plain_start_does_not_come_between_two_agents_that_change_places(path: Path) -> None:
    old = AgentSocket(path)
    old.listen()
    new = AgentSocket(path, replace=True)
    old.close()  # it ends on its own account, and its lock is free
    with pytest.raises(AgentRuns):
        AgentSocket(path)
    new.listen()
    assert is_listening(path)
    new.close()
    third = AgentSocket(path)
    third.listen()
    assert is_listening(path)
    third.close()


@contextmanager
def running(config: Config, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgent]:
    """An agent whose loop looks often."""
    monkeypatch.setattr("objkv.assembly.agent._LOOK_S", 0.02)
    ended = threading.Event()
    with NodeAgent(config, path, MemoryRecorder()) as agent:
        thread = threading.Thread(target=agent.run, args=(ended.wait,))
        thread.start()
        yield agent
        ended.set()
        thread.join(PATIENCE_S)


def is_well(path: Path) -> bool:
    """Whether an agent serves replicas and answers HTTP."""
    with suppress(OSError):  # as between the bind of a socket and its listening
        answer = Router(http_path(path)).ask("GET", "/healthz")
        return is_listening(path) and answer == (200, "ok\n")
    return False


def test_a_socket_that_was_removed_is_made_again_and_keeps_its_clients(
    config: Config, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(config, path, monkeypatch) as agent:
        before = AgentConnection(path, wants_arena=True)
        for _ in range(2):
            for file in path.parent.iterdir():  # the lock too, as whoever cleans a folder does
                file.unlink()
            wait_until(lambda: is_well(path))
            AgentConnection(path, wants_arena=True).close()
            with pytest.raises(AgentRuns):
                AgentSocket(path)
        assert not before.has_ended()
        assert agent.server.clients >= 1
        before.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("place", "name", "error", "socket_of"),
    [
        (launch, "new_socket", OSError(errno.EMFILE, "too many open files"), Path),
        (launch, "bind_private", MemoryError(), Path),
        (listener, "Thread", RuntimeError(), http_path),
    ],
)
def test_an_agent_that_cannot_listen_again_at_once_goes_on_and_tries_again(
    config: Config,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    error: Exception,
    socket_of: Callable[[Path], Path],
) -> None:
    with running(config, path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, raising(error))
            refused = Paused(place, name)
            socket_of(path).unlink()
            assert refused.begun.wait(PATIENCE_S)
        refused.go.set()
        wait_until(lambda: is_well(path))


def test_an_agent_whose_path_is_another_agents_ends_and_leaves_it(
    config: Config, path: Path
) -> None:
    with NodeAgent(config, path, MemoryRecorder()) as first:
        for file in path.parent.iterdir():
            file.unlink()
        with NodeAgent(config, path, MemoryRecorder()) as second:
            first.run(threading.Event().wait)
            first.close()
            assert is_listening(path)
            wait_until(lambda: second.server.clients == 0)  # that was a connection too
            assert Router(http_path(path)).ask("GET", "/healthz") == (200, "ok\n")


def test_an_agent_that_starts_again_has_the_leases_of_the_one_that_was_killed(
    config: Config, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = list[str]()

    def seen(writer: str, *others: int) -> CacheSettings:
        owners.append(writer)
        return CacheSettings(writer, *others)

    monkeypatch.setattr(agent_module, "CacheSettings", seen)
    for place in (path, path, path.with_name("other")):
        NodeAgent(config, place, MemoryRecorder()).close()
    monkeypatch.setattr(os, "readlink", lambda _: "mnt:[1]")
    NodeAgent(config, path, MemoryRecorder()).close()
    killed, again, other, contained = owners
    assert again == killed
    assert len({killed, other, contained}) == 3, "a container's path is another folder's"


def looks(agent: NodeAgent) -> None:
    """Have an agent look once at all that it does from time to time."""
    ended = iter([False, True])
    agent.run(lambda _: next(ended))


def test_an_agent_answers_at_its_address(config: Config, path: Path) -> None:
    token = "sixteen-or-more-characters"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = {"agent_listen": f"127.0.0.1:{port}", "agent_token": token}
        config = config.model_copy(update=given)
        with pytest.raises(ConfigError, match="cannot listen on 127"):
            NodeAgent(config, path, MemoryRecorder())
    assert "cannot listen" in (failure_of(path) or "")
    with NodeAgent(config, path, MemoryRecorder()):
        assert failure_of(path) is None
        router = Router(("127.0.0.1", port), f"Bearer {token}")
        assert router.ask("GET", "/v1/namespaces") == (200, {"namespaces": []})
        assert Router(http_path(path)).ask("GET", "/healthz") == (200, "ok\n")


def test_the_first_replica_starts_an_agent_for_all(config: Config, path: Path) -> None:
    """Although the folder was removed, as that of a user who has logged out."""
    assert "OBJKV_AGENT" not in agent_environment(config)
    shutil.rmtree(path.parent)
    links = [AgentLink(config, REPLICA) for _ in range(3)]
    assert all(link.await_agent(PATIENCE_S) for link in links)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    connections = [link.connect(wants_arena=True) for link in links]
    assert {one.arena.nbytes for one in connections} == {BOARD_BYTES + config.agent_memory_bytes}
    for connection in connections:
        connection.close()
    log = Path(f"{agent_socket(config)}.log")  # with a name by the new folder's key
    wait_until(lambda: "agent ready" in log.read_text())
    assert log.read_text().count("agent ready") == 1


def test_an_agent_runs_on_all_cores_and_shares_them_with_its_replicas(
    config: Config, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are bound to cores, by affinity and by variables of OpenMP, which they preload."""
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0")
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        start_agent(path, agent_environment(config), IDLE_EXIT_S)
        assert os.sched_getaffinity(0) == {min(everywhere)}
    finally:
        os.sched_setaffinity(0, everywhere)
    wait_until(lambda: is_listening(path))
    with closing(AgentSocket(path, replace=True)) as ours:
        pid = ours.replaced
    assert os.sched_getaffinity(pid) >= everywhere
    assert b"GOMP_CPU_AFFINITY" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.getsid(pid) == os.getsid(0), "Linux divides processors between sessions"
    assert os.getpgid(pid) != os.getpgid(0), "Ctrl-C at a terminal is for the replica"


def test_an_agent_that_cannot_start_is_logged_with_its_reason_and_tried_again(
    config: Config, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(config.bulk_url.removeprefix("file://"))
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where a folder is needed")
    link = AgentLink(config, REPLICA)
    assert not link.await_agent(PATIENCE_S)
    (line,) = caplog.messages
    assert line.startswith("no node agent, caching nothing until one answers reason=bulk store")
    strict = AgentLink(config.model_copy(update={"at_start": "strict"}), REPLICA)
    with pytest.raises(ConfigError, match="at_start is strict: bulk store"):
        strict.await_agent(PATIENCE_S)
    folder.unlink()
    wait_until(lambda: link.await_agent(PATIENCE_S))
    assert failure_of(path) is None


def test_no_other_thread_gets_the_mode_of_a_socket(
    config: Config, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask is the whole process's"))
    with NodeAgent(config, path, MemoryRecorder()):
        assert [one.stat().st_mode & 0o777 for one in (path, http_path(path))] == [0o600] * 2


def test_a_lock_that_was_removed_lets_no_second_agent_in_and_is_taken_again(path: Path) -> None:
    lock = Path(f"{path}.lock")
    with closing(AgentSocket(path)) as agent:
        agent.listen()
        lock.unlink()
        with pytest.raises(AgentRuns):
            AgentSocket(path)
        with lock.open("ab") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            assert agent.restore() is None, "who has it for a moment gives it up again"
        os.utime(lock, (0, 0))
        assert agent.restore() is None
        assert agent.restore() is None
        assert lock.stat().st_mtime > 0, "jobs that clean folders remove old files"
        path.unlink()
        with pytest.raises(AgentRuns):
            AgentSocket(path)


def test_an_agent_gives_up_late_parts_also_if_nobody_says_anything(
    config: Config, path: Path
) -> None:
    with NodeAgent(config, path, MemoryRecorder()) as agent:
        clock = agent.saves.joins._clock = ManualClock(0.0)
        agent.saves.joins.drop(b"", Drop(1, 2, ChunkKey(NAMESPACE, bytes(20), 0).path()))
        clock.advance(config.save_deadline_ms / 1000)
        assert len(agent.saves.joins)
        looks(agent)
        assert not len(agent.saves.joins)


def test_the_totals_of_an_agent_that_saves_no_more_are_sent_in_time(
    config: Config,
    path: Path,
    valkey: RedisServer,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("objkv.index.redis.index._FLUSH_S", 0.0)
    config, totals = config.model_copy(update={"index_url": valkey.url}), RedisIndex(client)
    with NodeAgent(config, path, MemoryRecorder()) as agent:
        Node.commit_one(agent, payloads()[0])  # type: ignore[arg-type]
        assert agent.saves.drain(PATIENCE_S)
        assert totals.usage() == []
        looks(agent)
        assert agent.saves.drain(PATIENCE_S)
        assert [one.payloads for one in totals.usage()] == [1]


def test_an_agent_without_a_thread_that_accepts_ends(
    config: Config, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NodeAgent(config, path, MemoryRecorder()) as agent:
        monkeypatch.setattr(AgentServer, "is_accepting", False)
        agent.run(threading.Event().wait)


@pytest.mark.parametrize("kind", ["lock", "error", "log", "start"])
def test_no_file_is_written_through_a_link(path: Path, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    Path(f"{path}.{kind}").symlink_to(victim)
    if kind == "error":
        with closing(AgentSocket(path)) as agent:
            agent.report(ConfigError("no"))
        assert failure_of(path) == "no"
    else:
        with pytest.raises(ConfigError):
            AgentSocket(path) if kind == "lock" else start_agent(path, {}, 1)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("spoil", ["mode", "link", "length"])
def test_a_runtime_folder_that_others_can_change_is_not_used(
    config: Config, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    """As that of another user, which root has after ``su``."""
    given = path.parents[1]
    if spoil == "mode":
        given.chmod(0o777)
    else:
        link = given / ("l" * (80 if spoil == "length" else 1))
        link.symlink_to(given)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(link))
    monkeypatch.setattr(node, "_SHARED_FOLDER", tmp_path)
    assert replica_socket(config, "").parent == tmp_path / f"objkv-{os.geteuid()}"


def test_names_of_sockets_tell_nothing_of_the_settings(
    config: Config, path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A user who guesses a password cannot tell by the name, which all users see."""
    assert agent_socket(config) == path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path.parents[1] / "other"))
    other = replica_socket(config, "")
    assert other.parent != path.parent
    assert other.name != path.name


@pytest.mark.parametrize("fault", ["folder", "note", "shell"])
def test_a_replica_that_cannot_start_an_agent_goes_on(
    config: Config, path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    read_only = raising(OSError(errno.EROFS, "Read-only file system"))
    if fault == "shell":
        monkeypatch.setattr(subprocess, "run", read_only)
    elif fault == "note":
        Path(f"{path}.error").mkdir()
    else:
        monkeypatch.setattr(Path, "mkdir", read_only)
        monkeypatch.setattr(node, "_SHARED_FOLDER", path.parent / "gone")
        shutil.rmtree(path.parent)
    with pytest.raises(TransferError):
        AgentLink(config, REPLICA).connect()


def test_one_process_of_the_node_starts_agents_and_leaves_no_dead_ones(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1 of a container often reaps none. Here this process gets them."""
    begun, gate, python = tmp_path / "begun", tmp_path / "gate", tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\necho x >> {begun}\nwhile [ ! -e {gate} ]; do sleep 0.02; done\nexit 1"
    )
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(launch, "_PAUSES_S", "0 0 0")

    def children() -> set[str]:
        files = Path("/proc/self/task").glob("*/children")
        return {pid for file in files for pid in file.read_text().split()}

    libc, others = ctypes.CDLL(None), children()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        for _ in range(10):
            start_agent(path, os.environ, 1)
        assert len(children() - others) == 1, "a shell, which tries three times"
        wait_until(begun.exists)
    finally:
        gate.touch()
        for pid in children() - others:
            os.waitpid(int(pid), 0)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
    assert begun.read_text() == "x\n" * 3
    assert children() == others


def test_a_private_agent_is_the_replicas_own_and_leaves_nothing(config: Config) -> None:
    config = config.model_copy(update={"agent": "private", "agent_memory_bytes": 4 << 20})
    paths, nbytes = [], []
    for engine_id, share in (("one", 0.5), ("other", 1.0)):
        link = AgentLink(config, Replica(engine_id, share))
        assert link.await_agent(PATIENCE_S)
        connection = link.connect(wants_arena=True)
        nbytes.append(connection.arena.nbytes)
        connection.close()
        paths.append(replica_socket(config, engine_id))
    assert len(set(paths)) == 2
    assert nbytes[0] < nbytes[1]
    for path in paths:
        os.kill(launch.agent_at(path), signal.SIGTERM)
        wait_until(lambda path=path: not list(path.parent.glob(f"{path.name}*")))


def test_settings_that_matter_have_agents_of_their_own(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(**changes: object) -> Path | None:
        return agent_socket(config.model_copy(update=changes))

    same = agent_socket(config)
    assert other(chunk_tokens=512, load_mode="layerwise", admission="never") == same
    assert other(tenant="else") != same
    assert other(bulk_url="file:///else") != same
    assert other(s3_secret_access_key="x") != same
    monkeypatch.setenv("AWS_PROFILE", "else")
    assert agent_socket(config) != same
    assert other(agent="unix:///run/x.sock") == Path("/run/x.sock")
    assert other(agent="private") is None


def test_a_folder_of_another_user_is_refused_also_at_a_later_start(
    config: Config, path: Path
) -> None:
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="not a private folder"):
        agent_socket(config)
    with pytest.raises(ConfigError, match="not a private folder"):
        start_agent(path, {}, 1)


def test_replicas_of_an_agent_with_keys_need_none_but_say_how_payloads_are_sealed(
    config: Config, path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"key-1 * {os.urandom(32).hex()}\n")
    file.chmod(0o600)
    keys = {"signing_keys_file": file}

    def connect(**changes: object) -> None:
        settings = config.model_copy(update={"agent": f"unix://{path}"} | changes)
        AgentLink(settings, REPLICA).connect().close()

    with NodeAgent(config.model_copy(update=keys), path, MemoryRecorder()):
        connect(seals="signed")
        connect(**keys)
        with pytest.raises(AgentRefused, match="set seals=signed"):
            connect()
    with NodeAgent(config, path, MemoryRecorder()):
        connect()
        with pytest.raises(AgentRefused, match="this agent has no keys"):
            connect(**keys)
    with pytest.raises(ConfigError, match="the signing keys are not configured"):
        NodeAgent(config.model_copy(update={"seals": "signed"}), path, MemoryRecorder())


def test_the_command_says_where_it_serves_and_ends_in_order(tmp_path: Path) -> None:
    settings = {"bulk_url": f"file://{tmp_path}/c", "index_url": f"sqlite://{tmp_path}/i"}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    with AgentProcess(settings, fresh=True) as agent:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
        wait_until(lambda: f"serving {agent.path}" in agent.log())
        again = run_agent(settings, agent.path)
        assert again.returncode == 2
        assert "another agent serves" in again.stderr
        assert agent.end()["saves"] == 0
        assert not agent.path.exists()
        assert agent.process.returncode == 0


def test_a_store_that_hangs_is_checked_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the status is read."""
    monkeypatch.setattr(agent_module, "_CHECK_S", 0.01)
    go_on, begun = threading.Event(), list[int]()

    def hang() -> None:
        begun.append(1)
        go_on.wait(PATIENCE_S)

    check = agent_module.in_time(hang)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            check()
    assert len(begun) == 1
    go_on.set()


def run_agent(
    settings: Mapping[str, str], path: Path, *options: str
) -> "subprocess.CompletedProcess[str]":
    """The command, if it ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "objkv", "agent", "--socket", str(path), *options],
        env=os.environ | {f"OBJKV_{name.upper()}": value for name, value in settings.items()},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_an_agent_that_nobody_uses_ends(config: Config, path: Path) -> None:
    start_agent(path, agent_environment(config), idle_s=1)
    wait_until(lambda: is_listening(path))
    client = AgentConnection(path)
    time.sleep(1.5)  # longer than it would wait
    assert is_listening(path)
    client.close()
    wait_until(lambda: not path.exists())


# Processes of an agent that fetches by TLS: how many, and that none outlives it.


LAYER = LayerSpec("l", "BF16", (2, 2, 72, 8192))
"""Larger than a range."""
KEYS = [ChunkKey(NAMESPACE, bytes([number]) * 20, 0) for number in range(6)]
S3_SETTINGS = {
    "bulk_url": "s3://bucket/kv",
    "s3_region": "us-east-1",
    "s3_addressing": "path",
    "s3_access_key_id": "test",
    "s3_secret_access_key": "testsecret",
}


@pytest.mark.slow
def test_all_processes_end_with_a_killed_agent(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "tls")
    constants = {"objkv.assembly.fetchers.process_count": 1}
    with QuickS3(tls=certificates) as server:
        settings = S3_SETTINGS | {
            "index_url": f"sqlite://{tmp_path}/index",
            "s3_endpoint_url": server.url,
            "s3_ca_bundle": str(certificates / "ca.pem"),
            "load_deadline_ms": "60000",
            "agent_memory_bytes": "20MiB",  # of four payloads
        }
        with open_backends(load_config(settings, environ={}), NullRecorder()) as backends:
            for key in KEYS:
                claim, made = Claim(key, bytes(20), 0, CHUNK), Provenance("0" * 64, "w", 1)
                payload = encode(
                    claim, [LAYER], [bytes(LAYER.nbytes)], codec="none", provenance=made
                )
                backends.bulk.put(key.path(), payload)
                entry = ChunkEntry(NAMESPACE, key.prefix_hash, bytes(20), 0, CHUNK)
                record = shard_record(read_header(payload))
                backends.index.publish(entry, {key.field: record}, ttl_s=3_600)
            wanted = wanted_of(backends.index, KEYS)
        with AgentProcess(settings, constants=constants) as agent:
            client = AgentConnection(agent.path, wants_arena=True, call_s=PATIENCE_S)

            def is_used() -> bool:
                for one in wanted:
                    (lease,) = opened(client, [one])
                    assert ended(client, lease).state is CellState.READY
                    client.release([lease.number])
                return agent.metrics()["fetch_process_gets_total"] > 0

            wait_until(is_used)
            pids = agent.fetchers()
            assert pids
            client.close()
            agent.kill()
            for pid in pids:
                wait_until(partial(has_ended, pid))


@pytest.mark.parametrize(
    ("given", "cores", "expected"),
    [({}, 64, 4), ({}, 16, 2), ({}, 7, 0), ({"s3_endpoint_url": "http://127.0.0.1:1"}, 64, 0)],
)
def test_processes_are_as_many_as_tls_and_cores_ask_for(
    given: dict[str, str], cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetchers, "host_cores", lambda: cores)
    usual = {"s3_endpoint_url": "https://127.0.0.1:1"}
    config = load_config(S3_SETTINGS | usual | given, environ={})
    assert process_count(open_s3(config)) == expected
