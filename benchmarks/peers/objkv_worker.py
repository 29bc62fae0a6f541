"""objkv with its defaults except for codec (none), threads and admission. Runs in .venv.

    s3       values in the S3 server, records in Valkey: as objkv stores values of this size
    redis    values in Valkey too, from which they are read, although objkv stores only small ones
             there by default

Writer and reader have an agent of their own each. The measured time covers all work for a value,
more than a peer's connector does: a copy out of the paged cache and one to the agent, checksums and
header, lease, conditional put and record; then the record, the check of every byte, and a copy into
the paged cache.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import QUICK_S3
from benchmarks.peers.protocol import LAYERS, Bytes, Servers, Worker, serve
from benchmarks.worker import Side, step_of, stored
from objkv.assembly.backends import open_index
from objkv.cache.match import usable_chunks
from objkv.config import load_config
from objkv.connector.model.groups import Geometry
from objkv.index.base import ShardRecords
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import root_hash, token_digest
from objkv.telemetry import NullRecorder
from objkv.transfer.plan import ChunkMove, SaveMove
from tests.support.agents import AgentProcess
from tests.support.plans import LoadMove

NAMESPACE = "be" * 16
TOKENS, BLOCK = 256, 32
BLOCKS = TOKENS // BLOCK
ROOT = root_hash(NAMESPACE)
DIGEST = token_digest(list(range(TOKENS)))
ARENA = "2GiB"
AT_ONCE = 16
"""Values that are handed over at once."""


class ObjkvWorker(Worker):
    """One replica without an engine: values are chunks of its paged cache."""

    def __init__(self, place: str) -> None:
        self._in_redis = place == "redis"
        self._stack, self._transfers = ExitStack(), ExitStack()

    def open(self, servers: Servers, role: str, threads: int) -> None:
        """Choose the stores of its agent, as a user does."""
        settings = {
            "agent_memory_bytes": ARENA,
            "bulk_url": f"s3://{servers.bucket}/objkv",
            "index_url": f"redis://127.0.0.1:{servers.redis_port}",
            "s3_endpoint_url": f"http://127.0.0.1:{servers.s3_port}",
            **QUICK_S3,
            "hot_save_bytes_max": str(1 << 30 if self._in_redis else 0),
            "load_threads": str(threads),
            "save_to_bucket": "all",
            "codec": "none",
        }
        self._index = open_index(load_config(settings, environ={}), NullRecorder())
        self._stack.callback(self._index.close)
        self._agent = self._stack.enter_context(AgentProcess(settings, fresh=True))

    def prepare(self, value_bytes: int, values: int) -> None:
        """A paged cache with room for the values, and the worker over it."""
        self._transfers.close()
        per_token = value_bytes // LAYERS // 2 // TOKENS
        heads = max(1, per_token // 256)
        names = tuple(f"layers.{i}" for i in range(LAYERS))
        self._group = GroupIdentity("full", None, names, heads, per_token // heads, BLOCK)
        geometry = Geometry((self._group,), TOKENS, BLOCK, tp_size=1)
        self._fields = sorted(geometry.all_fields())
        shape = (LAYERS, 1 + values * BLOCKS, heads, BLOCK, per_token // heads)
        self._pages = torch.zeros(shape, dtype=torch.bfloat16).unbind()
        self._side = Side(self._transfers, {"agent": self._agent.url}, geometry, self._pages)
        super().prepare(value_bytes, values)

    def stage(self) -> None:
        """Into the paged cache, as a forward pass would leave it."""
        for i, value in enumerate(self.buffers):
            for layer, part in zip(self._value(i), np.split(value, LAYERS), strict=True):
                layer[:] = part

    def put(self, names: Sequence[str]) -> None:
        """Until all are stored and announced."""
        saves = [SaveMove(_move(name, i), DIGEST, None) for i, name in enumerate(names)]
        for start in range(0, len(saves), AT_ONCE):
            self._side.save(NAMESPACE, saves[start : start + AT_ONCE])
        stored(self._index, NAMESPACE, saves)

    def get(self, names: Sequence[str]) -> None:
        """Look the records up, load all values, as one request of the engine would."""
        moves = [
            LoadMove(_move(name, i), None)
            for i, (name, shards) in enumerate(zip(names, self._find(names), strict=True))
            if shards is not None
        ]
        assert len(moves) == len(names)
        self._side.load(step_of(NAMESPACE, moves, names[0]))

    def got(self, count: int) -> list[Bytes]:
        """Out of the paged cache again."""
        return [np.concatenate(self._value(place)) for place in range(count)]

    def lookup(self, names: Sequence[str]) -> int:
        """As a scheduler asks."""
        return usable_chunks(self._find(names), (self._group,), TOKENS)

    def close(self) -> None:
        """Stop threads, give connections back."""
        self._transfers.close()
        self._stack.close()

    def _value(self, place: int) -> list[Bytes]:
        """The bytes of one value in the paged cache, a layer each."""
        blocks = slice(1 + place * BLOCKS, 1 + (place + 1) * BLOCKS)
        return [layer[blocks].view(torch.uint8).numpy().reshape(-1) for layer in self._pages]

    def _find(self, names: Sequence[str]) -> list[ShardRecords | None]:
        hashes = [bytes.fromhex(name) for name in names]
        return self._side.index.find(NAMESPACE, hashes, self._fields)


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
