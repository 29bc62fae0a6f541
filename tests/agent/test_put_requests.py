"""Two nodes: what one holds back, a lookup of the other makes it put."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from objkv.agent.client import AgentConnection
from objkv.agent.fill import Wanted
from objkv.agent.queue import Urgency
from objkv.agent.residents import MissReason
from objkv.agent.unsaved import requested
from objkv.agent.unsaved.requests import PutRequest, PutRequests
from objkv.codec.payload import read_header
from objkv.index.base import ChunkEntry, ShardRecord, Shards
from objkv.index.fields import COMING
from objkv.index.memory import MemoryIndex
from objkv.index.redis.index import RedisIndex
from objkv.index.shapes import SHAPES_HASH
from objkv.ops.warm.lookup import PromptLookup
from tests.agent.test_residents import Sleeper
from tests.agent.test_unsaved import Holder, find, paths, read
from tests.agent.test_unsaved_disk import DiskHolder
from tests.agent.world import PATIENCE_S, Desk, WatchedStore, denied, down, payloads
from tests.contracts.clock import ManualClock
from tests.support.agents import AgentProcess, await_names
from tests.support.samples import IDENTITY, NAMESPACE
from tests.support.servers.redis import RedisServer
from tests.support.waiting import wait_until

NONE = MissReason.NONE


class Pair:
    """Nodes that share a store and an index: one that holds payloads back, and one that looks."""

    def __init__(self, first: type[Holder] = Holder, *given: Any, **options: Any) -> None:
        self.time, self.clock = ManualClock(), ManualClock(0.0)
        self.index = MemoryIndex(clock=self.time)
        self.store = WatchedStore()
        shared: dict[str, Any] = {"store": self.store, "index": self.index, "requests": True}
        self.first: Any = first(*given, **shared, **options)
        wait_until(lambda: self.first.name != "")
        self.second = Holder(**shared, clock=self.clock)

    def look(self, made: Sequence[bytes]) -> list[Shards | None]:
        """What a client of the second node finds."""
        claims = [read_header(payload).claim for payload in made]
        hashes = [claim.key.prefix_hash for claim in claims]
        return self.second.reader.find(NAMESPACE, hashes, (claims[0].key.field,))

    def coming(self, made: Sequence[bytes]) -> int:
        """How many chunks are coming."""
        return sum(one is COMING for one in self.look(made))

    @contextmanager
    def busy(self) -> Iterator[None]:
        """No save of the first node gets its turn meanwhile, which needs ``saves_max=1``."""
        others, gate, put = payloads(range(500, 500 + 16 * 3)), Event(), self.store.put_if_absent

        def slow(key: str, value: Any) -> bool:
            assert gate.wait(PATIENCE_S)
            return put(key, value)

        self.store.put_if_absent = slow  # type: ignore[method-assign]
        self.first.commit(others)
        assert self.first.read(self.first.find(others)) == [NONE] * 3
        yield
        gate.set()

    def close(self) -> None:
        self.first.close()
        self.second.close()


@pytest.fixture(autouse=True)
def _ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requested, "_WAIT_S", 0.05)


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def made(*given: Any, **options: Any) -> Pair:
        pairs.append(Pair(*given, **options))
        return pairs[-1]

    yield made
    for pair in pairs:
        pair.close()


def test_what_another_node_holds_back_comes_when_it_is_looked_up(
    make: Callable[..., Pair],
) -> None:
    pair, made = make(), payloads()
    pair.first.commit(made)
    assert pair.coming(made) == 3
    wait_until(lambda: len(pair.second.find(made)) == 3)
    assert pair.second.read(pair.second.find(made)) == [NONE] * 3
    assert pair.store.gets.keys() == set(paths(made)), "by way of the bulk store"
    assert not pair.first.unsaved
    counted = pair.second.count
    assert (counted("agent_puts_requested"), counted("agent_puts_came")) == (3, 3)
    assert pair.first.count("agent_requested_puts") == 3
    assert pair.first.count("saves") == 3


def test_a_prompt_whose_beginning_is_stored_comes_from_there_on(
    make: Callable[..., Pair],
) -> None:
    pair, made = make(), payloads(list(range(16 * 8)))
    pair.first.commit(made)
    pair.first.read(pair.first.find(made)[:3])
    wait_until(lambda: pair.first.stored == set(paths(made[:3])))
    longer = [*made, *payloads(list(range(16 * 10)))[8:]]
    found = pair.look(longer)
    assert [one is COMING for one in found] == [False] * 3 + [True] * 5 + [False] * 2
    assert found[8:] == [None, None]
    wait_until(lambda: len(pair.second.find(longer)) == 8)


def test_what_only_the_disk_has_comes_too(make: Callable[..., Pair], tmp_path: Path) -> None:
    pair, made = make(DiskHolder, tmp_path / "disk"), payloads()
    pair.first.keep(made)
    assert pair.coming(made) == 3
    wait_until(lambda: len(pair.second.find(made)) == 3)
    assert pair.second.read(pair.second.find(made)) == [NONE] * 3
    assert pair.first.count("agent_disk_hits") == 3


def test_what_its_node_has_lost_is_waited_for_only_until_it_says_so(
    make: Callable[..., Pair],
) -> None:
    pair, made = make(memory=2 * 8192), payloads()
    pair.first.commit(made[:1])
    pair.first.commit(payloads(list(range(9000, 9000 + 16 * 4))))
    assert paths(made)[0] not in pair.first.unsaved
    assert pair.coming(made[:1]) == 1
    wait_until(lambda: pair.look(made[:1]) == [None])
    assert pair.index.holders(paths(made[:1])) == [""]
    assert pair.second.count("agent_puts_refused") == 1
    assert pair.second.count("agent_put_holders_silent") == 0
    pair.second.commit(made[:1])
    assert pair.second.stored == set(paths(made[:1])), "it stays sighted"


def is_withdrawn(pair: Pair, made: Sequence[bytes]) -> None:
    """Wait until the second node knows that nothing comes, and why."""
    wait_until(lambda: pair.look(made) == [None] * len(made))
    wait_until(lambda: pair.index.holders(paths(made)) == [""] * len(made))
    assert pair.second.count("agent_puts_refused") >= 1
    assert pair.second.count("agent_puts_late") == 0
    assert pair.second.count("agent_put_holders_silent") == 0
    asked: list[str] = []
    pair.index.request = lambda holder, text: bool(asked.append(holder))  # type: ignore[method-assign]
    assert pair.look(made) == [None] * len(made)
    assert asked == [], "it is not requested again"


@pytest.mark.parametrize("fault", ["store", "store, just before", "quota"])
def test_a_node_that_cannot_put_says_so(make: Callable[..., Pair], fault: str) -> None:
    pair, made = make(), payloads()
    pair.first.commit(made)
    if fault == "quota":
        pair.first.cache.has_room = lambda: False
    else:
        pair.store.put_if_absent = down  # type: ignore[method-assign]
    if fault == "store, just before":
        assert pair.first.read(pair.first.find(made)) == [NONE] * 3
        wait_until(lambda: pair.first.count("save_errors") == 3)
        assert pair.first.saves.drain(PATIENCE_S)
    assert pair.coming(made) == 3
    is_withdrawn(pair, made)
    assert pair.first.unsaved == set(paths(made)), "its own replicas find them still"
    pair.second.commit(made)
    assert pair.second.count("agent_sighted_before") == 3, "it stays sighted"


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_what_leaves_the_arena_before_it_was_put_is_no_longer_waited_for(
    is_on_disk: bool, make: Callable[..., Pair], tmp_path: Path
) -> None:
    given = [DiskHolder, tmp_path / "disk"] if is_on_disk else []
    pair, made = make(*given, saves_max=1), payloads()
    if is_on_disk:
        pair.first.keep(made)
    else:
        pair.first.commit(made)
    with pair.busy():
        assert pair.coming(made) == 3
        wait_until(lambda: pair.first.count("agent_unsaved_due") == 6)
        for path in paths(made):
            pair.first.residents.forget(path)
    is_withdrawn(pair, made)
    assert pair.first.unsaved == set(paths(made) if is_on_disk else ())


@pytest.mark.parametrize("fault", ["changed", "no room"])
def test_what_cannot_be_read_from_the_disk_is_no_longer_waited_for(
    fault: str, make: Callable[..., Pair], tmp_path: Path
) -> None:
    pair, made = make(DiskHolder, tmp_path / "disk"), payloads()
    first, residents = pair.first, pair.first.residents
    first.keep(made)
    one, _ = residents.open("else", None)
    if fault == "changed":
        first.spoil()
    else:
        assert residents.allot(one, residents.total_bytes) is not None
    assert pair.coming(made) == 3
    is_withdrawn(pair, made)
    assert not first.stored
    assert first.unsaved == set(paths(made) if fault == "no room" else ())
    residents.failed(one, MissReason.STORE)
    residents.release(one)


def test_a_node_says_that_it_cannot_put_once_the_index_works(make: Callable[..., Pair]) -> None:
    pair, made = make(), payloads()
    pair.first.commit(made)
    pair.store.put_if_absent = down  # type: ignore[method-assign]
    failed = Mock(side_effect=down)
    let_go, pair.index.let_go = pair.index.let_go, failed  # type: ignore[method-assign]
    assert pair.coming(made) == 3
    wait_until(lambda: failed.called)
    assert all(pair.index.holders(paths(made)))
    pair.index.let_go = let_go  # type: ignore[method-assign]
    is_withdrawn(pair, made)


def test_a_node_that_has_ended_is_not_waited_for(make: Callable[..., Pair]) -> None:
    pair, made = make(), payloads()
    pair.first.commit(made)
    pair.first.requested.close()
    pair.time.advance(20)
    assert pair.look(made) == [None] * 3
    asked: list[str] = []
    pair.index.request = lambda holder, text: bool(asked.append(holder))  # type: ignore[method-assign]
    assert pair.look(made) == [None] * 3
    assert asked == [], "not for a while"
    pair.second.commit(made)
    assert pair.second.stored == set(paths(made)), "as without requests"


def test_a_node_that_does_not_answer_is_waited_for_once_in_a_while(
    make: Callable[..., Pair],
) -> None:
    pair, made, others = make(), payloads(), payloads(list(range(500, 500 + 16 * 3)))
    pair.index.request = lambda holder, text: True  # type: ignore[method-assign]
    pair.first.commit(made)
    pair.first.commit(others)
    assert pair.coming(made) == 3
    pair.clock.advance(5.9)
    assert pair.coming(made) == 3
    assert pair.look(others) == [None] * 3, "it has answered nothing for seconds"
    assert pair.second.count("agent_put_holders_silent") == 1
    pair.clock.advance(0.2)
    assert pair.look(made) == [None] * 3
    assert pair.second.count("agent_puts_late") >= 1
    pair.clock.advance(30)
    assert pair.coming(others) == 3, "then it is tried again"


def test_a_node_whose_payloads_came_after_the_wait_is_not_silent(
    make: Callable[..., Pair],
) -> None:
    pair, made, others = make(), payloads(), payloads(list(range(500, 500 + 16 * 3)))
    pair.first.commit(made)
    pair.first.commit(others)
    assert pair.coming(made) == 3
    wait_until(lambda: pair.first.stored == set(paths(made)))
    wait_until(lambda: not any(path in pair.first.unsaved for path in paths(made)))
    pair.clock.advance(60)
    assert pair.coming(others) == 3
    assert pair.second.count("agent_put_holders_silent") == 0


@pytest.mark.parametrize("verb", ["holders", "request"])
def test_without_an_index_it_is_an_ordinary_miss(make: Callable[..., Pair], verb: str) -> None:
    pair, made = make(), payloads()
    pair.first.commit(made)
    setattr(pair.index, verb, down)
    assert pair.look(made) == [None] * 3
    assert pair.second.count("agent_put_request_errors") == 1
    delattr(pair.index, verb)
    assert pair.coming(made) == 3


def test_rights_that_do_not_suffice_are_reported_once(
    make: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    pair, made = make(), payloads()
    pair.first.commit(made)
    pair.index.request = denied  # type: ignore[method-assign]
    for _ in range(3):
        assert pair.look(made) == [None] * 3
    assert caplog.text.count("payloads of other nodes not requested") == 1


def test_a_node_that_cannot_read_requests_is_not_named_as_a_holder(
    make: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    pair, made = make(), payloads()
    pair.index.requests = down  # type: ignore[method-assign]
    wait_until(lambda: pair.first.name == "")
    pair.first.commit(made)
    assert pair.look(made) == [None] * 3
    pair.index.requests = denied  # type: ignore[method-assign]
    wait_until(lambda: "requests of other nodes cannot be read" in caplog.text)


@pytest.mark.parametrize(
    "text",
    [b"", b"x", b"\n\n", b"a" * 32 + b"\n0.x\n" + b"h" * 19, b"\xff" * 32 + b"\n\n" + b"h" * 20],
)
def test_requests_that_no_agent_wrote_are_ignored(make: Callable[..., Pair], text: bytes) -> None:
    pair, made = make(), payloads()
    pair.first.commit(made)
    assert pair.index.request(pair.index.holders(paths(made))[0], text)
    assert pair.coming(made) == 3
    wait_until(lambda: len(pair.second.find(made)) == 3)
    assert pair.first.count("agent_requests_invalid") == 1


@given(
    st.text("0123456789abcdef", min_size=32, max_size=32),
    st.lists(st.text("0123456789.LH-_", min_size=1), min_size=1, max_size=5),
    st.lists(st.binary(min_size=20, max_size=20), min_size=1, max_size=50),
)
def test_a_request_is_read_as_it_was_written(
    namespace: str, fields: list[str], hashes: list[bytes]
) -> None:
    request = PutRequest(namespace, tuple(fields), tuple(hashes))
    assert PutRequest.unpack(request.pack()) == request
    assert len(request.paths()) == len(fields) * len(hashes)


def test_a_payload_is_put_once_however_many_look_for_it(make: Callable[..., Pair]) -> None:
    pair, made = make(), payloads(list(range(16 * 8)))
    pair.first.commit(made)
    claims = [read_header(payload).claim for payload in made]
    hashes = [claim.key.prefix_hash for claim in claims]
    for number in range(5):
        other = PutRequests(pair.index, f"n{number}", pair.second.recorder)
        other.complete(NAMESPACE, hashes, (claims[0].key.field,), [None] * 8)
    pair.look(made)
    wait_until(lambda: len(pair.second.find(made)) == 8)
    assert pair.first.saves.drain(60)
    assert pair.first.count("saves") == 8
    assert pair.first.residents.leased() == 0


def test_a_command_may_request_payloads_too(make: Callable[..., Pair]) -> None:
    pair, made = make(), payloads()
    claims = [read_header(payload).claim for payload in made]
    hashes = [claim.key.prefix_hash for claim in claims]
    prompts = PromptLookup(pair.index, IDENTITY)
    assert prompts.request_puts(hashes) == (0, True)
    shapes = ChunkEntry(NAMESPACE, SHAPES_HASH, SHAPES_HASH, 0, 1)
    empty = ShardRecord(0, 0, "none", False, "", 1)
    pair.index.publish(shapes, dict.fromkeys((claims[0].key.field, "0.other"), empty), ttl_s=60)
    assert prompts.request_puts(hashes) == (0, True)
    pair.first.commit(made)
    assert prompts.find(hashes).usable == 0
    assert prompts.request_puts(hashes) == (3, True)
    wait_until(lambda: prompts.find(hashes).usable == 3)
    assert pair.first.stored == set(paths(made))
    assert prompts.request_puts([]) == (0, True)


def test_a_request_that_came_at_the_end_ends_no_lease_of_another(make: Callable[..., Pair]) -> None:
    """An agent that is being replaced still serves its clients."""
    pair, made = make(), payloads()
    pair.first.commit(made)
    claim, record = pair.first.residents.unsaved.get(paths(made)[0])
    wanted = [Wanted(claim, record)]
    (one,) = pair.first.core.open(Sleeper(), wanted, deadline_s=60.0, urgency=Urgency.PREFETCH)
    asks, ended, requests = Event(), Event(), pair.index.requests

    def late(name: str, *, wait_s: float) -> list[bytes] | None:
        if name != pair.first.name:
            return requests(name, wait_s=wait_s)
        asks.set()
        assert ended.wait(PATIENCE_S)
        return [PutRequest(NAMESPACE, (claim.key.field,), (claim.key.prefix_hash,)).pack()] * 3

    pair.index.requests = late  # type: ignore[method-assign]
    assert asks.wait(PATIENCE_S)
    pair.first.requested.stop()
    ended.set()
    wait_until(lambda: pair.first.count("agent_hits") == 3)
    pair.first.requested.close()
    assert pair.first.saves.drain(PATIENCE_S)
    wait_until(lambda: one.leases <= 1)
    assert one.leases == 1
    pair.first.residents.release(one)


# Agents as processes, over a real index and a folder.


class Agents:
    """Two agents that hold payloads back, over one folder and one Redis."""

    def __init__(self, folder: Path, url: str) -> None:
        settings = {
            "bulk_url": f"file://{folder}/c",
            "index_url": f"{url}/0",
            "save_to_bucket": "reused",
            "agent_memory_bytes": str(1 << 20),
            "lookup_deadline_ms": "20000",
        }
        self.first, self.second = (AgentProcess(settings) for _ in range(2))
        self.desk = Desk(self)  # type: ignore[arg-type]  # it only connects
        self.client = AgentConnection(self.second.path, wants_arena=True, call_s=PATIENCE_S)
        self.index = RedisIndex(redis.Redis.from_url(url))

    def connect(self, *, wants_arena: bool = True, outbox: int = -1) -> AgentConnection:
        """A connection to the first."""
        return AgentConnection(
            self.first.path, wants_arena=wants_arena, outbox=outbox, call_s=PATIENCE_S
        )

    def hold_back(self, made: Sequence[bytes]) -> None:
        """Hand payloads to the first, until the index names it as their holder."""
        await_names(self.index, self.first, self.second)
        for payload in made:
            self.desk.hand_over(payload)
        wait_until(lambda: all(self.index.holders(paths(made))))

    def is_coming(self, made: Sequence[bytes]) -> bool:
        claims = [read_header(payload).claim for payload in made]
        hashes = [claim.key.prefix_hash for claim in claims]
        found = self.client.find(NAMESPACE, hashes, (claims[0].key.field,))
        return any(one is COMING for one in found)

    def close(self) -> None:
        self.desk.close()
        self.client.close()
        self.index.close()
        for agent in (self.first, self.second):
            agent.__exit__(None, None, None)


@pytest.fixture
def agents(tmp_path: Path, client: redis.Redis, valkey: RedisServer) -> Iterator[Agents]:
    both = Agents(tmp_path, valkey.url)
    yield both
    both.close()


def test_an_agent_loads_what_another_one_held_back(agents: Agents, tmp_path: Path) -> None:
    agents.hold_back(made := payloads())
    assert not list((tmp_path / "c").rglob("*.safetensors"))
    assert agents.is_coming(made)
    wait_until(lambda: len(find(agents.client, made)) == 3)
    assert [read(agents.client, one) for one in find(agents.client, made)] == [NONE] * 3
    assert len(list((tmp_path / "c").rglob("*.safetensors"))) == 3


@pytest.mark.slow
def test_an_agent_that_hangs_is_waited_for_a_bounded_time(agents: Agents) -> None:
    agents.hold_back(made := payloads())
    agents.first.freeze()
    agents.is_coming(made)
    wait_until(lambda: not agents.is_coming(made))
    assert find(agents.client, made) == []


@pytest.mark.slow
def test_requests_outlast_a_restart_of_the_index(agents: Agents, client: redis.Redis) -> None:
    client.flushall()
    agents.hold_back(made := payloads())
    assert agents.is_coming(made)
    wait_until(lambda: len(find(agents.client, made)) == 3)
