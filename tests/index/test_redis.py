"""The index in Redis: its records, finds in one round trip, and running totals."""

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import exceptions

from objkv.cache.chunks import shard_record
from objkv.codec.payload import read_header
from objkv.errors import StoreDenied, StoreUnavailable
from objkv.index.base import PruneIndex, Savings, ShardRecords, Usage
from objkv.index.fields import encode_shard
from objkv.index.redis.find import _Question
from objkv.index.redis.index import PendingTotals, RedisIndex
from tests.codec.payloads import sample
from tests.contracts.clock import ManualClock
from tests.contracts.index_contract import (
    FIELD,
    LONG_S,
    NAMESPACE,
    OTHER,
    OTHER_FIELD,
    IndexContract,
    chunk,
    get,
    prefix_hash,
    shard,
)
from tests.fuzz.wires import Wire
from tests.net.resp_wires import beside, wire
from tests.support.servers.fixtures import flushed
from tests.support.servers.redis import RedisServer
from tests.support.servers.round_trips import RoundTrips

PATIENCE_S = 120
"""For a server on a machine that is busy with other things."""
WRITTEN = encode_shard(shard(7))
GOOD = {"p": bytes(20), "t": "0-256"}
KEY = f"objkv:i:{NAMESPACE}:{prefix_hash(1).hex()}"


class TestRedisIndexOnValkey(IndexContract):
    @pytest.fixture
    def clock(self, valkey: RedisServer) -> ManualClock:
        return flushed(valkey)

    @pytest.fixture
    def index(self, valkey: RedisServer, clock: ManualClock) -> PruneIndex:
        return RedisIndex(valkey.client(), clock=clock)

    def put_garbage(self, index: PruneIndex, number: int) -> None:
        assert isinstance(index, RedisIndex)
        index.client.set(f"objkv:i:{NAMESPACE}:{prefix_hash(number).hex()}", "theirs")


def counted(server: RedisServer, trips: RoundTrips) -> redis.Redis:
    pool = redis.ConnectionPool(
        connection_class=trips.connection_class,
        port=server.port,
        protocol=2,
        socket_timeout=PATIENCE_S,
    )
    return redis.Redis.from_pool(pool)


@pytest.mark.parametrize(
    "fields",
    [
        {FIELD: "1"},
        GOOD,
        {**GOOD, FIELD: "not a record"},
        {**GOOD, FIELD: "1 " * 10_000},
        {**GOOD, FIELD: WRITTEN + b" "},
        {**GOOD, FIELD: b"0" + WRITTEN},
        {**GOOD, FIELD: '[1,2,"none",0,"c",5]'},
        {FIELD: WRITTEN, "t": "0-256"},
        {FIELD: WRITTEN, "t": "0-256", "p": "beef"},
        {FIELD: WRITTEN, "p": bytes(20)},
        {FIELD: WRITTEN, "p": bytes(20), "t": "many"},
        {FIELD: WRITTEN, **GOOD, "h": "many"},
    ],
)
def test_hashes_that_no_objkv_wrote_are_absent(
    client: redis.Redis, fields: dict[str, str | bytes]
) -> None:
    client.hset(KEY, mapping=fields)
    index = RedisIndex(client)
    assert get(index) is None
    assert list(index.scan(NAMESPACE)) == []
    index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)


def test_a_record_is_written_as_documented(client: redis.Redis) -> None:
    index = RedisIndex(client, clock=lambda: 1_700_000_007.5)
    index.publish(chunk(), {FIELD: shard(4096)}, ttl_s=LONG_S)
    index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
    assert client.hgetall(KEY) == {
        b"p": bytes(20),
        b"t": b"0-256",
        b"h": b"1",
        b"u": b"1700000007",
        FIELD.encode(): b"4096 4095 1 0000000000001000 1700000000 1",
    }


def test_a_record_takes_little_memory(client: redis.Redis) -> None:
    index = RedisIndex(client)
    entry = replace(chunk(), token_start=10**6, token_end=10**6 + 256)
    largest = replace(shard_record(read_header(sample())), nbytes=10**10, raw_bytes=10**10)
    index.publish(entry, {"0": largest}, ttl_s=LONG_S)
    index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
    assert client.object("encoding", KEY) == b"listpack"
    assert client.memory_usage(KEY) <= 272, "256, or what the allocator had at hand"


