"""The client's contract on a real Valkey."""

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import objkv
from objkv.assembly.backends import Backends
from objkv.index.base import ChunkEntry
from objkv.keys.chunk import ChunkKey
from tests.client.contract import SharedClientContract, announce
from tests.support.samples import CHUNK, LEFT, NAMESPACE, RIGHT, TOKENS, WHOLE, save, save_identity
from tests.support.servers.redis import RedisServer, valkey_server

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


class TestValkey(SharedClientContract):
    @pytest.fixture
    def settings(self, tmp_path: Path, valkey: RedisServer) -> dict[str, str]:
        return {
            "bulk_url": f"file://{tmp_path}/chunks",
            "index_url": valkey.url,
            "redis_prefix": f"client-{secrets.token_hex(4)}",
            "lookup_deadline_ms": "20000",
        }

    @pytest.mark.parametrize("shards", [(WHOLE,), (LEFT, RIGHT)], ids=["one rank", "two ranks"])
    @pytest.mark.parametrize("announced", [False, True], ids=["unannounced", "announced"])
    def test_hot_copies_are_counted(
        self, client: objkv.Client, stores: Backends, shards: tuple[object, ...], announced: bool
    ) -> None:
        save_identity(stores.bulk)
        hashes = [key.prefix_hash for key in save(stores.bulk, stores.index, shards=shards)]
        for prefix_hash in dict.fromkeys(hashes[: 2 * len(shards)]):
            [record] = stores.index.lookup(NAMESPACE, [prefix_hash])
            assert record is not None
            hot = {name: replace(shard, hot=True) for name, shard in record.shards.items()}
            entry = ChunkEntry(
                NAMESPACE, prefix_hash, record.parent_hash, record.token_start, record.token_end
            )
            stores.index.publish(entry, hot, ttl_s=3_600)
        if announced:
            announce(stores, *(f"0.{shard}" for shard in shards))
        found = client.match(TOKENS)
        assert (found.tokens, found.hot_tokens, found.bulk_tokens) == (48, 32, 16)
        assert [chunk.hot for chunk in client.chunks()].count(True) == 2

    def test_many_threads_share_a_client(
        self, client: objkv.Client, stores: Backends, keys: list[ChunkKey]
    ) -> None:
        announce(stores, f"0.{WHOLE}")
        with ThreadPoolExecutor(8) as pool:
            asked = [n % (len(TOKENS) + 1) or 1 for n in range(400)]
            found = list(pool.map(lambda n: client.match(TOKENS[:n]).chunks, asked))
        assert found == [n // CHUNK for n in asked]

    def test_a_server_that_is_gone_is_an_error_of_its_own(
        self, tmp_path: Path, stores: Backends, keys: list[ChunkKey]
    ) -> None:
        with objkv.open(
            bulk_url=f"file://{tmp_path}/chunks", index_url="redis://127.0.0.1:1"
        ) as client:
            assert len(client.namespaces()) == 1
            for call in (client.match, client.pin):
                with pytest.raises(objkv.StoreUnavailable):
                    call(TOKENS)
