"""objkv with its defaults except for codec (none), threads and admission. Runs in .venv.

    s3       values in the S3 server, records in Valkey: as objkv stores values of this size
    redis    values in Valkey too, although objkv never puts such large ones there

The measured time covers all work for a value, more than a peer's connector does: a copy out of the
paged cache, checksums and header, lease, conditional put and record; then the record, the check of
every byte, and a copy into the paged cache.
"""

import sys
from collections.abc import Sequence
from time import monotonic, sleep

import numpy as np
import torch
from objkv.agent.connections import InsideAgent
from protocol import Bytes, Case, Servers, Worker, serve

from objkv.agent.core import CoreLimits
from objkv.assembly.backends import open_backends
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.cache.match import usable_chunks
from objkv.codec.payload import payload_bytes_max
from objkv.config import Config
from objkv.index.base import Shards
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import root_hash, token_digest
from objkv.keys.topology import rank_shard
from objkv.telemetry import NullRecorder
from objkv.transfer.lanes import HostLane
from objkv.transfer.loading.arena_lane import ArenaLane
from objkv.transfer.loading.loader import Loader
from objkv.transfer.loading.loads import LoadLimits
from objkv.transfer.paging import GroupShape, PagedGroup
from objkv.transfer.plan import ChunkMove, LoadMove, LoadPlan, SaveMove, SavePlan
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import SlabPool

NAMESPACE = "be" * 16
TOKENS, BLOCK = 256, 32
BLOCKS = TOKENS // BLOCK
ROOT = root_hash(NAMESPACE)
DIGEST = token_digest(list(range(TOKENS)))
WAIT_S = 100.0
LOOK_S = 0.0002
PAGE = 4096


