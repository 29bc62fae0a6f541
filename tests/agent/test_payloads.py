"""Whole payloads, read and written by way of an agent."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import current_thread
from typing import Any

import pytest

from objkv.agent.client import AgentConnection
from objkv.agent.fill import PayloadRequest
from objkv.agent.messages import Commit, CommitStatus
from objkv.agent.payloads import (
    PayloadReader,
    PayloadTransfer,
    PayloadWriter,
    ReadOutcome,
    WriteOutcome,
)
from objkv.codec.payload import LayerSpec, frame_pages, payload_bytes_max, read_header
from objkv.errors import TransferError
from tests.agent.world import PATIENCE_S, RIGHT, Node, gated, payloads
from tests.contracts.clock import ManualClock
from tests.support.samples import CHUNK
from tests.support.waiting import wait_until

LAYERS = tuple(LayerSpec(name, "BF16", (CHUNK // 8, 2, 8, 8)) for name in ("l.0", "l.1"))


class Read(PayloadTransfer):
    def __init__(
        self,
        wanted: PayloadRequest,
        layers: tuple[LayerSpec, ...] = LAYERS,
        *,
        deadline: float = PATIENCE_S,
        fails: bool = False,
    ) -> None:
        super().__init__(wanted.claim, layers, deadline)
        self.dropped, self.fails = False, fails
        self.pages: list[bytes] = []
        self.outcomes: list[tuple[ReadOutcome, int]] = []
        self.ended: Callable[[], None] = lambda: None

    @property
    def is_needed(self) -> bool:
        return not self.dropped

    def take_pages(self, pages: Sequence[memoryview]) -> None:
        if self.fails:
            raise RuntimeError("no memory")
        self.pages = [bytes(page) for page in pages]

    def end(self, outcome: ReadOutcome, nbytes: int) -> None:
        self.outcomes.append((outcome, nbytes))
        self.ended()

    @property
    def outcome(self) -> ReadOutcome:
        wait_until(lambda: bool(self.outcomes))
        ((outcome, nbytes),) = self.outcomes
        assert nbytes == (self.nbytes if outcome is ReadOutcome.READ else 0)
        return outcome


class Agents(list[Node]):
    """The agents of a node, one after the other."""

    def connect(self, **more: Any) -> AgentConnection:
        """A connection to the present one, if there is one."""
        if not self:
            raise TransferError("no agent")
        return self[-1].connect(**more)

    def replace(self) -> None:
        """Start another one over the same stores."""
        self.append(Node(store=self[-1].store, index=self[-1].index).listen())


@pytest.fixture
def agents() -> Iterator[Agents]:
    agents = Agents()
    yield agents
    for node in agents:
        node.close()


@contextmanager
def reading(connect: Any, clock: ManualClock | None = None) -> Iterator[PayloadReader]:
    """A reader, on a clock that stands still."""
    reader = PayloadReader(connect, "samples", clock=clock or ManualClock(0.0))
    try:
        yield reader
    finally:
        reader.close()
        assert not reader._thread.is_alive()


def outcomes(reader: PayloadReader, *reads: Read) -> list[ReadOutcome]:
    reader.read(reads)
    return [one.outcome for one in reads]


def test_pages_are_verified_and_their_leases_end(node: Node) -> None:
    reads = [Read(one) for one in node.save(range(300 * CHUNK))]
    with reading(node.connect) as reader:
        assert set(outcomes(reader, *reads)) == {ReadOutcome.READ}
        assert all(one.pages == RIGHT for one in reads)
        wait_until(lambda: node.arena_cache.leased() == 0)


def test_another_form_is_left_alone_and_a_missing_payload_is_forgotten(node: Node) -> None:
    one, gone, _ = node.save()
    node.store.delete(gone.claim.key.path())
    other = (LAYERS[0], LayerSpec("l.1", "BF16", (CHUNK // 8, 2, 4, 16)))
    with reading(node.connect) as reader:
        found = outcomes(reader, Read(one, other), Read(gone))
        assert found == [ReadOutcome.REFUSED, ReadOutcome.MISSING]
        assert outcomes(reader, Read(one)) == [ReadOutcome.READ]
    assert not node.wanted([gone.claim.key])


def test_pages_that_changed_in_the_arena_are_rejected(node: Node) -> None:
    (one, *_) = node.save()
    with reading(node.connect) as reader:
        assert outcomes(reader, Read(one)) == [ReadOutcome.READ]
        (resident,) = node.open(one)
        node.arena_cache.view(resident)[-1] ^= 1
        node.arena_cache.release(resident)
        broken = Read(one)
        assert outcomes(reader, broken) == [ReadOutcome.CORRUPT]
        assert not broken.pages
        wait_until(lambda: not node.wanted([one.claim.key]))
        assert not node.arena_cache.contains_ready([one.claim.key.path()])[0]


def test_a_corrupt_payload_that_is_made_again_as_its_read_ends_stays(node: Node) -> None:
    (one, *_), (again, *_) = node.save(), payloads()
    stored = bytearray(node.store.get(one.claim.key.path()))
    stored[-1] ^= 1
    node.store.put(one.claim.key.path(), stored)
    read = Read(one)

    def make_again() -> None:
        assert node.commit_one(again) is CommitStatus.ACCEPTED
        assert node.saves.drain(PATIENCE_S)

    read.ended = make_again
    with reading(node.connect) as reader:
        assert outcomes(reader, read) == [ReadOutcome.CORRUPT]
        assert outcomes(reader, Read(one)) == [ReadOutcome.READ]
    assert node.wanted([one.claim.key])
    assert node.recorder.value("agent_fills") == 1, "it was still in the arena"


def test_a_payload_of_another_chunk_or_of_other_tokens_is_corrupt(node: Node) -> None:
    """The agent has the second one already, and does not look at it again."""
    one, other, third = node.save()
    node.store.put(one.claim.key.path(), node.store.get(other.claim.key.path()))
    wrong = PayloadRequest(replace(third.claim, token_end=99), third.record)
    with reading(node.connect) as reader:
        found = outcomes(reader, Read(one), Read(third), Read(wrong))
        assert found == [ReadOutcome.CORRUPT, ReadOutcome.READ, ReadOutcome.CORRUPT]


def test_a_payload_where_another_one_should_be_is_corrupt(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from an agent that mixes up offsets."""
    one, other, _ = node.save()
    with reading(node.connect) as reader:
        assert outcomes(reader, Read(one), Read(other)) == [ReadOutcome.READ] * 2
        begin = AgentConnection.open

        def swapped(*given: Any, **more: Any) -> Any:
            first, second = begin(*given, **more)
            return [
                first._replace(progress=second.progress),
                second._replace(progress=first.progress),
            ]

        monkeypatch.setattr(AgentConnection, "open", swapped)
        assert outcomes(reader, Read(one), Read(other)) == [ReadOutcome.CORRUPT] * 2


