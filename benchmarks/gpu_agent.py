"""Measure loads by a node agent on a GPU: their speed, and what they cost a decoding engine.

    python -m benchmarks.gpu_agent [resident] [decode] [--rounds N] [--json]

A worker is made as in a replica of an 8B model: chunks of 256 tokens, 32 layers, 32 MiB.

``resident``: loads of payloads that are in the agent's memory already, one and 32 of them, in both
orders of heads and tokens and with scattered blocks, against plain copies of page-locked memory.

``decode``: a decoder of random weights and the shape of an 8B generates tokens of 8 sequences, and
a thousand lines of Python precede each step, as in an engine. Meanwhile loads of 1 GiB follow one
another: by an agent that fetches them by TLS, and by one that has them in memory. Printed are
steps' times, of those alone and beside each kind of load, with launches from Python (``eager``) and
as one CUDA graph (``graph``).
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.sample import kv_like
from benchmarks.worker import BOUND_S, LOOK_S, NOTHING, Side, step_of, stores
from objkv.assembly.backends import Backends, open_backends
from objkv.cache.chunks import shard_record
from objkv.codec.payload import Claim, Provenance, encode, read_header
from objkv.config import load_config
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.wiring import use_batched_copies
from objkv.connector.model.groups import Geometry
from objkv.index.base import ChunkEntry
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.ops.bench.sample import NAMESPACE
from objkv.programs.gpu_facts import device_name, plain_copy
from objkv.telemetry import NullRecorder
from objkv.transfer.devices import driver_of
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import ChunkMove, LoadMove
from tests.device.devices import open_device
from tests.support.agents import AgentProcess

CHUNK, BLOCK, CHUNKS, PROMPTS = 256, 16, 32, 3
BLOCKS = CHUNK // BLOCK
LAYERS = tuple(f"layers.{number}" for number in range(32))
GROUP = GroupIdentity("full", None, LAYERS, heads=8, content=256, block_size=BLOCK)
GEOMETRY = Geometry((GROUP,), CHUNK, BLOCK, tp_size=1)
SMALL_ARENA, LARGE_ARENA = "1280MiB", "5GiB"
"""Room for little more than one prompt, and for all of them."""
SEQUENCES, CONTEXT, WIDTH, HEADS, KV_HEADS, INNER = 8, 2048, 4096, 32, 8, 14_336
PYTHON_LINES = 20_000
"""Iterations of a loop before each step, about a millisecond."""
ALONE_STEPS, WARM_STEPS = 150, 20
BESIDE_S = 2.5
"""For so long at most, steps run beside one load."""


class Prompts:
    """Stored prompts, and the plans that load them."""

    def __init__(self, backends: Backends, group: PagedGroup) -> None:
        self._group, self._requests = group, 0
        self.raw_bytes = group.raw_bytes
        self._base = np.frombuffer(kv_like(group.raw_bytes), np.uint8)
        order = list(range(1, 1 + CHUNKS * BLOCKS))
        random.Random(0).shuffle(order)  # not a secret
        self._blocks = order
        self.prompts = [self._stored(backends, number) for number in range(PROMPTS)]

    def _pages(self, prompt: int, chunk: int) -> list[memoryview]:
        """Pages of each layer. All chunks differ in all blocks."""
        salt = 1 + prompt * CHUNKS + chunk
        pages = (self._base.view(np.uint16) + np.uint16(salt)).view(np.uint8)
        size = len(pages) // len(LAYERS)
        return [pages[at : at + size].data for at in range(0, len(pages), size)]

    def _stored(self, backends: Backends, prompt: int) -> list[LoadMove]:
        hashes = prefix_hashes(
            NAMESPACE, range(prompt << 20, (prompt << 20) + CHUNKS * CHUNK), CHUNK
        )
        moves = []
        for chunk in range(CHUNKS):
            move = ChunkMove(
                chunk=chunk,
                group=0,
                prefix_hash=hashes[chunk],
                parent_hash=hashes[chunk - 1] if chunk else root_hash(NAMESPACE),
                token_start=chunk * CHUNK,
                token_end=(chunk + 1) * CHUNK,
                first_block=0,
                block_ids=tuple(self._blocks[chunk * BLOCKS : (chunk + 1) * BLOCKS]),
            )
            key = ChunkKey(NAMESPACE, hashes[chunk], 0)
            claim = Claim(key, move.parent_hash, move.token_start, move.token_end)
            provenance = Provenance(token_digest(()), "bench", 1)
            pages = self._pages(prompt, chunk)
            payload = encode(claim, self._group.layers, pages, codec="none", provenance=provenance)
            backends.bulk.put(key.path(), payload)
            entry = ChunkEntry(
                NAMESPACE, move.prefix_hash, move.parent_hash, move.token_start, move.token_end
            )
            record = shard_record(read_header(payload))
            backends.index.publish(entry, {key.field: record}, ttl_s=3600)
            moves.append(LoadMove(move, None))
        return moves

    def plan(self, prompt: int, chunks: int = CHUNKS) -> StepPlan:
        """A step that begins to load the first chunks of a prompt."""
        self._requests += 1
        return step_of(NAMESPACE, self.prompts[prompt][:chunks], f"r{self._requests}")

    def check(self, caches: Sequence[torch.Tensor], prompt: int) -> None:
        """Raise AssertionError unless the paged cache has this prompt."""
        base = torch.from_numpy(self._base.view(np.int16).copy()).to(caches[0].device)
        ids = torch.tensor(self._blocks, device=caches[0].device).view(CHUNKS, BLOCKS)
        for chunk in range(CHUNKS):
            right = (base + (1 + prompt * CHUNKS + chunk)).view(len(LAYERS), -1)
            for layer, cache in enumerate(caches):
                found = cache.view(torch.int16)[ids[chunk]].reshape(-1)
                assert torch.equal(found, right[layer]), f"wrong bytes: {layer=}, {chunk=}"


def caches_of(device: torch.device, form: str) -> list[torch.Tensor]:
    """A paged cache with room for a prompt."""
    count, heads, content = 1 + CHUNKS * BLOCKS, GROUP.heads, GROUP.content
    if form == "HND":
        shape = (len(LAYERS), count, heads, BLOCK, content)
        return list(torch.zeros(shape, dtype=torch.bfloat16, device=device).unbind(0))
    shape = (len(LAYERS), count, BLOCK, heads, content)
    whole = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    return [layer.transpose(1, 2) for layer in whole.unbind(0)]


def is_registering(side: Side) -> bool:
    """Whether the device cannot read all of the agent's memory yet that was loaded so far."""
    frames = side.worker.loader.on_device
    return frames is not None and frames.windows is not None and frames.windows.is_registering