class ObjkvWorker(Worker):
    """One replica without an engine: values are chunks of its paged cache."""

    def __init__(self, place: str) -> None:
        self._in_redis = place == "redis"
        self._saver: Saver | None = None
        self._loader: Loader | None = None

    def open(self, servers: Servers, role: str, threads: int) -> None:
        """As a connector opens its stores."""
        config = Config(
            bulk_url=f"s3://{servers.bucket}/objkv",
            index_url=f"redis://127.0.0.1:{servers.redis_port}",
            s3_endpoint_url=f"http://127.0.0.1:{servers.s3_port}",
            s3_region="us-east-1",
            s3_addressing="path",
            s3_access_key_id="bench",
            s3_secret_access_key="bench",
            hot_save_bytes_max=0,
            redis_calls_max=max(16, threads),
        )
        self._config, self._role, self._threads = config, role, threads
        self._backends = open_backends(config, NullRecorder())
        settings = CacheSettings(role, config.ttl_s, config.lease_ms, 0)
        hot = self._backends.hot
        assert hot is not None
        bulk = hot if self._in_redis else self._backends.bulk
        self._cache = ChunkCache(bulk, None, self._backends.index, settings, NullRecorder())
        self._backends.index.check()

    def prepare(self, case: Case) -> list[Bytes]:
        """A paged cache with room for the values, slabs as a connector would lease them."""
        self._close_transfers()
        per_token = case.value_bytes // case.layers // 2 // TOKENS
        heads = max(1, per_token // 256)
        names = tuple(f"layers.{i}" for i in range(case.layers))
        self._group = GroupIdentity("full", None, names, heads, per_token // heads, BLOCK)
        self._rank = rank_shard(layers=case.layers, heads=heads, tp_rank=0, tp_size=1)
        shape = (1 + case.values * BLOCKS, heads, BLOCK, per_token // heads)
        self._pages = [torch.zeros(shape, dtype=torch.bfloat16) for _ in names]
        paged = PagedGroup(GroupShape(names, BLOCKS, BLOCK, self._rank), self._pages)
        config, size = self._config, payload_bytes_max(paged.layers, tokens=TOKENS)
        count = max(2, min(2 * self._threads, (config.pinned_bytes_max or 1 << 30) // 2 // size))
        self._at_once, self._fields = count, [f"0.{self._rank.shard}"]
        if self._role == "writer":
            save = SaveLimits(self._threads, config.save_queue_max, WAIT_S, "none", "bench")
            self._saver = Saver(
                self._cache,
                {0: paged},
                SlabPool("bench", count=count, slab_bytes=size),
                lane=HostLane(),
                limits=save,
                recorder=NullRecorder(),
            )
            self._values = [np.zeros(case.value_bytes, np.uint8) for _ in range(case.values)]
            return self._values
        limits = CoreLimits(
            self._threads, config.load_queue_max, is_paced=True, waits_for_room=True
        )
        nbytes = count * (-(-size // PAGE) + 1) * PAGE
        inside = self._inside = InsideAgent(self._cache, nbytes, limits, NullRecorder())
        self._loader = Loader(
            {0: paged},
            ArenaLane(),
            inside.connect,
            limits=LoadLimits(config.load_queue_max, WAIT_S, WAIT_S),
            recorder=NullRecorder(),
            inside=inside,
        )
        return []

    def stage(self) -> None:
        """Into the paged cache, as a forward pass would leave it."""
        for i, value in enumerate(self._values):
            for layer, part in zip(self._pages, np.split(value, len(self._pages)), strict=True):
                blocks = layer[1 + i * BLOCKS : 1 + (i + 1) * BLOCKS]
                blocks.view(torch.uint8).numpy().reshape(-1)[:] = part

    def put(self, names: Sequence[str]) -> None:
        """As many at once as there are slabs, until all are stored and announced."""
        assert self._saver is not None
        for start in range(0, len(names), self._at_once):
            moves = tuple(
                SaveMove(_move(name, i), DIGEST, None)
                for i, name in enumerate(names[start : start + self._at_once], start)
            )
            dropped = self._saver.gather((SavePlan(names[start], NAMESPACE, moves),))
            if dropped or not self._saver.drain(WAIT_S):
                raise RuntimeError(f"{len(dropped)} chunks were not saved")

    def get(self, names: Sequence[str]) -> None:
        """Look the records up, load all values, as one request of the engine would."""
        assert self._loader is not None
        found = self._find(names)
        moves = [
            LoadMove(_move(name, i), tuple(shards.items()))
            for i, (name, shards) in enumerate(zip(names, found, strict=True))
            if shards is not None
        ]
        assert len(moves) == len(names)
        residents = self._inside.core.residents
        for key in list(residents._by_key):  # what was got before is fetched again
            residents.forget(key)
        self._loader.submit(LoadPlan(names[0], NAMESPACE, tuple(moves), sync=False))
        until = monotonic() + WAIT_S
        while not (outcomes := self._loader.take_finished(sync=False)):
            if monotonic() > until:
                raise TimeoutError(f"no outcome in {WAIT_S} s")
            sleep(LOOK_S)
        if outcomes[0].failed:
            raise RuntimeError(f"{len(outcomes[0].failed_blocks)} blocks were not loaded")

    def got(self, count: int) -> list[Bytes]:
        """Out of the paged cache again."""
        return [
            np.concatenate(
                [
                    layer[1 + i * BLOCKS : 1 + (i + 1) * BLOCKS].view(torch.uint8).numpy().ravel()
                    for layer in self._pages
                ]
            )
            for i in range(count)
        ]

    def lookup(self, names: Sequence[str]) -> int:
        """As a scheduler asks."""
        count = len(self._fields)  # as the connector does: only what it reads was asked for
        found = self._find(names)
        return usable_chunks(found, (self._group,), TOKENS, lambda shards, *_: len(shards) == count)

    def close(self) -> None:
        """Stop threads, give connections back."""
        self._close_transfers()
        self._backends.close()

    def _find(self, names: Sequence[str]) -> list[Shards | None]:
        hashes = [bytes.fromhex(name) for name in names]
        return self._backends.index.find(NAMESPACE, hashes, self._fields)

    def _close_transfers(self) -> None:
        if self._saver is not None:
            self._saver.close(WAIT_S)
        if self._loader is not None:
            self._loader.close()


def _move(name: str, place: int) -> ChunkMove:
    """Every value is the first chunk of a prompt of its own."""
    first = 1 + place * BLOCKS
    return ChunkMove(
        chunk=0,
        group=0,
        prefix_hash=bytes.fromhex(name),
        parent_hash=ROOT,
        token_start=0,
        token_end=TOKENS,
        first_block=0,
        block_ids=tuple(range(first, first + BLOCKS)),
    )


if __name__ == "__main__":
    serve(ObjkvWorker(sys.argv[1]))
