"""Gets by processes keep what every store promises, whatever happens to a process."""

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from objkv.errors import StoreDenied, StoreError, StoreUnavailable, TransferError, ValueTooLong
from objkv.net.deadline import EndsBy
from objkv.stores import processes
from objkv.stores.base import Arrived
from objkv.stores.local import LocalStore
from objkv.stores.processes import ANSWERS, FetchPool, FetchProcess, ProcessStore, failed
from objkv.telemetry import MemoryRecorder
from tests.contracts.store_contract import StoreContract
from tests.support.servers.process import has_ended
from tests.support.waiting import PATIENCE_S, wait_until

LANES = 4
ROOT = Path(__file__).parents[2]
SIZE = 1 << 20


class Counted(LocalStore):
    """The agent's own store. Remembers where each get began."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.starts: list[int | None] = []

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        self.starts.append(start)
        return super().get_into(key, buffer, arrived, start)


class Fleet:
    def __init__(self, folder: Path, **limits: float) -> None:
        self.values, self.gates = folder / "values", folder / "gates"
        self.gates.mkdir(parents=True)
        self.recorder = MemoryRecorder()
        command = [
            *(sys.executable, "-m", "tests.support.fetch_child"),
            *(str(self.values), str(self.gates)),
        ]
        start = partial(FetchProcess, command, os.environ | {"PYTHONPATH": str(ROOT)}, LANES)
        self.own = Counted(self.values)
        self.pool = FetchPool(start, 1, self.recorder, **limits)
        self.store = ProcessStore(
            self.own, self.pool, deadline_s=PATIENCE_S, recorder=self.recorder
        )

    def ready(self) -> list[int]:
        """Wait for the process. Its number."""
        self.store.put("warm", bytes(SIZE))

        def is_ready() -> bool:
            self.store.get_into("warm", memoryview(bytearray(SIZE)))
            return bool(self.pids())

        wait_until(is_ready)
        return self.pids()

    def pids(self) -> list[int]:
        with self.pool._lock:
            return [one.pid for one in self.pool._processes if one.is_ready]

    def busy(self) -> int:
        """Return the number of channels that make a get or owe the answer to one."""
        with self.pool._lock:
            return sum(len(one.channels) - len(one.free) for one in self.pool._processes)

    def at_half(self, pid: int) -> None:
        wait_until((self.gates / f"half-{pid}").exists)

    def go(self, pid: int) -> None:
        (self.gates / f"go-{pid}").touch()


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_RESTART_S", 0.001)
    monkeypatch.setattr(processes, "_LOOK_S", 0.01)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.store.close()


@pytest.fixture
def one_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def value(seed: int, nbytes: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Processes for all tests of the contract, since one takes half a second to start."""
    fleet = Fleet(tmp_path_factory.mktemp("contract"))
    fleet.ready()
    yield fleet
    assert fleet.recorder.value("fetch_process_losses") == 0
    fleet.store.close()


class TestContract(StoreContract):
    @pytest.fixture
    def store(self, shared: Fleet, monkeypatch: pytest.MonkeyPatch) -> ProcessStore:
        monkeypatch.setattr(processes, "_BYTES_MIN", 0)
        monkeypatch.setattr(shared.store, "close", lambda: None)
        wait_until(lambda: not shared.busy())
        assert shared.pids(), "gets are made by a process"
        for entry in list(shared.own.scan("")):
            shared.own.delete(entry.key)
        return shared.store


def test_errors_are_told_as_what_they_are() -> None:
    for error in (StoreUnavailable("x y"), StoreDenied("\udcff"), ValueTooLong("l"), KeyError("k")):
        answer = failed(7, error)
        assert ANSWERS.validate_json(ANSWERS.dump_json(answer)) == answer
        assert answer.error is not None
        kind = processes._ERRORS[answer.error]
        assert kind is (type(error) if isinstance(error, StoreError) else StoreError)
        assert str(error).replace("\udcff", "?") in answer.text
    with pytest.raises(ValueError, match="error"):
        ANSWERS.validate_json(b'{"number": 3, "nbytes": null, "error": 9}')


def test_small_gets_and_those_before_a_process_is_ready_stay_here(fleet: Fleet) -> None:
    fleet.store.put("a", value(1))
    into = memoryview(bytearray(SIZE))
    assert fleet.store.get_into("a", into) == SIZE
    assert into == value(1)
    assert fleet.own.starts == [None]
    fleet.ready()
    fleet.own.starts.clear()
    fleet.store.get_into("warm", into)
    assert fleet.own.starts == []
    fleet.store.put("small", b"x")
    assert fleet.store.get_into("small", memoryview(bytearray(10))) == 1
    assert fleet.own.starts == [None]


