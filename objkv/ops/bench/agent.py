"""Loads and lookups by the configured node agent. The bench is a client of it, as a worker is."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from objkv.agent.client import AgentConnection, leases_of
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import Claims, Urgency
from objkv.cache.chunks import shard_record
from objkv.codec.payload import header_bytes_needed, read_claimed, read_header
from objkv.errors import TransferError
from objkv.index.base import ChunkEntry, WriteIndex
from objkv.ops.bench.sample import FIELD, PayloadSample, make_samples
from objkv.ops.bench.stores import (
    CHUNKS,
    TTL_S,
    BenchRow,
    Effort,
    at_once,
    latency,
    make_slab,
    published,
    removed,
    seconds,
    throughput,
)
from objkv.stores.base import PruneStore, copy_bytes

_PAYLOADS = 4
_READERS = (1, 4)
_DEADLINE_S = 60.0


class AgentReader:
    """Reads payloads as a worker does: it opens them, checks their headers, copies their frames
    from the agent's memory, and ends the leases."""

    def __init__(self, socket: Path, samples: Sequence[PayloadSample]) -> None:
        """Raises ``TransferError``."""
        self._agent = AgentConnection(socket, wants_arena=True)
        self._layers, self._claims = samples[0].layers, [sample.claim for sample in samples]
        self._payloads = [sample.payload for sample in samples]
        self._targets = [make_slab(sample) for sample in samples]

    def load(self) -> None:
        """Load the payloads once. Raises ``TransferError`` if the agent cannot get one."""
        agent = self._agent
        claims = Claims.of(self._claims)
        opened = agent.open(claims, deadline_s=_DEADLINE_S, urgency=Urgency.BETWEEN_STEPS)
        leases = leases_of(opened, agent.arena.board)
        for lease, claim, target in zip(leases, self._claims, self._targets, strict=True):
            progress = lease.progress
            while progress.state is CellState.FILLING:
                # Read first: the wait for an earlier payload may have consumed the event.
                progress = agent.arena.board.read(lease.cell)
                if progress.state is CellState.FILLING:
                    agent.wait(_DEADLINE_S)
            if progress.state is not CellState.READY:
                raise TransferError("the agent has no payload: does it use the same store?")
            payload = agent.arena.view[progress.offset : progress.offset + progress.nbytes]
            head = payload[: header_bytes_needed(payload[:8])]
            frames = read_claimed(head, claim, self._layers).frames
            at = 0
            for start, end in zip(frames.starts, frames.ends, strict=True):
                copy_bytes(target[at : at + end - start], payload[start:end], end - start)
                at += end - start
        agent.release([lease.number for lease in leases])

    def copy(self) -> None:
        """Copy as many bytes."""
        for target, payload in zip(self._targets, self._payloads, strict=True):
            copy_bytes(target, payload, len(payload))

    def close(self) -> None:
        """End its connection."""
        self._agent.close()


def bench_agent(
    socket: Path, bulk: PruneStore, index: WriteIndex, effort: Effort
) -> Iterator[BenchRow]:
    """Measure the agent at ``socket`` over its own store and index, with payloads that are deleted
    at the end. Raises ``TransferError`` and ``StoreError``."""
    with ExitStack() as stack:
        namespace, hashes = stack.enter_context(published(index))
        samples = make_samples(effort.bulk, _PAYLOADS, namespace=namespace)
        keys = [sample.claim.key for sample in samples]
        stack.enter_context(removed(bulk, [key.path() for key in keys]))
        for sample, key in zip(samples, keys, strict=True):
            bulk.put(key.path(), sample.payload)
            record = shard_record(read_header(sample.payload))
            claim = sample.claim
            entry = ChunkEntry(namespace, key.prefix_hash, claim.parent_hash, 0, claim.token_end)
            stack.callback(index.forget, namespace, key.prefix_hash, key.field, record)
            index.publish(entry, {key.field: record}, ttl_s=TTL_S)
        readers = [
            stack.enter_context(closing(AgentReader(socket, samples))) for _ in range(max(_READERS))
        ]
        nbytes = sum(len(sample.payload) for sample in samples)
        what = f"{_PAYLOADS} payloads of {effort.bulk.name}"
        yield throughput(f"agent load from the store, {what}", nbytes, [seconds(readers[0].load)])
        for count in _READERS:
            for name, work in (
                ("agent load from memory", AgentReader.load),
                ("copy", AgentReader.copy),
            ):
                took = at_once([partial(work, reader) for reader in readers[:count]], effort.rounds)
                yield throughput(f"{name}, {what}, {count} at once", count * nbytes, took)
        agent = stack.enter_context(closing(AgentConnection(socket)))
        finds = [
            seconds(lambda: agent.find(namespace, hashes, (FIELD,))) for _ in range(effort.calls)
        ]
        yield latency(f"agent lookup of {CHUNKS} chunks", finds)