def test_every_key_expires_but_the_totals(client: redis.Redis) -> None:
    index = RedisIndex(client)
    for number in (1, 2, 3):
        index.publish(chunk(number), {FIELD: shard()}, ttl_s=LONG_S)
    index.touch(NAMESPACE, [prefix_hash(n) for n in (1, 2, 3, 4)], ttl_s=LONG_S)
    index.lease("x", "me", ttl_ms=LONG_S)
    index.pin(NAMESPACE, prefix_hash(1), until_s=2**33, ttl_s=LONG_S)
    index.usage()
    lasting = [key for key in client.scan_iter() if client.pttl(key) == -1]
    assert lasting == [b"objkv:u:totals"]


THOUSAND = [prefix_hash(number) for number in range(1000)]
AT_ONCE: dict[str, Callable[[RedisIndex], object]] = {
    "lookup": lambda index: index.lookup(NAMESPACE, THOUSAND),
    "touch": lambda index: index.touch(NAMESPACE, THOUSAND, ttl_s=1),
    "sight": lambda index: index.record_sightings([one.hex() for one in THOUSAND], ttl_s=LONG_S),
}


@pytest.mark.parametrize("call", AT_ONCE.values(), ids=AT_ONCE)
def test_a_thousand_at_once_are_one_round_trip_once_the_server_knows_the_script(
    valkey: RedisServer, call: Callable[[RedisIndex], object]
) -> None:
    trips = RoundTrips()
    client = counted(valkey, trips)
    index = RedisIndex(client)
    index.check()
    call(index)
    before = trips.count
    call(index)
    assert trips.count - before == 1
    for _ in range(3):
        client.ping()
    assert trips.by_port[valkey.port] - before == 4, "commands are really counted"
    index.close()


def test_a_server_that_forgot_the_scripts_learns_them_again(client: redis.Redis) -> None:
    index = RedisIndex(client)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    client.script_flush()
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    client.script_flush()
    index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
    record = get(index)
    assert record is not None
    assert record.hits == 1
    assert index.record_sightings(["x"], ttl_s=LONG_S) == [False]
    client.script_flush()
    assert index.record_sightings(["y", "x"], ttl_s=LONG_S) == [False, True]


def test_a_sighting_takes_little_memory_and_ends(client: redis.Redis) -> None:
    index = RedisIndex(client)
    index.record_sightings([f"{NAMESPACE}/{prefix_hash(1).hex()}/{FIELD}"], ttl_s=LONG_S)
    (key,) = client.keys()
    assert key.startswith(b"objkv:s:")
    assert client.memory_usage(key) <= 128
    assert 0 < client.ttl(key) <= LONG_S


def test_others_keys_and_other_prefixes_are_left_alone(client: redis.Redis) -> None:
    client.set("theirs", "x")
    client.set(f"objkv:i:{NAMESPACE}:short", "x")
    ours, other = RedisIndex(client), RedisIndex(client, prefix="other")
    other.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    assert ours.namespaces() == []
    assert list(ours.scan(NAMESPACE)) == []
    assert list(ours.scan("*")) == []
    assert other.namespaces() == [NAMESPACE]


RECORDS = f"objkv:i:{NAMESPACE}:"
BOTH = (FIELD, OTHER_FIELD)
LOOKS_LIKE_TWO = WRITTEN + b"\r\n$%d\r\n" % len(WRITTEN) + WRITTEN
Kind = Literal["hit", "none", "bad", "two", "theirs"]
KINDS = st.sampled_from(["hit", "hit", "none", "bad", "two", "theirs"])


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


ANSWERS = {
    "hit": bulk(WRITTEN),
    "none": b"$-1\r\n",
    "bad": bulk(b"1\r\n$-1"),
    "two": bulk(LOOKS_LIKE_TWO),
}
WRONG_TYPE = b"-WRONGTYPE Operation against a key\r\n"


def asked(
    line: Any, count: int, fields: tuple[str, ...] = (FIELD,), cuts: Sequence[int] | None = None
) -> list[ShardRecords | None]:
    """What is found on ``line``. With ``cuts``, it hands out its answers and the mark, so cut."""
    question = _Question(line, RECORDS, [prefix_hash(n) for n in range(count)], fields)
    question.push()
    if cuts is not None:
        line.answer(b"$16\r\n" + bytes(line.sent[-18:]), cuts)
    return question.answers()


