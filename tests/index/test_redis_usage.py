"""Running totals in Redis: their drift, its repair, and their cost for a save."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import redis

from objkv.errors import StoreUnavailable
from objkv.index.base import Savings, Usage
from objkv.index.redis.index import PendingTotals, RedisIndex, read_totals
from tests.contracts.clock import ManualClock
from tests.contracts.index_contract import (
    FIELD,
    LONG_S,
    NAMESPACE,
    OTHER,
    chunk,
    prefix_hash,
    shard,
)
from tests.index.test_redis_index import counted
from tests.support.servers.redis import RedisServer
from tests.support.servers.round_trips import RoundTrips

KEY = "objkv:u:totals"


def timed(client: redis.Redis) -> tuple[RedisIndex, ManualClock]:
    index, clock = RedisIndex(client), ManualClock()
    index._totals = PendingTotals(KEY, clock=clock)
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


def test_others_hear_of_what_was_published_within_seconds(client: redis.Redis) -> None:
    index, clock = timed(client)
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)
    assert RedisIndex(client).usage() == []
    clock.advance(5)
    index.lease("x", "me", ttl_ms=1000)
    assert RedisIndex(client).usage() == [Usage(NAMESPACE, 10, 1, 0)]


def test_closing_tells_the_rest(client: redis.Redis, valkey: RedisServer) -> None:
    index = RedisIndex(valkey.client())
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)
    index.close()
    assert RedisIndex(client).usage() == [Usage(NAMESPACE, 10, 1, 0)]


def test_what_expires_is_counted_until_somebody_counts_again(client: redis.Redis) -> None:
    index = RedisIndex(client)
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)
    client.delete(f"objkv:i:{NAMESPACE}:{prefix_hash(1).hex()}")
    assert index.usage() == [Usage(NAMESPACE, 10, 1, 0)]
    index.set_usage(Usage(NAMESPACE, 4, 1, counted_s=1_700_000_000))
    assert index.usage() == [Usage(NAMESPACE, 4, 1, 1_700_000_000)]
    index.publish(chunk(2), {FIELD: shard(3)}, ttl_s=LONG_S)
    assert index.usage() == [Usage(NAMESPACE, 7, 2, 1_700_000_000)]


def test_a_namespace_without_payloads_is_forgotten(client: redis.Redis) -> None:
    index = RedisIndex(client)
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)
    index.set_usage(Usage(NAMESPACE, 0, 0, counted_s=1_700_000_000))
    assert index.usage() == []
    assert client.exists(KEY) == 0


def test_totals_that_cannot_be_told_cost_no_save_and_are_told_later(client: redis.Redis) -> None:
    index, clock = timed(client)
    client.set(KEY, "theirs")
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)
    clock.advance(5)
    index.publish(chunk(2), {FIELD: shard(3)}, ttl_s=LONG_S)
    assert all(index.lookup(NAMESPACE, [prefix_hash(1), prefix_hash(2)]))
    client.delete(KEY)
    assert index.usage() == [Usage(NAMESPACE, 13, 2, 0)]


@pytest.mark.parametrize("asked", [RedisIndex.usage, RedisIndex.close])
def test_totals_that_could_not_be_told_because_of_the_way_are_told_later(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, asked: Callable[[RedisIndex], object]
) -> None:
    index = RedisIndex(client)
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)

    def down(commands: object) -> None:
        raise StoreUnavailable("down")

    with monkeypatch.context() as patched:
        patched.setattr(index, "_pipelined", down)
        with suppress(StoreUnavailable):
            asked(index)
    assert index.usage() == [Usage(NAMESPACE, 10, 1, 0)]


def test_setting_the_totals_of_a_namespace_leaves_those_of_others_alone(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = RedisIndex(client)
    for namespace in (NAMESPACE, OTHER):
        index.publish(chunk(1, namespace), {FIELD: shard(10)}, ttl_s=LONG_S)

    def down(*command: object) -> None:
        raise redis.exceptions.ConnectionError("down")

    with monkeypatch.context() as patched:
        patched.setattr(client, "execute_command", down)
        with pytest.raises(StoreUnavailable):
            index.set_usage(Usage(NAMESPACE, 10, 1, counted_s=7))
    assert {one.namespace: one.nbytes for one in index.usage()} == {NAMESPACE: 10, OTHER: 10}
    for namespace in (NAMESPACE, OTHER):
        index.publish(chunk(2, namespace), {FIELD: shard(5)}, ttl_s=LONG_S)
    index.set_usage(Usage(NAMESPACE, 15, 2, counted_s=7))
    assert {one.namespace: one.nbytes for one in index.usage()} == {NAMESPACE: 15, OTHER: 15}


def test_a_server_that_forgot_the_script_is_taught_while_totals_are_told(
    client: redis.Redis,
) -> None:
    index, clock = timed(client)
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=LONG_S)
    client.script_flush()
    clock.advance(5)
    index.publish(chunk(2, OTHER), {FIELD: shard(3)}, ttl_s=LONG_S)
    assert index.usage() == [Usage(NAMESPACE, 10, 1, 0), Usage(OTHER, 3, 1, 0)]


def test_what_no_objkv_wrote_into_the_totals_is_left_out() -> None:
    reply = {
        b"a:nbytes": b"7",
        b"a:payloads": b"1",
        b"b:nbytes": b"-5",
        b"b:payloads": b"2",
        b"c:nbytes": b"many",
        b"d": b"1",
        b"e:colour": b"1",
        b"f:nbytes": b"0",
    }
    assert read_totals(reply) == [Usage("a", 7, 1, 0), Usage("b", 0, 2, 0)]


def test_savings_are_sent_within_seconds_and_when_the_index_closes(
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
    index.close()
    assert RedisIndex(client).savings() == [replace(one, loads=3, tokens=768)]


def test_what_others_wrote_among_savings_is_ignored(client: redis.Redis) -> None:
    index = RedisIndex(client)
    index.credit(Savings(NAMESPACE, "2026-11", loads=1))
    client.hset("objkv:u:savings", mapping={
        f"{NAMESPACE}:2026-11:tokens": "-5", f"{NAMESPACE}:later:loads": "3", "x": "1",
        f"{NAMESPACE}:2026-11:joules": "7", f"{NAMESPACE}:2026-11:timed_tokens": "many",
    })  # fmt: skip
    assert index.savings() == [Savings(NAMESPACE, "2026-11", loads=1)]
