"""Servers to measure against: what they send is what was put, and they end."""

import socket
import threading

import pytest

from tests.support.servers.far import Distance, Far
from tests.support.servers.plain_limit import PlainClient, PlainServer
from tests.support.servers.process import running_server
from tests.support.servers.quick_s3 import QuickS3, quick_s3_process
from tests.support.servers.s3_stores import MIB, pattern, s3_store


def test_the_plain_limit_carries_bytes_both_ways() -> None:
    with quick_s3_process() as server, PlainClient(server.plain) as plain:
        buffer = memoryview(bytearray(3 * MIB))
        for nbytes in (0, 5, 3 * MIB):
            plain.put(buffer[:nbytes])
            plain.get_into(buffer[:nbytes])
        assert set(bytes(buffer)) == {ord("g")}


def test_memory_is_used_again_only_when_nobody_sends_it() -> None:
    """A value is replaced and its length put elsewhere while it is being read."""
    values = [pattern(2 * MIB, seed) for seed in range(4)]
    torn: list[int] = []
    with QuickS3() as server, s3_store(server.url) as store:
        store.put("k", values[0])
        done = threading.Event()

        def read() -> None:
            buffer = memoryview(bytearray(2 * MIB))
            while not done.is_set():
                store.get_into("k", buffer)
                if buffer not in values:
                    torn.append(1)

        reader = threading.Thread(target=read)
        reader.start()
        for turn in range(30):
            store.put("k", values[turn % 4])
            store.put("other", values[(turn + 1) % 4])
            store.put_if_absent("k", values[(turn + 2) % 4])
            store.delete("other")
        done.set()
        reader.join()
    assert torn == []


@pytest.mark.parametrize("make", [PlainServer, QuickS3, lambda: Far(("127.0.0.1", 1), Distance())])
def test_a_closed_server_leaves_no_thread(make: type[QuickS3]) -> None:
    before = threading.active_count()
    with make() as server, socket.create_connection(server.address):
        pass
    assert threading.active_count() == before


def test_far_answers_wait_and_count() -> None:
    with (
        PlainServer() as server,
        Far(server.address, Distance(ttfb_ms=1, jitter_ms=1, gbit_s=10)) as far,
        PlainClient(far.address) as plain,
    ):
        buffer = memoryview(bytearray(MIB))
        for _ in range(3):
            plain.get_into(buffer)
        assert far.turns == 3
        assert far.connections == 1


def test_far_runs_as_a_command() -> None:
    with running_server("far", "127.0.0.1:1", "--ttfb-ms", "25") as (_, line):
        assert line.startswith("http://127.0.0.1:")
