"""``bench agent``: what a replica gets from a node agent, against memcpy and a folder.

The agent is a process of its own. Its readers are threads here, which do what a replica does: they
open a payload, check its header, copy its frames from the shared memory, and end the lease.
"""

import mmap
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from objkv.agent.client import AgentConnection, is_listening
from objkv.agent.fill import Wanted
from objkv.agent.memory.arena import CellState
from objkv.agent.outbox import Outbox
from objkv.agent.queue import Urgency
from objkv.cache.chunks import shard_record
from objkv.codec.payload import header_bytes_needed, read_claimed, read_header
from objkv.errors import TransferError
from objkv.index.base import ChunkEntry
from objkv.ops.bench.harness import (
    SCALES,
    BenchRow,
    BenchSetting,
    Compared,
    Section,
    Target,
    Threads,
    Work,
    interleave,
    make_slab,
)
from objkv.ops.bench.sample import (
    FIELD,
    NAMESPACE,
    PAYLOAD_1_MIB,
    PAYLOAD_32_MIB,
    PayloadSample,
    Shape,
    chunk_hashes,
    get_verified,
    make_samples,
    publish,
)
from objkv.ops.bench.servers import local_config
from objkv.ops.programs import Program
from objkv.stores.base import copy_bytes

_PAYLOADS = 4
_READS = ((1, 1), (1, _PAYLOADS), (4, _PAYLOADS))
"""Readers, and payloads that each of them opens together, as those of a prompt."""
_LOOKUP_CHUNKS, _LOOKUPS, _NEW_CLIENTS = 128, 200, 20
_START_S = 120.0
_DEADLINE_S = 60.0
_IDLE_S = 5.0
_SAVED_BYTES = 1 << 20
_SHARING = 8
"""Readers that request the same payloads at the same moment."""
RESIDENT = Target(0.8)
LOOKUP_US = Target(60, at_most=True, of="ours")
ONCE = Target(1.0, at_most=True, of="ours")
KEPT = Target(90, of="ours")
IDLE_SHARE = Target(0.2, at_most=True, of="ours")
IDLE_MIB = Target(120, at_most=True, of="ours")


def bench_agent(setting: BenchSetting) -> Section:
    """Measure loads of resident payloads, hand-overs of saves, lookups, and an idle agent. Raises
    ``ProgramFailed`` if the agent does not start."""
    shape = PAYLOAD_1_MIB if setting.quick else PAYLOAD_32_MIB
    samples = make_samples(shape, _PAYLOADS)
    store = f"file://{setting.folder / 'agent' / 'chunks'}"
    index = f"sqlite://{setting.folder / 'agent' / 'index.sqlite'}"
    config = local_config(bulk_url=store, index_url=index)
    wanted = _stored(setting, samples, store, index)
    settings = {
        "OBJKV_BULK_URL": store,
        "OBJKV_INDEX_URL": index,
        "OBJKV_AGENT_MEMORY_BYTES": str(8 * len(samples) * shape.raw_bytes),
        "OBJKV_NEAR_TTL_MS": "600000",
    }
    log = setting.folder / "agent.log"
    setting.tell("agent", "starting")
    # A socket's path may have 107 bytes, and the given folder may have a long one.
    with ExitStack() as stack:
        path = Path(stack.enter_context(TemporaryDirectory(prefix="objkv-"))) / "agent.sock"
        arguments = ("-m", "objkv", "agent", "--socket", str(path))
        program = stack.enter_context(Program("the agent", arguments, log, settings))
        _await(path)
        rows = [
            *_shared(setting, path, samples[:2], wanted[:2]),
            *_resident(setting, path, samples, wanted),
            *_against_folder(setting, path, samples, wanted, config.bulk_url),
            _hand_over(setting, path),
            *_lookup(setting, path),
            *_idle(setting, program.pid),
        ]
    return Section("agent", tuple(rows), {}, (f"payloads of {shape.name}",))


def _stored(
    setting: BenchSetting, samples: Sequence[PayloadSample], store: str, index_url: str
) -> list[Wanted]:
    """Store the samples and their records, and records for lookups."""
    config = local_config(bulk_url=store, index_url=index_url)
    wanted = []
    with (
        closing(setting.factories.open_bulk(config)) as bulk,
        closing(setting.factories.open_index(config)) as index,
    ):
        publish(index, chunk_hashes(_LOOKUP_CHUNKS))
        for sample in samples:
            claim, key = sample.claim, sample.claim.key
            bulk.put_if_absent(key.path(), sample.payload)
            record = shard_record(read_header(sample.payload))
            entry = ChunkEntry(
                key.namespace, key.prefix_hash, claim.parent_hash, 0, claim.token_end
            )
            index.publish(entry, {key.field: record}, ttl_s=3_600)
            wanted.append(Wanted(claim, record))
    return wanted


