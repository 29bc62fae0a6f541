"""A replica's one thread of lookups and other calls, over the socket of an agent."""

import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Event, Thread
from threading import enumerate as enumerate_threads
from typing import Any, TypeVar

import pytest

from objkv import background
from objkv.agent.client import AgentCalls, AgentConnection
from objkv.background import Question, Steps, StepThread
from objkv.cache.lookup import LookupLimits, LookupService
from objkv.errors import StoreUnavailable
from objkv.index.base import ShardRecords
from objkv.telemetry import MemoryRecorder
from tests.agent.world import Node, Paused
from tests.support.samples import NAMESPACE
from tests.support.waiting import PATIENCE_S, wait_until

T = TypeVar("T")
FIELD = "0"
_SOON_S = 30.0
"""For another thread to come."""


class Replica:
    """The lookups of a scheduler, and an index of the agent that can be made to hang."""

    def __init__(self, node: Node) -> None:
        self.known = [one.claim.key.prefix_hash for one in node.save()]
        self.node, self.hanging = node, list[bytes]()
        find, self.gate = node.index.find, Paused(node.index, "touch").go

        def slow(namespace: str, hashes: Sequence[bytes], fields: Sequence[str]) -> Any:
            if not hashes[0].strip(b"x"):
                self.hanging.append(hashes[0])
                assert self.gate.wait(PATIENCE_S)
            return find(namespace, hashes, fields)

        node.index.find = slow  # type: ignore[method-assign]
        self.calls = AgentCalls(lambda: node.connect(wants_arena=False))
        self.recorder = MemoryRecorder()
        limits = LookupLimits(PATIENCE_S, queue_max=10_000)
        self.lookups = LookupService(self.calls, [FIELD], self.recorder, limits)

    def find(self, name: str, hashes: Sequence[bytes]) -> list[bool]:
        """Which chunks are found; waits for the answer."""
        wait_until(lambda: self.ask(name, hashes) is not None)
        return [one is not None for one in self.ask(name, hashes) or ()]

    def ask(self, name: str, hashes: Sequence[bytes]) -> tuple[ShardRecords | None, ...] | None:
        return self.lookups.ask(name, NAMESPACE, hashes)

    def close(self) -> None:
        self.gate.set()
        self.lookups.close()
        self.calls.close()


@pytest.fixture
def replica(node: Node) -> Iterator[Replica]:
    replica = Replica(node)
    yield replica
    replica.close()


def test_a_slow_question_delays_nothing_that_is_known(replica: Replica) -> None:
    assert replica.find("first", replica.known) == [True] * 3
    assert replica.ask("slow", [b"x" * 20]) is None
    wait_until(lambda: replica.hanging == [b"x" * 20])
    for number in range(20):
        assert replica.find(str(number), replica.known) == [True] * 3
    assert replica.ask("slow", [b"x" * 20]) is None
    replica.gate.set()
    assert replica.find("slow", [b"x" * 20]) == [False]


def test_a_slow_call_delays_no_lookup(replica: Replica) -> None:
    assert replica.lookups.submit(lambda: replica.calls.touch(NAMESPACE, replica.known, ttl_s=1))
    assert replica.find("r", replica.known) == [True] * 3
    assert replica.find("other", [bytes(20)]) == [False]
    assert replica.lookups._thread.unfinished == 1


