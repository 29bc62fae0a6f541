"""Every call on Redis ends soon after its deadline, whatever the server does."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle

import pytest

from objkv.assembly import backends
from objkv.assembly.backends import call_s
from objkv.assembly.redis import connect_redis
from objkv.config import Config, load_config
from objkv.errors import StoreError
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.index.guarded import INDEX_VERBS, GuardedIndex
from objkv.index.redis.index import RedisIndex
from objkv.net.breaker import BreakerLimits, Breakers
from objkv.stores.base import HotStore
from objkv.stores.guarded import GuardedValues
from objkv.stores.redis import RedisStore
from objkv.telemetry import NullRecorder
from tests.stores.guards import assert_all_end, guard_of
from tests.support.servers.listener import DROP_S, Scripted, Serve, full_listener, reluctant

HASH = b"h" * 20
FIELD = "0.L0-2_H0-2"
SHARD = ShardRecord(1, 1, True, hot=False, header_checksum="0" * 32, created_s=1)
CHUNK = ChunkEntry("ab", HASH, HASH, 0, 16)

ANSWERS = {
    "a long value": b"$1000000\r\n" + b"x" * 100_000,
    "a line without end": b"+" + b"x" * 4_000,
    "a long list": b"*100000\r\n" + b"$1\r\nx\r\n" * 20_000,
    "nothing": b"",
}

INDEX_CALLS: dict[str, Callable[[WriteIndex], object]] = {
    "lookup": lambda index: index.lookup("ab", [HASH]),
    "find": lambda index: index.find("ab", [HASH], [FIELD]),
    "scan": lambda index: list(index.scan("ab")),
    "publish": lambda index: index.publish(CHUNK, {FIELD: SHARD}, ttl_s=9),
    "touch": lambda index: index.touch("ab", [HASH], ttl_s=9),
    "lease": lambda index: index.lease("l", "me", ttl_ms=9),
    "release": lambda index: index.release("l", "me"),
    "check": lambda index: index.check(),
}
STORE_CALLS: dict[str, Callable[[HotStore], object]] = {
    "get": lambda store: store.get("k"),
    "get part": lambda store: store.get("k", 1, 2),
    "get_into": lambda store: store.get_into("k", memoryview(bytearray(1 << 20))),
    "get_into part": lambda store: store.get_into("k", memoryview(bytearray(9)), start=1),
    "head": lambda store: store.head("k"),
    "put": lambda store: store.put("k", bytes(4 << 20)),
    "put_if_absent": lambda store: store.put_if_absent("k", bytes(4 << 20)),
    "delete": lambda store: store.delete("k"),
    "check": lambda store: store.check(),
}


def slow(answer: bytes) -> Serve:
    """Lets clients log in, and answers everything else with a byte of ``answer`` now and then."""

    def serve(connection: socket.socket) -> None:
        while data := connection.recv(1 << 20):
            if re.search(rb"\r\n(CLIENT|SELECT)\r\n", data):
                connection.sendall(b"+OK\r\n" * len(re.findall(rb"(?m)^\*[0-9]+\r$", data)))
                continue
            for number in cycle(answer):
                time.sleep(DROP_S)
                connection.sendall(bytes([number]))

    return serve


SERVES = {name: slow(answer) for name, answer in ANSWERS.items()}
SERVES["hardly takes anything"] = reluctant


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "CONNECT_FLOOR_S", 0.1)
    monkeypatch.setattr(backends, "READ_FLOOR_S", 0.2)
    monkeypatch.setattr("objkv.net.guard._WALK_FACTOR", 1)


def config_of(address: tuple[str, int], scheme: str) -> Config:
    service = "?service=s" if "sentinel" in scheme else ""
    url = f"{scheme}://127.0.0.1:{address[1]}{service}"
    settings = {"index_url": url, "bulk_url": "file:///dev/null/kv", "lookup_deadline_ms": 100}
    return load_config({**settings, "load_threads": 32}, environ={})


@contextmanager
def served(name: str) -> Iterator[tuple[str, int]]:
    if name == "no way in":
        with full_listener() as address:
            yield address
        return
    with Scripted(SERVES[name]) as server:
        yield server.address


CASES = [("redis", name) for name in (*SERVES, "no way in")]
CASES += [
    (f"redis+{kind}", name) for kind in ("cluster", "sentinel") for name in ("nothing", "no way in")
]


@pytest.mark.parametrize(("scheme", "server"), CASES)
def test_every_call_is_over_in_time(scheme: str, server: str) -> None:
    with served(server) as address:
        config = config_of(address, scheme)
        guard = {
            "seconds": call_s(config),
            "breakers": Breakers("none", BreakerLimits(failures=1_000), NullRecorder()),
        }
        index = GuardedIndex(
            RedisIndex(connect_redis(config)), guard_of("index", verbs=INDEX_VERBS, **guard)
        )
        client = connect_redis(config)
        place = RedisStore(client, prefix="p:", ttl_s=9)
        store = GuardedValues(place, guard_of("hot", **guard))
        calls = {f"index {name}": (call, index) for name, call in INDEX_CALLS.items()}
        calls |= {f"store {name}": (call, store) for name, call in STORE_CALLS.items()}
        assert_all_end(calls, StoreError)
        index.close()
        store.close()