@settings(deadline=None)
@given(st.lists(KINDS, min_size=1, max_size=20), st.lists(st.integers(1, 200), max_size=20))
def test_answers_are_told_apart_however_they_are_cut(kinds: list[Kind], cuts: list[int]) -> None:
    line = Wire([WRONG_TYPE if kind == "theirs" else ANSWERS[kind] for kind in kinds])
    # An ambiguous reply is either parsed correctly, or the whole lookup is discarded.
    try:
        found = asked(line, len(kinds), cuts=cuts)
    except exceptions.InvalidResponse:
        assert "two" in kinds
        assert not line.clean
    else:
        assert found == [{FIELD: shard(7)} if kind == "hit" else None for kind in kinds]
        assert line.clean


@settings(deadline=None)
@given(
    st.lists(st.tuples(KINDS, KINDS).filter(lambda row: "two" not in row), min_size=1, max_size=12),
    st.lists(st.integers(1, 200), max_size=20),
)
def test_rows_are_told_apart_however_they_are_cut(
    rows: list[tuple[Kind, Kind]], cuts: list[int]
) -> None:
    answers, expected = b"", list[ShardRecords | None]()
    for row in rows:
        if "theirs" in row:
            answers += WRONG_TYPE
            expected.append(None)
            continue
        answers += b"*2\r\n" + b"".join(ANSWERS[kind] for kind in row)
        there = {field: shard(7) for field, kind in zip(BOTH, row, strict=True) if kind == "hit"}
        expected.append(there or None)
    assert asked(Wire([answers]), len(rows), BOTH, cuts) == expected


@pytest.mark.parametrize(
    "answers",
    [
        ANSWERS["two"] + ANSWERS["none"],  # as many values as questions, but not these answers
        ANSWERS["hit"],  # too few
        ANSWERS["hit"] * 3,  # too many
        bulk(b"0" * 16) + ANSWERS["hit"] * 2,  # another command's reply before ours
        b":1\r\n" + ANSWERS["hit"],
        b"$3\r\nabcde\r\n" + ANSWERS["hit"],
        b"$200000\r\n" + bytes(200_000),
    ],
)
def test_answers_to_something_else_are_not_believed(answers: bytes) -> None:
    line = Wire([answers])
    with pytest.raises(exceptions.InvalidResponse):
        asked(line, 2, cuts=[100_000])
    assert not line.clean


def answer_mark(theirs: socket.socket, received: bytes = b"") -> None:
    while not received[-40:-18].endswith(b"PING\r\n$16\r\n"):
        received += theirs.recv(1 << 20)
    theirs.sendall(b"$16\r\n" + received[-18:])


def test_all_commands_are_sent_before_any_answer_is_waited_for() -> None:
    line, theirs = wire()
    hashes = 3_000

    def serve() -> None:
        received = b""
        while received.count(b"HGET") < hashes:
            received += theirs.recv(1 << 20)
        theirs.sendall(ANSWERS["hit"] * hashes)
        answer_mark(theirs, received)

    server = beside(serve)
    assert asked(line, hashes) == [{FIELD: shard(7)}] * hashes
    server.join()


def test_what_a_server_has_to_remember_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("objkv.index.redis.find._AHEAD_BYTES", 50_000)
    line, theirs = wire()
    hashes = 3_000
    most = 0

    def serve() -> None:
        nonlocal most
        received, answered = b"", 0
        while answered < hashes:
            theirs.settimeout(0.05)
            try:
                received += theirs.recv(1 << 20)
            except TimeoutError:  # it sends no more
                waiting = received.count(b"HGET")
                most = max(most, len(received))
                received = received[received.rfind(b"HGET") + 4 :]
                theirs.settimeout(60)
                theirs.sendall(ANSWERS["hit"] * waiting)
                answered += waiting
        theirs.settimeout(60)
        answer_mark(theirs, received)

    server = beside(serve)
    assert len(asked(line, hashes)) == hashes
    server.join()
    assert 0 < most < 100_000