def _await(path: Path) -> None:
    end = time.monotonic() + _START_S
    while not (is_listening(path) and _has_page(path)):
        if time.monotonic() >= end:
            raise TransferError(f"the agent did not start within {_START_S:g} s")
        time.sleep(0.05)


def _has_page(path: Path) -> bool:
    """Whether its page answers: it listens a moment after its socket exists."""
    try:
        _fetched(path)
    except OSError:
        return False
    return True


class _Reader:
    """One replica's reads."""

    def __init__(
        self, path: Path, samples: Sequence[PayloadSample], wanted: Sequence[Wanted]
    ) -> None:
        """``wanted``: what to load, all of it of one prompt."""
        self._agent = AgentConnection(path, wants_arena=True)
        self._layers, self._wanted = samples[0].layers, wanted
        self._payloads = [sample.payload for sample in samples[: len(wanted)]]
        self._targets = [make_slab(len(payload)) for payload in self._payloads]

    def load(self) -> None:
        """Load the payloads once, as a worker does."""
        agent = self._agent
        leases = agent.open(self._wanted, deadline_s=_DEADLINE_S, urgency=Urgency.BETWEEN_STEPS)
        for lease, wanted, target in zip(leases, self._wanted, self._targets, strict=True):
            progress = lease.progress
            while progress.state is CellState.FILLING:
                # Read first: the wait for an earlier payload may have consumed the event.
                progress = agent.arena.board.read(lease.cell)
                if progress.state is CellState.FILLING:
                    agent.wait(_DEADLINE_S)
            if progress.state is not CellState.READY:
                raise TransferError("the agent has no payload")
            payload = agent.arena.view[progress.offset : progress.offset + progress.nbytes]
            head = payload[: header_bytes_needed(payload[:8])]
            frames = read_claimed(head, wanted.claim, self._layers).frames
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


def _shared(
    setting: BenchSetting, path: Path, samples: Sequence[PayloadSample], wanted: Sequence[Wanted]
) -> Iterator[BenchRow]:
    """Count what the agent fetches from the store for readers, and again for those after them."""
    due = sum(len(sample.payload) for sample in samples)
    for name in ("at the same moment", "after a restart of all"):
        setting.tell("shared payloads", f"readers: {_SHARING}, {name}")
        before = _fetched(path)
        with ExitStack() as stack:
            readers = [
                stack.enter_context(closing(_Reader(path, samples, wanted)))
                for _ in range(_SHARING)
            ]
            threads = stack.enter_context(Threads(_SHARING))
            threads.run(_loads_of(readers))
        fetched = _fetched(path) - before
        if name == "at the same moment":
            title = f"bytes fetched from the store for {_SHARING} readers {name}"
            yield BenchRow(title, "x their payloads", fetched / due, target=ONCE)
        else:
            title = f"bytes served from memory to {_SHARING} readers {name}"
            yield BenchRow(title, "%", 100 * (1 - fetched / due), target=KEPT)


def _loads_of(readers: Sequence[_Reader]) -> Callable[[int], None]:
    return lambda number: readers[number].load()


def _fetched(path: Path) -> float:
    """Return the bytes that the agent has fetched, by its own metrics."""
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.settimeout(_START_S)
        sock.connect(f"{path}.http")
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = b"".join(iter(partial(sock.recv, 65_536), b"")).decode()
    found = re.search(r"^objkv_agent_load_bytes_total ([0-9.e+]+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _resident(
    setting: BenchSetting, path: Path, samples: Sequence[PayloadSample], wanted: Sequence[Wanted]
) -> Iterator[BenchRow]:
    for count, payloads in _READS:
        setting.tell("resident payloads", f"{payloads}, readers: {count}")
        with ExitStack() as stack:
            readers = [
                stack.enter_context(closing(_Reader(path, samples, wanted[:payloads])))
                for _ in range(count)
            ]
            threads = stack.enter_context(Threads(count))
            timings = interleave(_both(threads, readers), setting.rounds)
        compared = Compared(timings, "ours", "memcpy", "memcpy")
        nbytes = count * payloads * len(samples[0].payload)
        name = f"load of {payloads} resident payloads, readers: {count}"
        yield compared.throughput(name, nbytes, RESIDENT)


def _both(threads: Threads, readers: Sequence[_Reader]) -> dict[str, Work]:
    return {
        "ours": lambda: threads.run(lambda number: readers[number].load()),
        "memcpy": lambda: threads.run(lambda number: readers[number].copy()),
    }


