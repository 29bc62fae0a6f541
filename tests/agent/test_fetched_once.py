"""Many readers of the same payloads at the same moment: each byte leaves the store once."""

import threading
from collections import Counter, deque
from typing import Any

import pytest

from objkv.agent.memory.arena import CellState
from tests.agent.world import RIGHT, Node, ended, opened, pages_at
from tests.support.servers.quick_s3 import QuickS3, Request
from tests.support.servers.s3_stores import s3_store

READERS, CHUNKS = 8, 16


@pytest.mark.parametrize("codec", ["none", "blosc"])
def test_eight_readers_cost_the_bytes_of_one(codec: str) -> None:
    gets: Counter[str] = Counter()

    def count(request: Request) -> None:
        if request.method == "GET":
            gets[request.key] += 1

    with QuickS3(intercept=count) as server, s3_store(server.url) as store:  # type: ignore[arg-type]
        given: Any = store
        node = Node(store=given, threads=4).listen()
        wanted = node.save(list(range(3000, 3000 + 16 * CHUNKS)), codec=codec)
        gets.clear()
        gate, read = threading.Barrier(READERS), deque[list[bytes]]()

        def reader(number: int) -> None:
            client = node.connect()
            mine = wanted[number:] + wanted[:number]  # in an order of its own
            gate.wait()
            leases = opened(client, mine)
            for lease in leases:
                progress = ended(client, lease)
                assert progress.state is CellState.READY
                read.append(pages_at(client.arena.view, progress))
            client.release([lease.number for lease in leases])

        threads = [threading.Thread(target=reader, args=(n,)) for n in range(READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list(read) == [RIGHT] * READERS * CHUNKS
        assert sorted(gets.values()) == [1] * CHUNKS, "each of them has one request's length"
        assert node.recorder.value("load_bytes") == sum(one.record.nbytes for one in wanted)
        assert node.recorder.value("agent_fills") == CHUNKS
        assert node.recorder.value("agent_hits") == (READERS - 1) * CHUNKS
        node.close()
        assert node.residents.leased() == 0