def test_a_server_that_reads_on_only_when_its_answers_are_read_is_no_deadlock() -> None:
    line, theirs = wire()
    hashes = 30_000  # more than the buffers between the two hold

    def serve() -> None:
        received, answered = b"", 0
        while answered < hashes:
            received += theirs.recv(4_096)
            commands = received.count(b"HGET")
            received = received[received.rfind(b"HGET") + 4 :] if commands else received
            theirs.sendall(ANSWERS["hit"] * commands)
            answered += commands
        answer_mark(theirs, received)

    server = beside(serve)
    assert len(asked(line, hashes)) == hashes
    server.join()


def filled(client: redis.Redis) -> RedisIndex:
    index = RedisIndex(client)
    index.publish(chunk(), {FIELD: shard(), OTHER_FIELD: shard()}, ttl_s=LONG_S)
    return index


def test_malformed_and_later_fields_hide_no_others(client: redis.Redis) -> None:
    index = filled(client)
    client.hset(KEY, mapping={FIELD: LOOKS_LIKE_TWO, "colour": "red", "0.L9-1_H0-1": "1 2 3"})
    assert index.find(NAMESPACE, [prefix_hash(1)], [FIELD]) == [None]
    assert index.find(NAMESPACE, [prefix_hash(1)], BOTH) == [{OTHER_FIELD: shard()}]
    record = get(index)
    assert record is not None
    assert record.shards == {OTHER_FIELD: shard()}


def test_a_connection_that_the_server_closes_meanwhile_costs_no_answer(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = filled(client)
    assert index.find(NAMESPACE, [prefix_hash(1)], [FIELD]) == [{FIELD: shard()}]
    # It looks open until it is used, as one does that a firewall has forgotten.
    monkeypatch.setattr("objkv.net.resp.RespConnection._is_quiet", lambda _: True)
    client.client_kill_filter(_type="normal", skipme=True)
    assert index.find(NAMESPACE, [prefix_hash(1)], [FIELD]) == [{FIELD: shard()}]


@pytest.mark.parametrize("fields", [[FIELD], BOTH])
def test_a_user_without_the_right_to_ask_so_is_asked_for_whole_records(
    valkey: RedisServer, client: redis.Redis, fields: list[str]
) -> None:
    filled(client)
    rights = ["~*", "-@all", "+ping", "+client", "+select", "+hgetall"]
    client.execute_command("ACL", "SETUSER", "old", "on", ">secret", *rights)
    user = redis.Redis(
        port=valkey.port, protocol=2, username="old", password="secret", socket_timeout=PATIENCE_S
    )
    index = RedisIndex(user)
    expected = {field: shard() for field in fields}
    assert index.find(NAMESPACE, [prefix_hash(1)], fields) == [expected]
    client.execute_command("ACL", "SETUSER", "old", "-hgetall")
    with pytest.raises(StoreDenied, match=r"objkv access"):
        index.find(NAMESPACE, [prefix_hash(1)], fields)
    client.execute_command("ACL", "DELUSER", "old")


TOTALS = "objkv:u:totals"


def timed(client: redis.Redis) -> tuple[RedisIndex, ManualClock]:
    index, clock = RedisIndex(client), ManualClock()
    index._totals = PendingTotals(TOTALS, clock=clock)
    return index, clock


def test_a_publish_that_tells_the_totals_is_one_round_trip(valkey: RedisServer) -> None:
    trips = RoundTrips()
    index, clock = timed(counted(valkey, trips))
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)
    for number in (2, 3, 4):
        clock.advance(10)
        before = trips.count
        index.publish(chunk(number), {FIELD: shard(10)}, ttl_s=LONG_S)
        assert trips.count - before == 1
    index.close()


def test_what_expires_is_counted_until_somebody_counts_again(client: redis.Redis) -> None:
    index = RedisIndex(client)
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)
    client.delete(f"objkv:i:{NAMESPACE}:{prefix_hash(1).hex()}")
    assert index.usage() == [Usage(NAMESPACE, 10, 1, 0)]
    index.set_usage(Usage(NAMESPACE, 4, 1, counted_s=1_700_000_000))
    assert index.usage() == [Usage(NAMESPACE, 4, 1, 1_700_000_000)]
    index.publish(chunk(2), {FIELD: shard(3)}, ttl_s=LONG_S)
    assert index.usage() == [Usage(NAMESPACE, 7, 2, 1_700_000_000)]