def test_what_comes_too_late_or_is_not_needed_any_more_ends(node: Node) -> None:
    late, unneeded, _ = node.save()
    gate = gated(node)
    reads, clock = [Read(late, deadline=5.0), Read(unneeded)], ManualClock(0.0)
    with reading(node.connect, clock) as reader:
        reader.read(reads)
        wait_until(lambda: node.arena_cache.leased() == 2)
        reads[1].dropped = True
        reader.recheck()
        assert reads[1].outcome is ReadOutcome.UNWANTED
        clock.advance(5.0)
        reader.recheck()
        assert reads[0].outcome is ReadOutcome.LATE
        assert outcomes(reader, Read(late, deadline=5.0)) == [ReadOutcome.LATE]
        gate.set()
        wait_until(lambda: node.arena_cache.leased() == 0)


def test_a_reader_that_fails_costs_one_payload_and_a_bug_what_is_being_opened(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, _ = node.save()
    with reading(node.connect) as reader:
        found = outcomes(reader, Read(one, fails=True), Read(other))
        assert found == [ReadOutcome.FAILED, ReadOutcome.READ]
        with monkeypatch.context() as patch:
            patch.setattr(AgentConnection, "open", lambda *_, **__: 1 / 0)
            assert outcomes(reader, Read(one)) == [ReadOutcome.FAILED]
        assert outcomes(reader, Read(one)) == [ReadOutcome.READ]


def test_an_agent_that_ends_fails_what_is_open_and_not_what_an_end_of_a_read_asks_for(
    agents: Agents,
) -> None:
    """Else one lost connection would fail all of a queue that feeds the reader piece by piece. The
    next agent serves."""
    agents.append(Node().listen())
    one, *_ = agents[0].save()
    gate, read, then = gated(agents[0]), Read(one), Read(one)
    with reading(agents.connect) as reader:
        read.ended = lambda: reader.read([then])
        reader.read([read])
        wait_until(lambda: agents[0].arena_cache.leased() == 1)
        agents.replace()
        agents[0].server.close()
        assert read.outcome is ReadOutcome.FAILED
        gate.set()
        assert then.outcome is ReadOutcome.READ


def test_what_comes_just_when_nothing_waited_is_read(node: Node) -> None:
    one, *_ = node.save()
    late = [Read(one)]
    read = late[0]

    class Waiting(deque[PayloadTransfer]):
        """A read comes after the reader has looked whether any waits."""

        def __len__(self) -> int:
            found = super().__len__()
            if late and current_thread() is reader._thread:
                reader.read([late.pop()])
            return found

    with reading(node.connect) as reader:
        reader._waiting = Waiting()
        reader.recheck()
        assert read.outcome is ReadOutcome.READ


def test_an_agent_that_is_replaced_costs_nothing(agents: Agents) -> None:
    agents.append(Node().listen())
    one, *_ = agents[0].save()
    with reading(agents.connect) as reader:
        assert outcomes(reader, Read(one)) == [ReadOutcome.READ]
        agents.replace()
        agents[0].core.drain()
        assert outcomes(reader, Read(one)) == [ReadOutcome.READ]
        assert len(agents[1].clients) == 1


def test_without_an_agent_reads_fail_at_once_and_it_is_tried_again(agents: Agents) -> None:
    node = Node().listen()
    one, *_ = node.save()
    with reading(agents.connect) as reader:
        assert outcomes(reader, Read(one)) == [ReadOutcome.FAILED]
        agents.append(node)
        wait_until(lambda: outcomes(reader, Read(one)) == [ReadOutcome.READ])
    assert outcomes(reader, Read(one)) == [ReadOutcome.FAILED]


class Write(PayloadTransfer):
    """One of the samples, to be saved."""

    def __init__(self, number: int = 0, *, fails: bool = False, deadline: float = 5.0) -> None:
        super().__init__(read_header(payloads()[number]).claim, LAYERS, deadline)
        self._fails = fails
        self.ended: list[tuple[WriteOutcome, int]] = []

    def write_pages(self, pages: memoryview) -> None:
        if self._fails:
            raise TransferError("the device failed")
        pages[:] = b"".join(RIGHT)

    def end(self, outcome: WriteOutcome, nbytes: int) -> None:
        self.ended.append((outcome, nbytes))

    @property
    def outcome(self) -> WriteOutcome:
        ((outcome, _),) = self.ended
        return outcome


@contextmanager
def writing(
    node: Node | Agents,
    clock: ManualClock | None = None,
    nbytes_max: int = payload_bytes_max(LAYERS),
    **more: Any,
) -> Iterator[PayloadWriter]:
    """A writer, on a clock that stands still."""
    clock, connect = clock or ManualClock(0.0), partial(node.connect, wants_arena=False)
    writer = PayloadWriter(connect, nbytes_max, "samples", writer="w", clock=clock, **more)
    try:
        yield writer
    finally:
        writer.close(PATIENCE_S)


def written(writer: PayloadWriter, *writes: Write) -> list[WriteOutcome]:
    for one in writes:
        writer.write(one)
    assert writer._pool.drain(PATIENCE_S)
    return [one.outcome for one in writes]


def test_a_payload_that_is_written_is_saved_once(node: Node) -> None:
    one, again, other = Write(), Write(), Write(1)
    with writing(node) as writer:
        accepted = WriteOutcome.ACCEPTED
        found = written(writer, one, again, other)
        assert found == [accepted, WriteOutcome.REPEATED, accepted]
        (_, nbytes), *_ = one.ended
    assert node.saves.drain(PATIENCE_S)
    for write in (one, other):
        payload = node.store.get(write.claim.key.path())
        header = read_header(payload)
        assert (header.claim, header.nbytes, header.provenance.writer) == (write.claim, nbytes, "w")
        assert [bytes(frame_pages(header, n, payload, None)) for n in range(2)] == RIGHT
    with writing(node) as writer:
        assert written(writer, Write()) == [WriteOutcome.EXISTED]


def test_what_cannot_be_written_costs_one_payload(node: Node) -> None:
    with writing(node) as writer:
        found = written(writer, Write(fails=True), Write(1, deadline=0.0), Write(2))
        assert found == [WriteOutcome.FAILED, WriteOutcome.DROPPED, WriteOutcome.ACCEPTED]
    with writing(node, nbytes_max=1) as writer:
        assert written(writer, Write()) == [WriteOutcome.FAILED]


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(CommitStatus.SHED, WriteOutcome.SHED), (CommitStatus.OVER_QUOTA, WriteOutcome.OVER_QUOTA)],
)
def test_an_agent_that_saves_nothing_is_left_alone_for_a_while(
    node: Node, monkeypatch: pytest.MonkeyPatch, status: CommitStatus, outcome: WriteOutcome
) -> None:
    commits: list[int] = []

    def commit(_outbox: Any, commit: Commit, _replica: bytes) -> CommitStatus:
        commits.append(commit.nbytes)
        return status

    clock = ManualClock(0.0)
    with writing(node, clock) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(node.saves, "commit", commit)
            *_, last = written(writer, Write(), Write(1), Write(2))
        assert (last, len(commits)) == (outcome, 1)
        clock.advance(5.0)
        assert written(writer, Write(deadline=10.0)) == [WriteOutcome.ACCEPTED]


def test_writes_without_an_agent_are_dropped_until_there_is_one(agents: Agents) -> None:
    clock = ManualClock(0.0)
    with writing(agents, clock) as writer:
        assert written(writer, Write()) == [WriteOutcome.FAILED]
        agents.append(Node().listen())
        clock.advance(1.0)
        assert written(writer, Write()) == [WriteOutcome.ACCEPTED]
        agents[0].server.close()
        agents.append(Node().listen())
        assert written(writer, Write(1)) == [WriteOutcome.ACCEPTED]
    late = Write()
    writer.write(late)
    assert late.outcome is WriteOutcome.DROPPED


def test_who_writes_learns_what_is_held_back_and_may_forbid_it() -> None:
    node = Node(holds_back=True).listen()
    with writing(node) as writer:
        assert written(writer, Write()) == [WriteOutcome.HELD_BACK]
    with writing(node, puts=True) as writer:
        assert written(writer, Write(1)) == [WriteOutcome.ACCEPTED]
    node.close()