def test_all_questions_are_sent_before_the_first_is_answered(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, send = list[bool](), AgentConnection.send

    def counted(self: AgentConnection, message: bytes) -> bool:
        sent.append(send(self, message))
        return sent[-1]

    monkeypatch.setattr(AgentConnection, "send", counted)
    for number in range(20):
        assert replica.ask(str(number), [b"x" * 20, bytes([number]) * 20]) is None
    wait_until(lambda: sent.count(True) == 20)
    threads = [one.name for one in enumerate_threads() if one.name.startswith("objkv-lookup")]
    assert threads == ["objkv-lookup"]
    replica.gate.set()
    assert [replica.find(str(number), [b"x" * 20, b"?"]) for number in range(20)] == [
        [False, False]
    ] * 20


def test_questions_that_a_socket_has_no_room_for_are_sent_later(replica: Replica) -> None:
    prompts = [
        [number.to_bytes(20, "big") for number in range(at, at + 300)]
        for at in range(1, 300_000, 300)
    ]
    assert replica.ask("slow", [b"x" * 20]) is None
    for number, prompt in enumerate(prompts):
        assert replica.ask(str(number), prompt) is None
    replica.gate.set()
    for number, prompt in enumerate(prompts):
        assert not any(replica.find(str(number), prompt))
    assert replica.recorder.value("lookup_errors") == 0


def test_questions_in_flight_fail_with_the_agent_and_later_ones_ask_the_next(
    replica: Replica, tmp_path: Any
) -> None:
    assert replica.ask("r", [b"x" * 20]) is None
    wait_until(lambda: bool(replica.hanging))
    for client in list(replica.node.server._clients):
        client.sock.shutdown(2)
    assert replica.find("r", [b"x" * 20]) == [False]
    assert replica.recorder.value("lookup_errors") == 1
    assert replica.find("again", replica.known) == [True] * 3


class Mute:
    """A line that never answers."""

    def __init__(self) -> None:
        self._pipe = os.pipe()
        self.fd = self._pipe[0]
        self.closed = False
        self.fails: Exception | None = None

    def fileno(self) -> int:
        return self.fd

    def send(self, message: bytes) -> bool:
        if self.fails is not None:
            raise self.fails
        return message != b"no room"

    def receive(self) -> bytes | None:
        return None

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for fd in self._pipe:
                os.close(fd)
            if self.fails is not None:
                raise self.fails


@pytest.fixture
def mute() -> Iterator[Mute]:
    line = Mute()
    yield line
    line.close()


@pytest.fixture
def thread() -> Iterator[StepThread]:
    thread = StepThread("objkv-test", answer_s=0.05)
    yield thread
    thread.close(1.0)


def begun(thread: StepThread, steps: Steps[T]) -> "Future[T]":
    """Work that the thread takes."""
    future = thread.start(steps)
    assert future is not None
    return future


def asking(line: Mute, message: bytes = b"question") -> Steps[bytes]:
    return (yield Question(line, message))


@pytest.mark.parametrize("message", [b"question", b"no room"])
def test_a_line_without_an_answer_is_lost_in_time(
    thread: StepThread, mute: Mute, message: bytes
) -> None:
    for one in [begun(thread, asking(mute, message)) for _ in range(3)]:
        assert isinstance(one.exception(_SOON_S), TimeoutError)
    assert mute.closed
    assert thread.unfinished == 0


def broken(error: BaseException) -> Steps[None]:
    raise error
    yield


@pytest.mark.parametrize(
    "breaks",
    [
        lambda thread, line, patch: thread.start(broken(MemoryError())),
        lambda thread, line, patch: thread.start(broken(SystemExit())),
        lambda thread, line, patch: setattr(line, "fails", OSError(24, "Too many open files")),
        lambda thread, line, patch: setattr(line, "fails", MemoryError()),
        lambda thread, line, patch: setattr(line, "fd", -1),
        lambda thread, line, patch: patch.setattr(select, "poll", failing_once(select.poll)),
        lambda thread, line, patch: patch.setattr(
            background, "monotonic", failing_once(background.monotonic)
        ),
    ],
)
def test_no_exception_ends_the_thread(
    thread: StepThread, mute: Mute, monkeypatch: pytest.MonkeyPatch, breaks: Any
) -> None:
    fd = mute.fd
    breaks(thread, mute, monkeypatch)
    asked = begun(thread, asking(mute))
    assert asked.exception(_SOON_S) is not None
    mute.fd = fd

    def adding() -> Steps[int]:
        yield None
        return 7

    after = begun(thread, adding())
    assert after.result(_SOON_S) == 7
    assert thread.unfinished == 0


def failing_once(call: Callable[[], Any]) -> Callable[[], Any]:
    left = [MemoryError()]

    def fail() -> Any:
        if left:
            raise left.pop()
        return call()

    return fail


def no_thread(_: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_work_is_refused_until_there_is_one(
    monkeypatch: pytest.MonkeyPatch, mute: Mute
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(background.Thread, "start", no_thread)
        thread = StepThread("objkv-test", answer_s=0.05)
        assert thread.start(asking(mute)) is None
        assert thread.unfinished == 0
    asked = begun(thread, asking(mute))
    assert isinstance(asked.exception(_SOON_S), TimeoutError)
    thread.close(1.0)
    assert thread.start(asking(mute)) is None


def test_work_that_takes_long_lets_others_go_first(thread: StepThread) -> None:
    ended = Event()

    def long() -> Steps[None]:
        while not ended.is_set():
            yield None

    def short() -> Steps[None]:
        ended.set()
        return
        yield

    first = begun(thread, long())
    thread.start(short())
    assert first.result(_SOON_S) is None


def test_what_has_work_done_goes_on_before_the_thread_that_it_wakes(
    thread: StepThread,
) -> None:
    """The thread that schedules would get the GIL back milliseconds later."""
    ran, interval = list[int](), sys.getswitchinterval()

    def sleeps(after: int) -> bool:
        return len(ran) == after and thread.is_idle

    sys.setswitchinterval(PATIENCE_S)  # no thread has to yield
    try:
        for number in range(100):
            wait_until(partial(sleeps, number))
            assert thread.run(lambda: ran.append(0))
            for _ in range(20_000):  # the woken thread waits for the GIL
                pass
            assert len(ran) == number
    finally:
        sys.setswitchinterval(interval)


def test_cancelled_work_gives_its_place_back_once() -> None:
    thread, may_go = StepThread("objkv-test", answer_s=PATIENCE_S, queue_max=2), Event()

    def blocks() -> None:
        may_go.wait(PATIENCE_S)

    assert thread.run(blocks)

    def quick() -> Steps[None]:
        yield None

    waiting = begun(thread, quick())
    assert thread.start(quick()) is None
    for _ in range(2):
        thread.cancel(waiting)
    assert thread.unfinished == 1
    other = begun(thread, quick())
    may_go.set()
    other.result(_SOON_S)
    wait_until(lambda: thread.unfinished == 0)
    thread.close(_SOON_S)


def test_closing_cancels_what_has_not_begun_and_fails_what_asks(mute: Mute) -> None:
    thread = StepThread("objkv-test", answer_s=PATIENCE_S)
    asked = begun(thread, asking(mute))
    wait_until(asked.running)
    thread.close(0.01)
    assert isinstance(asked.exception(_SOON_S), TimeoutError)
    assert mute.closed
    assert thread.unfinished == 0


def test_closing_takes_no_longer_than_what_has_begun(
    mute: Mute, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = StepThread("objkv-test", answer_s=PATIENCE_S)
    asked = begun(thread, asking(mute))
    wait_until(asked.running)
    closer = Thread(target=thread.close, args=(PATIENCE_S,))
    closer.start()
    wait_until(lambda: not thread.run(lambda: None))
    answers = [b"answer"]
    monkeypatch.setattr(mute, "receive", lambda: answers.pop() if answers else None)
    os.write(mute._pipe[1], b"x")
    closer.join(_SOON_S)
    assert not closer.is_alive()
    assert asked.result() == b"answer"


def test_a_connection_that_comes_too_late_is_closed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Paused(node, "connect")
    calls = AgentCalls(lambda: node.connect(wants_arena=False))
    thread = StepThread("objkv-test", answer_s=PATIENCE_S)
    monkeypatch.setattr(background, "JOIN_S", 0.0)
    asked = begun(thread, calls.find(NAMESPACE, [b"x" * 20], (FIELD,)))
    assert connect.begun.wait(PATIENCE_S)
    thread.close(0.0)
    calls.close()
    connect.go.set()
    assert isinstance(asked.exception(_SOON_S), StoreUnavailable)
    assert not node.clients[0].is_open


def test_a_question_that_closing_ends_is_no_failure(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    thread = StepThread("objkv-test", answer_s=PATIENCE_S)
    asked = begun(thread, replica.calls.find(NAMESPACE, [b"x" * 20], (FIELD,)))
    wait_until(lambda: bool(replica.hanging))
    with caplog.at_level("WARNING", "objkv"):
        thread.close(0.0)
    assert isinstance(asked.exception(_SOON_S), StoreUnavailable)
    assert not caplog.records