def settle(side: Side, prompts: Prompts, numbers: Sequence[int]) -> None:
    """Load prompts until an agent has them and the device has registered them; compare bytes."""
    for number in numbers:
        side.load(prompts.plan(number))
        prompts.check(side.caches, number)
    end = time.monotonic() + BOUND_S
    while is_registering(side):
        assert time.monotonic() < end
        time.sleep(0.01)


def resident(
    stack: ExitStack, settings: Mapping[str, str], device: torch.device, rounds: int
) -> dict[str, float]:
    """Loads of resident payloads, in GB/s and milliseconds; medians."""
    found: dict[str, list[float]] = {}
    nbytes = 0
    for form in ("NHD", "HND"):
        with ExitStack() as inner:
            caches = caches_of(device, form)
            agent = inner.enter_context(
                AgentProcess({**settings, "agent_memory_bytes": LARGE_ARENA}, fresh=True)
            )
            side = Side(inner, {"agent": agent.url}, GEOMETRY, caches)
            prompts = stored(settings, caches)
            nbytes = prompts.raw_bytes
            settle(side, prompts, (0, 0))
            host = torch.empty(256 << 20, dtype=torch.uint8)
            plain = torch.empty(256 << 20, dtype=torch.uint8, device=device)
            inner.callback(driver_of(device).pin(host))
            copy = partial(plain_copy, host, plain, up=True)
            sides: dict[str, Callable[[], float]] = {
                "one": partial(load_part, side, prompts, 1),
                "all": partial(load_part, side, prompts, CHUNKS),
                "plain one": partial(copy, nbytes),
                "plain all": partial(copy, CHUNKS * nbytes),
            }
            for number in range(rounds + 1):
                for name, measure in sides.items():
                    seconds = measure()
                    if number:
                        found.setdefault(f"{form} {name}", []).append(seconds)
            prompts.check(caches, 0)
    numbers: dict[str, float] = {}
    for name, seconds in found.items():
        median = statistics.median(seconds)
        count = CHUNKS if name.endswith("all") else 1
        numbers[f"{name}, ms"] = 1e3 * median
        numbers[f"{name}, GB/s"] = count * nbytes / median / 1e9
    return numbers


