"""``RedisIndex.find``: one round trip, taken apart exactly, and left to the client if refused."""

from typing import Any, Literal

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import exceptions

from objkv.errors import StoreDenied, StoreUnavailable
from objkv.index.base import Shards
from objkv.index.fields import encode_shard
from objkv.index.redis.find import _Question
from objkv.index.redis.index import RedisIndex
from tests.contracts.index_contract import (
    FIELD,
    LONG_S,
    NAMESPACE,
    OTHER_FIELD,
    chunk,
    prefix_hash,
    shard,
)
from tests.net.resp_wires import beside, wire
from tests.support.servers.redis import RedisServer

KEY = f"objkv:i:{NAMESPACE}:"
BOTH = (FIELD, OTHER_FIELD)
PATIENCE_S = 120
GOOD = encode_shard(shard(7))
LOOKS_LIKE_TWO = GOOD + b"\r\n$%d\r\n" % len(GOOD) + GOOD
Kind = Literal["hit", "none", "bad", "two", "theirs"]
KINDS = st.sampled_from(["hit", "hit", "none", "bad", "two", "theirs"])


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


ANSWERS = {
    "hit": bulk(GOOD),
    "none": b"$-1\r\n",
    "bad": bulk(b"[1]\r\n$-1"),
    "two": bulk(LOOKS_LIKE_TWO),
}
WRONG_TYPE = b"-WRONGTYPE Operation against a key\r\n"


class Pieces:
    """A line whose server answers ``answers`` and the mark, cut at ``cuts``."""

    tls = False

    def __init__(self, answers: bytes, cuts: list[int], *, mark: bool = True) -> None:
        self.clean = True
        self._answers = answers
        self._cuts = cuts
        self._mark = mark

    def offer(self, data: memoryview) -> int:
        """Take all; the mark is the end of the command."""
        self.clean = False
        if self._mark and bytes(data).endswith(b"\r\n"):
            self._answers += b"$16\r\n" + bytes(data)[-18:]
        return len(data)

    def receive(self) -> bytes:
        """The next piece; all that is left at the end."""
        cut = self._cuts.pop() if self._cuts else len(self._answers)
        piece, self._answers = self._answers[:cut], self._answers[cut:]
        if not piece:
            raise exceptions.ConnectionError("Connection closed by server.")
        return piece


def asked(line: Any, count: int, fields: tuple[str, ...] = (FIELD,)) -> list[Shards | None]:
    question = _Question(line, KEY, [prefix_hash(n) for n in range(count)], fields)
    question.push()
    return question.answers()


@settings(deadline=None)
@given(st.lists(KINDS, min_size=1, max_size=20), st.lists(st.integers(1, 200), max_size=20))
def test_answers_are_told_apart_however_they_are_cut(kinds: list[Kind], cuts: list[int]) -> None:
    answers = b"".join(WRONG_TYPE if kind == "theirs" else ANSWERS[kind] for kind in kinds)
    line = Pieces(answers, cuts)
    if "two" not in kinds:
        expected = [{FIELD: shard(7)} if kind == "hit" else None for kind in kinds]
        assert asked(line, len(kinds)) == expected
        assert line.clean
        return
    # An ambiguous reply is either parsed correctly, or the whole lookup is discarded.
    try:
        found = asked(line, len(kinds))
    except exceptions.InvalidResponse:
        assert not line.clean
    else:
        assert found == [{FIELD: shard(7)} if kind == "hit" else None for kind in kinds]


@settings(deadline=None)
@given(
    st.lists(st.tuples(KINDS, KINDS).filter(lambda row: "two" not in row), min_size=1, max_size=12),
    st.lists(st.integers(1, 200), max_size=20),
)
def test_rows_are_told_apart_however_they_are_cut(
    rows: list[tuple[Kind, Kind]], cuts: list[int]
) -> None:
    answers, expected = b"", list[Shards | None]()
    for row in rows:
        if "theirs" in row:
            answers += WRONG_TYPE
            expected.append(None)
            continue
        answers += b"*2\r\n" + b"".join(ANSWERS[kind] for kind in row)
        there = {field: shard(7) for field, kind in zip(BOTH, row, strict=True) if kind == "hit"}
        expected.append(there or None)
    assert asked(Pieces(answers, cuts), len(rows), BOTH) == expected


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
    line = Pieces(answers, [100_000] * (len(answers) > 100_000))
    with pytest.raises(exceptions.InvalidResponse):
        asked(line, 2)
    assert not line.clean


def test_all_commands_are_sent_before_any_answer_is_waited_for() -> None:
    line, theirs = wire()
    hashes = 3_000

    def serve() -> None:
        received = b""
        while not received[-40:-18].endswith(b"PING\r\n$16\r\n"):
            received += theirs.recv(1 << 20)
        theirs.sendall(ANSWERS["hit"] * hashes + b"$16\r\n" + received[-18:])

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
        while not received.endswith(b"\r\n") or b"PING" not in received:
            received += theirs.recv(4_096)
        theirs.sendall(b"$16\r\n" + received[-18:])

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
        while not received.endswith(b"\r\n") or b"PING" not in received:
            received += theirs.recv(4_096)
        theirs.sendall(b"$16\r\n" + received[-18:])

    server = beside(serve)
    assert len(asked(line, hashes)) == hashes
    server.join()


def filled(client: redis.Redis) -> RedisIndex:
    index = RedisIndex(client)
    index.publish(chunk(), {FIELD: shard(), OTHER_FIELD: shard()}, ttl_s=LONG_S)
    return index


def test_the_client_is_not_needed_where_its_connections_can_be_lent(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = filled(client)
    monkeypatch.setattr(index, "lookup", None)
    assert index.find(NAMESPACE, [prefix_hash(1)], [FIELD]) == [{FIELD: shard()}]


def test_malformed_fields_hide_no_others(client: redis.Redis) -> None:
    index = filled(client)
    client.hset(f"{KEY}{prefix_hash(1).hex()}", FIELD, LOOKS_LIKE_TWO)
    assert index.find(NAMESPACE, [prefix_hash(1)], [FIELD]) == [None]
    assert index.find(NAMESPACE, [prefix_hash(1)], BOTH) == [{OTHER_FIELD: shard()}]


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
        port=valkey.port,
        protocol=2,
        username="old",
        password="secret",
        socket_timeout=PATIENCE_S,
    )
    index = RedisIndex(user)
    expected = {field: shard() for field in fields}
    assert index.find(NAMESPACE, [prefix_hash(1)], fields) == [expected]
    client.execute_command("ACL", "SETUSER", "old", "-hgetall")
    with pytest.raises(StoreDenied, match=r"objkv access"):
        index.find(NAMESPACE, [prefix_hash(1)], fields)
    client.execute_command("ACL", "DELUSER", "old")


def test_a_server_that_is_not_there_is_unavailable() -> None:
    index = RedisIndex(redis.Redis(port=1, protocol=2))
    with pytest.raises(StoreUnavailable):
        index.find(NAMESPACE, [prefix_hash(1)], [FIELD])