@pytest.mark.parametrize("by", ["signal", "close"])
def test_a_get_of_a_killed_process_fails_and_the_next_one_does_not(
    fleet: Fleet, one_thread: ThreadPoolExecutor, by: str
) -> None:
    """What was reported is not written again, and the value may have been replaced meanwhile."""
    (pid,) = fleet.ready()
    fleet.own.starts.clear()
    fleet.store.put("held/a", value(2))
    into, seen = memoryview(bytearray(SIZE)), list[int]()
    got = one_thread.submit(fleet.store.get_into, "held/a", into, seen.append)
    fleet.at_half(pid)
    wait_until(lambda: seen)
    if by == "signal":
        os.kill(pid, signal.SIGKILL)
    else:
        fleet.pool.close()
    with pytest.raises(TransferError, match=f"ended after {SIZE // 2} bytes"):
        got.result(PATIENCE_S)
    assert (seen, fleet.own.starts) == ([SIZE // 2], [])
    assert fleet.store.get_into("held/a", into) == SIZE
    assert into == value(2)
    assert fleet.own.starts == [None]
    wait_until(partial(has_ended, pid))
    if by == "signal":
        assert fleet.recorder.value("fetch_process_losses") == 1
        assert fleet.ready() != [pid]


@pytest.mark.slow
def test_a_stopped_process_is_late_then_killed_and_changes_no_byte(
    fleet: Fleet, one_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffer gets another value right after the deadline, as memory of the arena does."""
    monkeypatch.setattr(processes, "GRACE_S", 0.0)
    (pid,) = fleet.ready()
    fleet.store.put("held/a", value(3))
    into = memoryview(bytearray(SIZE))
    wait = threading.Event()

    def get() -> None:
        with EndsBy(time.monotonic() + 5.0):
            fleet.store.get_into("held/a", into, lambda _: wait.set())

    got = one_thread.submit(get)
    assert wait.wait(PATIENCE_S)
    fleet.at_half(pid)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable, match="did not answer"):
        got.result(PATIENCE_S)
    other = value(4)
    into[:] = other
    wait_until(partial(has_ended, pid))
    assert into == other
    fleet.ready()
    fleet.store.put("b", value(5))
    assert fleet.store.get_into("b", into) == SIZE
    assert into == value(5)


def test_a_process_that_writes_late_writes_to_its_own_memory(
    fleet: Fleet, one_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", PATIENCE_S)
    (pid,) = fleet.ready()
    fleet.store.put("held/a", value(6))
    into = memoryview(bytearray(SIZE))

    def get() -> None:
        with EndsBy(time.monotonic() + 1.0):
            fleet.store.get_into("held/a", into, lambda _: None)

    with pytest.raises(StoreUnavailable):
        one_thread.submit(get).result(PATIENCE_S)
    other = value(7)
    into[:] = other
    fleet.go(pid)
    wait_until(lambda: not fleet.busy())
    assert into == other
    assert fleet.pids() == [pid], "it has answered in time, so it is used again"
    assert fleet.store.get_into("held/a", into, lambda _: None) == SIZE
    assert into == value(6)


def test_a_process_that_owes_an_answer_gets_something_new(fleet: Fleet) -> None:
    (pid,) = fleet.ready()
    fleet.store.put("held/a", value(8))

    class Stop(Exception): ...

    def stop(_: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        fleet.store.get_into("held/a", memoryview(bytearray(SIZE)), stop)
    fleet.own.starts.clear()
    fleet.store.get_into("warm", memoryview(bytearray(SIZE)))
    assert fleet.own.starts == []
    assert fleet.busy() == 1
    fleet.go(pid)
    wait_until(lambda: not fleet.busy())


def test_a_process_that_reports_too_much_is_ended(fleet: Fleet) -> None:
    (pid,) = fleet.ready()
    fleet.store.put("lying/a", value(12))
    into = memoryview(bytearray(SIZE))
    assert fleet.store.get_into("lying/a", into) == SIZE
    assert into == value(12)
    wait_until(partial(has_ended, pid))


@pytest.mark.parametrize("command", ["/no/such/program", "true"])
def test_a_program_that_cannot_run_or_ends_costs_no_get_and_is_not_started_at_once_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, command: str
) -> None:
    monkeypatch.setattr(processes, "_RESTART_S", 3600.0)
    store, recorder, started = Counted(tmp_path), MemoryRecorder(), list[int]()

    def start() -> FetchProcess:
        started.append(1)
        return FetchProcess([command], os.environ, 1)

    pool = FetchPool(start, 1, recorder)
    apart = ProcessStore(store, pool, deadline_s=1.0, recorder=recorder)
    apart.put("a", value(1))
    into = memoryview(bytearray(SIZE))
    assert apart.get_into("a", into) == SIZE
    wait_until(lambda: "fetching process" in caplog.text)
    for _ in range(20):
        assert apart.get_into("a", into) == SIZE
        time.sleep(0.001)
    apart.close()
    assert len(started) == 1


@pytest.mark.slow
def test_processes_end_when_idle_with_their_memory_and_start_again(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # an idle agent may not collect for hours
    try:
        others = memory_maps()
        fleet = Fleet(tmp_path, idle_s=2.0)
        (pid,) = fleet.ready()
        assert memory_maps() > others
        wait_until(partial(has_ended, pid))
        wait_until(lambda: not fleet.pids() and memory_maps() <= others)
        assert fleet.ready() != [pid]
        fleet.store.close()
        assert fleet.recorder.value("fetch_process_losses") == 0
    finally:
        gc.enable()


def memory_maps() -> int:
    return Path("/proc/self/maps").read_text().count("objkv-fetch")


def test_a_process_cannot_cut_its_memory_off() -> None:
    fd, view = processes._shared_memory(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    assert view[4095] == 0


def test_the_watching_thread_outlives_a_fault(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pid,) = fleet.ready()
    look, faults = FetchProcess.is_alive, iter((MemoryError(), ValueError()))

    def faulty(self: FetchProcess) -> bool:
        for fault in faults:
            raise fault
        return look(self)

    monkeypatch.setattr(FetchProcess, "is_alive", faulty)
    os.kill(pid, signal.SIGKILL)
    wait_until(partial(has_ended, pid))
    wait_until(lambda: pid not in fleet.pids())
    assert fleet.ready() != [pid]
    assert next(faults, None) is None


def test_a_signal_to_the_group_does_not_end_a_process(fleet: Fleet) -> None:
    """An agent that drains still fetches."""
    (pid,) = fleet.ready()
    assert os.getpgid(pid) == pid, "Ctrl-C at a terminal is for the agent"
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    into = memoryview(bytearray(SIZE))
    fleet.own.starts.clear()
    assert fleet.store.get_into("warm", into) == SIZE
    assert fleet.own.starts == []
    assert fleet.pids() == [pid]