def load_part(side: Side, prompts: Prompts, chunks: int) -> float:
    """Load the first chunks of the first prompt. Returns seconds."""
    return side.load(prompts.plan(0, chunks))


def stored(settings: Mapping[str, str], caches: Sequence[torch.Tensor]) -> Prompts:
    """Store all prompts, unless they are stored."""
    shape = GEOMETRY.shape(0, 0)
    assert shape is not None
    with open_backends(load_config(dict(settings), environ={}), NullRecorder()) as backends:
        return Prompts(backends, PagedGroup(shape, list(caches)))


class Decoder:
    """A decoder of random weights, one token of each sequence a step."""

    def __init__(self, device: torch.device, layers: int = 32) -> None:
        def weight(*shape: int) -> torch.Tensor:
            made = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return made.normal_(0, 0.02)

        size = WIDTH // HEADS
        self._layers = [
            {
                "qkv": weight((HEADS + 2 * KV_HEADS) * size, WIDTH),
                "out": weight(WIDTH, WIDTH),
                "up": weight(2 * INNER, WIDTH),
                "down": weight(WIDTH, INNER),
                "keys": weight(SEQUENCES, KV_HEADS, CONTEXT, size),
                "values": weight(SEQUENCES, KV_HEADS, CONTEXT, size),
            }
            for _ in range(layers)
        ]
        self._norm = torch.ones(WIDTH, dtype=torch.bfloat16, device=device)
        self._hidden = weight(SEQUENCES, WIDTH)
        self.tokens = torch.zeros(SEQUENCES, dtype=torch.int64, device=device)
        self._graph: Any = None

    def forward(self) -> None:
        """Launch all kernels of a step."""
        x, size = self._hidden, WIDTH // HEADS
        for layer in self._layers:
            y = functional.rms_norm(x, (WIDTH,), self._norm)
            qkv = functional.linear(y, layer["qkv"]).view(SEQUENCES, -1, 1, size)
            heads, keys, values = layer["keys"], layer["keys"], layer["values"]
            queries, heads, _ = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
            keys[:, :, -1:].copy_(heads)
            y = functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
            x = x + functional.linear(y.reshape(SEQUENCES, WIDTH), layer["out"])
            y = functional.rms_norm(x, (WIDTH,), self._norm)
            gate, up = functional.linear(y, layer["up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        self.tokens.copy_(x.argmax(-1))

    def capture(self) -> None:
        """Make a graph of a step. Nothing else may use the device meanwhile."""
        self.forward()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.forward()

    def replay(self) -> None:
        """Launch that graph."""
        self._graph.replay()


class Engine:
    """Steps, as an engine's one thread makes them."""

    def __init__(self, launch: Callable[[], None], tokens: torch.Tensor) -> None:
        self._launch, self._tokens = launch, tokens

    def step(self, side: Side | None, plan: StepPlan = NOTHING) -> float:
        """Make a step. Returns its seconds."""
        begun = time.perf_counter()
        count = 0
        for number in range(PYTHON_LINES):
            count += number & 1
        if side is not None:
            side.begin(plan)
        self._launch()
        if side is not None:
            side.start(plan)
        self._tokens.tolist()  # waits for the device
        return time.perf_counter() - begun

    def alone(self, count: int = ALONE_STEPS) -> list[float]:
        """Steps without loads."""
        return [self.step(None) for _ in range(count)]

    def beside(self, side: Side, plans: Iterator[StepPlan], least: int = 1) -> "Beside":
        """Steps while loads follow one another, ``least`` of them and some steps at least."""
        steps: list[float] = []
        loads: list[float] = []
        spent, started = time.process_time(), 0
        while started < least or len(steps) < ALONE_STEPS / 3:
            begun, started = time.perf_counter(), started + 1
            plan, ends = next(plans), False
            while not ends and time.perf_counter() - begun < BESIDE_S:
                steps.append(self.step(side, plan))
                plan, ends = NOTHING, side.ended()
            if ends:
                loads.append(time.perf_counter() - begun)
                continue
            while not side.ended():
                assert time.perf_counter() - begun < BOUND_S
                time.sleep(LOOK_S)
        return Beside(steps, loads, (time.process_time() - spent) / started)


class Beside:
    """Seconds of steps, of loads that ended beside them, and of processor time for each load."""

    def __init__(self, steps: list[float], loads: list[float], spent_s: float) -> None:
        self.steps, self.loads, self.spent_s = steps, loads, spent_s


def decode(
    stack: ExitStack, settings: Mapping[str, str], device: torch.device, rounds: int
) -> dict[str, float]:
    """Steps alone and beside loads, in milliseconds and as ratios."""
    decoder = Decoder(device)
    for _ in range(WARM_STEPS):
        decoder.forward()
    torch.get_device_module(device).synchronize()
    kinds = {"eager": decoder.forward}
    if device.type == "cuda":
        decoder.capture()
        kinds["graph"] = decoder.replay
    caches = caches_of(device, "NHD")
    prompts = stored(settings, caches)
    agents = {
        name: stack.enter_context(
            AgentProcess({**settings, "agent_memory_bytes": nbytes}, fresh=True)
        )
        for name, nbytes in (("agent", SMALL_ARENA), ("resident", LARGE_ARENA))
    }
    sides = {
        name: Side(stack, {"agent": agent.url}, GEOMETRY, caches) for name, agent in agents.items()
    }
    for side in sides.values():
        settle(side, prompts, range(PROMPTS))
    numbers: dict[str, float] = {}
    for kind, launch in kinds.items():
        engine = Engine(launch, decoder.tokens)
        engine.alone(WARM_STEPS)
        plans = plans_of(prompts)
        steps: dict[str, list[float]] = {"alone": []}
        ratios: dict[str, list[float]] = {}
        loads: dict[str, list[float]] = {}
        spent: dict[str, list[float]] = {}
        before = agents["agent"].metrics()["load_bytes_total"]
        for _ in range(rounds):
            alone = engine.alone()
            steps["alone"] += alone
            for name, side in sides.items():
                found = engine.beside(side, plans)
                steps.setdefault(name, []).extend(found.steps)
                loads.setdefault(name, []).extend(found.loads)
                spent.setdefault(name, []).append(found.spent_s)
                ratios.setdefault(name, []).append(
                    statistics.median(found.steps) / statistics.median(alone)
                )
        fetched = agents["agent"].metrics()["load_bytes_total"] - before
        fetched /= max(1, len(loads["agent"])) * CHUNKS
        nbytes = prompts.raw_bytes
        numbers[f"{kind} fetched share"] = fetched / nbytes
        base = percentiles(steps["alone"])
        for name, seconds in steps.items():
            p50, p99 = percentiles(seconds)
            numbers[f"{kind} {name} p50, ms"], numbers[f"{kind} {name} p99, ms"] = p50, p99
            numbers[f"{kind} {name} steps"] = len(seconds)
            numbers[f"{kind} {name} slowest, ms"] = 1e3 * max(seconds)
            if name == "alone":
                continue
            numbers[f"{kind} {name} p50 ratio"] = statistics.median(ratios[name])
            numbers[f"{kind} {name} p99 ratio"] = p99 / base[1]
            gigabytes = CHUNKS * nbytes / 1e9
            numbers[f"{kind} {name} loads that ended"] = len(loads[name])
            if loads[name]:
                numbers[f"{kind} {name} load, GB/s"] = gigabytes / statistics.median(loads[name])
            numbers[f"{kind} {name} processor s per GB"] = (
                statistics.median(spent[name]) / gigabytes
            )
    return numbers


def plans_of(prompts: Prompts) -> Iterator[StepPlan]:
    """Loads of one prompt after the other, for ever."""
    number = 0
    while True:
        yield prompts.plan(number % PROMPTS)
        number += 1


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile in milliseconds."""
    p50, p99 = np.percentile(seconds, (50, 99))
    return 1e3 * float(p50), 1e3 * float(p99)


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[tuple[ExitStack, dict[str, str]]]:
    """Stores on loopback behind TLS."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objkv-")))
        yield stack, stores(stack, folder)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["resident", "decode"])
    parser.add_argument("--device", default="gpu", help="gpu, or sim to try this program")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = open_device(options.device)
    use_batched_copies(device)
    document: dict[str, dict[str, float]] = {}
    for name, work in (("resident", resident), ("decode", decode)):
        if name in options.what:
            with opened(options) as (stack, settings):
                document[name] = work(stack, settings, device, options.rounds)
                if not options.json:
                    print(f"{name} on {device_name(device)}")
                    for what, number in document[name].items():
                        print(f"  {what}: {number:.4g}", flush=True)
    if options.json:
        json.dump(document, sys.stdout)


if __name__ == "__main__":
    main()