def _against_folder(
    setting: BenchSetting,
    path: Path,
    samples: Sequence[PayloadSample],
    wanted: Sequence[Wanted],
    store: str,
) -> Iterator[BenchRow]:
    """Compare with a replica that reads for itself, from a folder in the page cache."""
    setting.tell("resident payloads", "against a folder")
    config = local_config(bulk_url=store)
    with (
        closing(setting.factories.open_bulk(config)) as bulk,
        closing(_Reader(path, samples, wanted[:1])) as reader,
    ):
        slab, key = make_slab(len(samples[0].payload)), samples[0].claim.key.path()
        own = PayloadSample(key, samples[0].claim, samples[0].layers, samples[0].payload)
        target = make_slab(len(slab))

        def alone() -> None:
            get_verified(bulk, own, slab)
            copy_bytes(target, slab, len(slab))

        sides = {"ours": _timed(reader.load), "alone": _timed(alone)}
        timings = interleave(sides, setting.rounds)
    compared = Compared(timings, "ours", "alone", "own get from a folder, verified and copied")
    yield compared.throughput("load of a resident payload", len(slab))


def _hand_over(setting: BenchSetting, path: Path) -> BenchRow:
    """Measure how long a worker waits until the agent has a verified copy."""
    setting.tell("saves", "handing over")
    outbox = Outbox(2 * _SAVED_BYTES)
    memory = memoryview(mmap.mmap(outbox.fd, outbox.nbytes))
    target = make_slab(outbox.nbytes)
    shape = Shape("1 MiB", 1, _SAVED_BYTES)
    fresh = iter(make_samples(shape, setting.rounds + 2, folder="saves"))
    with closing(AgentConnection(path, outbox=outbox.fd)) as agent:

        def ours() -> float:
            payload = next(fresh).payload
            memory[: len(payload)] = payload
            begun = time.perf_counter()
            agent.commit(0, len(payload))
            return time.perf_counter() - begun

        def memcpy() -> float:
            begun = time.perf_counter()
            copy_bytes(target, memory, _SAVED_BYTES)
            return time.perf_counter() - begun

        timings = interleave({"ours": ours, "memcpy": memcpy}, setting.rounds)
    outbox.close()
    compared = Compared(timings, "ours", "memcpy", "memcpy")
    return compared.duration("hand-over of a 1 MiB payload to save", "µs")


def _lookup(setting: BenchSetting, path: Path) -> Iterator[BenchRow]:
    setting.tell("lookups", f"{_LOOKUP_CHUNKS} chunks")
    hashes = chunk_hashes(_LOOKUP_CHUNKS)

    def find_in(agent: AgentConnection) -> float:
        begun = time.perf_counter()
        found = agent.find(NAMESPACE, hashes, (FIELD,))
        took = time.perf_counter() - begun
        assert not any(one is None for one in found)
        return took

    def first() -> float:
        """Look up once for each of some new clients, which know no records."""
        with ExitStack() as stack:
            agents = [
                stack.enter_context(closing(AgentConnection(path))) for _ in range(_NEW_CLIENTS)
            ]
            for agent in agents:
                agent.find(NAMESPACE, hashes[:1], (FIELD,))
            return sum(map(find_in, agents)) / _NEW_CLIENTS

    with closing(AgentConnection(path)) as agent:
        sides = {
            "ours": lambda: sum(find_in(agent) for _ in range(_LOOKUPS)) / _LOOKUPS,
            "one": lambda: _exchanges(agent, hashes[:1]),
            "first": first,
        }
        timings = interleave(sides, setting.rounds)
    name = f"lookup of {_LOOKUP_CHUNKS} chunks in the agent's near cache"
    scale = SCALES["µs"]
    yield BenchRow(name, "µs", timings.median("ours") * scale, target=LOOKUP_US)
    yield BenchRow("the same by a new client", "µs", timings.median("first") * scale)
    yield BenchRow("lookup of 1 chunk", "µs", timings.median("one") * scale)


def _exchanges(agent: AgentConnection, hashes: Sequence[bytes]) -> float:
    begun = time.perf_counter()
    for _ in range(_LOOKUPS):
        agent.find(NAMESPACE, hashes, (FIELD,))
    return (time.perf_counter() - begun) / _LOOKUPS


def _idle(setting: BenchSetting, pid: int) -> Iterator[BenchRow]:
    seconds = 0.5 if setting.quick else _IDLE_S
    setting.tell("idle", f"{seconds:g} s")
    begun = _processor_s(pid)
    time.sleep(seconds)
    share = 100 * (_processor_s(pid) - begun) / seconds
    yield BenchRow("processor of an idle agent", "% of a core", share, target=IDLE_SHARE)
    memory = _private_bytes(pid) / (1 << 20)
    yield BenchRow("memory of an agent without its arena", "MiB", memory, target=IDLE_MIB)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _private_bytes(pid: int) -> int:
    """Return the resident memory that is not shared: a memfd counts as shared."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return sum(int(sizes[name][0]) << 10 for name in ("RssAnon", "RssFile"))


def _timed(work: Callable[[], None]) -> Work:
    def timed() -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    return timed