def test_a_namespace_without_payloads_is_forgotten_and_no_other(client: redis.Redis) -> None:
    index = RedisIndex(client)
    for namespace in (NAMESPACE, OTHER):
        index.publish(chunk(1, namespace), {FIELD: shard(10)}, ttl_s=LONG_S)
    index.set_usage(NONE)
    assert index.usage() == [Usage(OTHER, 10, 1, 0)]
    index.set_usage(replace(NONE, namespace=OTHER))
    assert client.exists(TOTALS) == 0


def test_totals_that_cannot_be_told_cost_no_save_and_are_told_later(client: redis.Redis) -> None:
    index, clock = timed(client)
    client.set(TOTALS, "theirs")
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)
    clock.advance(5)
    index.publish(chunk(2), {FIELD: shard(3)}, ttl_s=LONG_S)
    assert all(index.lookup(NAMESPACE, [prefix_hash(1), prefix_hash(2)]))
    client.delete(TOTALS)
    assert index.usage() == [Usage(NAMESPACE, 13, 2, 0)]


NONE = Usage(NAMESPACE, 0, 0, counted_s=7)


@pytest.mark.parametrize(
    "asked", [RedisIndex.usage, RedisIndex.close, lambda index: index.set_usage(NONE)]
)
def test_totals_that_could_not_be_told_because_of_the_way_are_told_later(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, asked: Callable[[RedisIndex], object]
) -> None:
    index = RedisIndex(client)
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)

    def down(verb: str, commands: object) -> None:
        raise StoreUnavailable("down")

    with monkeypatch.context() as patched:
        patched.setattr(index, "_pipelined", down)
        with suppress(StoreUnavailable):
            asked(index)
    assert index.usage() == [Usage(NAMESPACE, 10, 1, 0)]


def test_what_no_objkv_wrote_into_the_totals_is_left_out(client: redis.Redis) -> None:
    client.hset(TOTALS, mapping={
        "a:nbytes": "7", "a:payloads": "1", "b:nbytes": "-5", "b:payloads": "2",
        "c:nbytes": "many", "d": "1", "e:colour": "1", "f:nbytes": "0", "g:h:nbytes": "1",
    })  # fmt: skip
    assert RedisIndex(client).usage() == [Usage("a", 7, 1, 0), Usage("b", 0, 2, 0)]


def test_savings_are_sent_within_seconds_and_all_totals_when_the_index_closes(
    client: redis.Redis, valkey: RedisServer
) -> None:
    index, clock = RedisIndex(valkey.client()), ManualClock()
    index._savings = PendingTotals("objkv:u:savings", clock=clock)
    one = Savings(NAMESPACE, "2026-11", loads=1, tokens=256)
    index.credit(one)
    assert RedisIndex(client).savings() == []
    clock.advance(5)
    index.credit(one)
    assert RedisIndex(client).savings() == [replace(one, loads=2, tokens=512)]
    index.credit(one)
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)
    index.close()
    assert RedisIndex(client).savings() == [replace(one, loads=3, tokens=768)]
    assert RedisIndex(client).usage() == [Usage(NAMESPACE, 10, 1, 0)]


def test_totals_of_a_process_that_saves_no_more_are_sent_in_time(
    client: redis.Redis, valkey: RedisServer
) -> None:
    (index, clock), others = timed(valkey.client()), RedisIndex(client)
    index._savings = PendingTotals("objkv:u:savings", clock=clock)
    one = Savings(NAMESPACE, "2026-11", loads=1, tokens=256)
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)
    index.credit(one)
    index.flush()
    assert (others.usage(), others.savings()) == ([], []), "not at once"
    clock.advance(5)
    index.flush()
    assert (others.usage(), others.savings()) == ([Usage(NAMESPACE, 10, 1, 0)], [one])
    index.close()


def test_what_others_wrote_among_savings_is_ignored(client: redis.Redis) -> None:
    index = RedisIndex(client)
    index.credit(Savings(NAMESPACE, "2026-11", loads=1))
    client.hset("objkv:u:savings", mapping={
        f"{NAMESPACE}:2026-11:tokens": "-5", f"{NAMESPACE}:later:loads": "3", "x": "1",
        f"{NAMESPACE}:2026-11:joules": "7", f"{NAMESPACE}:2026-11:timed_tokens": "many",
    })  # fmt: skip
    assert index.savings() == [Savings(NAMESPACE, "2026-11", loads=1)]
