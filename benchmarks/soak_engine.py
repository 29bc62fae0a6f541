"""The soak of real engines over a Redis and an S3 server that fail; see ``soak.py``."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.soak_engine_faults import Faults, Targets
from benchmarks.soak_shared import second_half_growth
from objkv.assembly.backends import open_bulk
from objkv.config import Config
from objkv.ops.demo import VOCABULARY
from objkv.ops.programs import die_with_parent
from objkv.stores.base import PruneStore
from objkv.telemetry import NullRecorder
from tests.support.servers.quick_s3 import QuickS3
from tests.support.servers.redis import RedisServer, valkey_server
from tests.support.servers.spoil_redis import SpoilRedis
from tests.support.servers.spoil_s3 import SpoilS3

ROOT = Path(__file__).resolve().parents[1]
FAULT_S, PAUSE_S = 1.2, 1.6
SILENT_S = 180.0
"""An engine that has not reported for so long hangs."""
START_S = 900.0
REFUSED_START = "objkv.errors.ConfigError"
"""How an engine ends that starts while a server denies everything: the operator is told."""
PROMPTS, LONGEST, CHUNK = 30, 48, 64
GROWTH_MIB_MAX, GROWTH_S_MIN = 256.0, 240.0
"""Of resident memory within the second half of an engine's life. A new vLLM grows by itself for
minutes, without a connector as well, so that only a gross leak is told from that; what objkv holds
is counted: slabs, threads, files."""
SETTINGS: dict[str, Any] = {
    "chunk_tokens": CHUNK,
    "admission": "always",
    "save_decode": True,
    "lookup_deadline_ms": 300,
    "load_deadline_ms": 1_500,
    "step_load_deadline_ms": 500,
    "save_deadline_ms": 5_000,
    "drain_deadline_ms": 2_000,
    "save_queue_max": 8,
    "lease_ms": 3_000,
    "ttl_s": 600,
    "near_miss_ttl_ms": 100,
    "hot_promote_loads": 2,
    "breaker_failures": 4,
    "breaker_reset_ms": 500,
    "pinned_bytes_max": 64 << 20,
    "s3_hedge_percent_max": 50,
}
MODES = ("async", "auto", "layerwise")
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 832,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "block_size": 32,
    "num_gpu_blocks_override": 60,
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 0,
    "disable_log_stats": False,
    "distributed_executor_backend": "uni",
    "async_scheduling": False,
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OBJKV_AGENT": "off",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONFAULTHANDLER": "1",
}


def prompts(seed: int) -> list[list[int]]:
    """On four stems, some of whole chunks, some not."""
    dice = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [dice.randrange(3, VOCABULARY) for _ in range(count)]

    stems = [tokens(640) for _ in range(4)]
    cuts = (100, 3 * CHUNK, 4 * CHUNK, 5 * CHUNK + 13, 7 * CHUNK, 600)
    tails = (0, 1, 31, CHUNK, 100)
    return [
        dice.choice(stems)[: dice.choice(cuts)] + tokens(dice.choice(tails)) for _ in range(PROMPTS)
    ]


@dataclass
class Engine:
    """One process with an engine, as seen from outside."""

    name: str
    folder: Path
    started_s: float = field(default_factory=time.monotonic)
    lines: list[dict[str, Any]] = field(default_factory=list)
    killed: bool = False
    read: int = 0

    def file(self, what: str) -> Path:
        """Its file of that kind."""
        return self.folder / f"{self.name}.{what}"

    def look(self) -> None:
        """Read what it has told since."""
        if not self.file("status").exists():
            return
        with self.file("status").open() as file:
            file.seek(self.read)
            while (line := file.readline()).endswith("\n"):
                self.lines.append(json.loads(line))
                self.read = file.tell()

    @property
    def ended(self) -> bool:
        """Whether its process is over."""
        return self.killed or self.file("ended").exists()

    @property
    def silent_s(self) -> float:
        """For how long it has told nothing."""
        last = self.lines[-1]["at_s"] if self.lines else None
        return time.monotonic() - self.started_s if last is None else time.time() - last

    def signal(self, number: int) -> None:
        """To its process, if there is one."""
        with suppress(OSError, ValueError):
            os.kill(int(self.file("pid").read_text()), number)


class Fleet:
    """The engines, and the process that they are forked off."""

    def __init__(
        self, folder: Path, model: str, texts: list[list[int]], extra: dict[str, Any]
    ) -> None:
        self._folder, self._model, self._texts, self._extra = folder, model, texts, extra
        self.engines: list[Engine] = []
        self._alone: Engine | None = None
        self.stop = folder / "stop"
        self.expected = folder / "expected.json"
        log = (folder / "launcher.log").open("wb")
        self._launcher = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak_engine_replica"],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith("OBJKV_")} | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=die_with_parent,  # no thread is started meanwhile
        )

    def wait_ready(self) -> None:
        """Until it has imported vLLM."""
        assert self._launcher.stdout is not None
        if self._launcher.stdout.readline().strip() != "ready":
            raise SystemExit((self._folder / "launcher.log").read_text()[-4000:])

    def start(self, *, disturb: bool, connector: bool = True) -> Engine:
        """One more engine."""
        number = len(self.engines)
        engine = Engine(f"engine-{number}" if connector else "alone", self._folder)
        arguments = ENGINE | {"model": self._model}
        job: dict[str, Any] = {
            "prompts": self._texts,
            "longest": LONGEST,
            "expected": str(self.expected),
            "stop": str(self.stop),
            "seed": number,
            "disturb": disturb,
            "environment": ENVIRONMENT,
        }
        job |= {what: str(engine.file(what)) for what in ("status", "log", "pid", "ended")}
        if connector:
            extra = SETTINGS | self._extra | {"load_mode": MODES[number % len(MODES)]}
            arguments["kv_transfer_config"] = {
                "kv_connector": "ObjKVConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        else:
            job["answers"] = str(self.expected)
        file = engine.file("job")
        file.write_text(json.dumps(job | {"engine": arguments}))
        assert self._launcher.stdin is not None
        self._launcher.stdin.write(f"{file}\n")
        self._launcher.stdin.flush()
        if connector:
            self.engines.append(engine)
        else:
            self._alone = engine
        return engine

    def close(self) -> None:
        """End all processes."""
        for engine in (*self.engines, *filter(None, (self._alone,))):
            if not engine.ended:
                engine.signal(signal.SIGKILL)
        self._launcher.kill()
        self._launcher.wait()


@contextmanager
def servers(folder: Path) -> Iterator[tuple[dict[str, Any], SpoilS3, SpoilRedis, Any]]:
    """A Valkey and an S3 server, each behind a proxy that spoils answers; how to reach them."""
    with ExitStack() as stack:
        args = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
        redis = stack.enter_context(valkey_server(folder / "valkey", args=args))
        s3 = stack.enter_context(QuickS3())
        spoiled_s3 = stack.enter_context(SpoilS3(s3.address))
        spoiled_redis = stack.enter_context(SpoilRedis(("127.0.0.1", redis.port)))
        direct = stack.enter_context(SpoilS3(s3.address))
        extra: dict[str, Any] = {
            "bulk_url": "s3://soak/objkv",
            "index_url": spoiled_redis.url,
            "s3_endpoint_url": spoiled_s3.url,
            "s3_addressing": "path",
            "s3_access_key_id": "soak",
            "s3_secret_access_key": "soak",
        }
        config = Config(**(extra | {"s3_endpoint_url": direct.url, "index_url": redis.url}))
        place = stack.enter_context(closing(open_bulk(config, NullRecorder())))
        yield extra, spoiled_s3, spoiled_redis, _Behind(redis, s3, direct, place)


@dataclass
class _Behind:
    redis: RedisServer
    s3: QuickS3
    direct: SpoilS3
    bulk: PruneStore


def soak(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Start, live, stop; everything that was counted."""
    from objkv.connector.programs.demo_replica import make_model

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objkv-soak-")))
        extra, s3, redis, behind = stack.enter_context(servers(folder))
        model = str(make_model(Path.home() / ".cache" / "objkv-soak", "small"))
        fleet = Fleet(folder, model, prompts(arguments.seed), extra)
        stack.callback(fleet.close)
        with console.status("importing vLLM"):
            fleet.wait_ready()
        truth = fleet.start(disturb=False, connector=False)
        for _ in range(arguments.replicas):
            fleet.start(disturb=arguments.faults)
        with console.status("asking an engine without a connector"):
            _wait_for_truth(fleet, truth)
        watch = _Watch(fleet, arguments)
        targets = Targets(s3, redis, behind.s3, behind.redis, behind.bulk, watch.kill_one)
        watch.faults = Faults(targets, arguments.seed) if arguments.faults else None
        watch.direct = behind.direct
        watch.live(arguments.seconds, console)
        watch.finish(console)
        result = watch.result(arguments.seconds)
        if result["broken"] and arguments.keep is not None:
            _keep(folder, arguments.keep)
        stack.callback(targets.s3_server.close)
        return result


def _wait_for_truth(fleet: Fleet, truth: Engine) -> None:
    end = time.monotonic() + START_S
    while not fleet.expected.exists():
        if truth.ended or time.monotonic() > end:
            raise SystemExit(f"no engine started: {truth.file('log').read_text()[-4000:]}")
        time.sleep(0.2)


def _keep(folder: Path, where: Path) -> None:
    where.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("engine-*"):
        (where / file.name).write_bytes(file.read_bytes())


class _Watch:
    """Looks at the engines while they live, and causes faults."""

    def __init__(self, fleet: Fleet, arguments: argparse.Namespace) -> None:
        self._fleet = fleet
        self._arguments = arguments
        self.faults: Faults | None = None
        self.direct: SpoilS3 | None = None
        self.hangs: list[str] = []
        self.crashes: list[str] = []
        self.refused_starts = 0
        self.events: list[tuple[float, str]] = []
        self.samples: list[dict[str, float]] = []
        self._since = time.monotonic()
        self._sampled_s = 0.0

    def live(self, seconds: float, console: Console) -> None:
        """So long, with a fault now and then, until something hangs."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._since, fault, change_s = time.monotonic(), "", 0.0
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("soak", total=seconds)
            while (now := time.monotonic() - self._since) < seconds and self._goes_on():
                self._look(now)
                if self.faults is not None and now >= change_s:
                    if fault:
                        self.faults.mend()
                        self._follow()
                    fault = "" if fault else self.faults.cause()
                    if fault:
                        self.events.append((now, fault))
                    change_s = time.monotonic() - self._since + (FAULT_S if fault else PAUSE_S)
                counts = self.counts()
                text = (
                    f"{counts['answers']} answers, {counts['wrong answers']} wrong, "
                    f"{counts['cached tokens']} tokens reused · {fault:32}"
                )
                progress.update(bar, completed=now, description=text)
                time.sleep(0.1)
            if self.faults is not None:
                self.faults.mend()
                self._follow()

    def finish(self, console: Console) -> None:
        """Ask all to end, and wait."""
        self._fleet.stop.touch()
        with console.status("engines end"):
            while any(not e.ended for e in self._fleet.engines) and not self.hangs:
                self._look(time.monotonic() - self._since)
                time.sleep(0.2)
        for engine in self._fleet.engines:
            engine.look()

    def kill_one(self) -> bool:
        """End one engine at once, as the machine's loss of power would, and start another."""
        living = [e for e in self._fleet.engines if not e.ended and e.lines]
        if len(living) < 2:
            return False
        engine = living[0]
        engine.killed = True
        engine.signal(signal.SIGKILL)
        self._fleet.start(disturb=True)
        return True

    def counts(self) -> Counter[str]:
        """Of all engines, the killed ones too."""
        return sum(
            (Counter(e.lines[-1]["counts"]) for e in self._fleet.engines if e.lines), Counter()
        )

    def _goes_on(self) -> bool:
        return not self.hangs and any(not engine.ended for engine in self._fleet.engines)

    def _follow(self) -> None:
        """The door to the bucket leads to the server that is there now."""
        assert self.faults is not None
        assert self.direct is not None
        self.direct.target = self.faults.s3_address

    def _look(self, now: float) -> None:
        for engine in self._fleet.engines:
            engine.look()
            if engine.ended:
                if not engine.killed and engine.file("ended").read_text() not in ("", "0"):
                    self._ended(engine)
            elif engine.silent_s > SILENT_S:
                engine.signal(signal.SIGUSR1)
                time.sleep(2.0)
                tail = engine.file("log").read_text(errors="replace")[-6000:]
                self.hangs.append(f"{engine.name} has not reported for {SILENT_S:.0f} s: {tail}")
        if now - self._sampled_s >= 1.0:
            self._sampled_s = now
            living = [e.lines[-1] for e in self._fleet.engines if not e.ended and e.lines]
            self.samples.append(
                {"at_s": now}
                | {
                    name: max((line[name] for line in living), default=0.0)
                    for name in ("rss_mib", "files", "threads", "slab_mib", "leased")
                }
            )

    def _ended(self, engine: Engine) -> None:
        tail = engine.file("log").read_text(errors="replace")[-3000:]
        if not engine.lines and REFUSED_START in tail:  # servers denied it all, which is told
            self.refused_starts += 1
            engine.killed = True
            if not self._fleet.stop.exists():
                self._fleet.start(disturb=True)
            return
        if not any(told.startswith(engine.name) for told in self.crashes):
            self.crashes.append(f"{engine.name} ended unexpectedly: {tail}")

    def result(self, seconds: float) -> dict[str, Any]:
        """What is printed, and what is broken."""
        engines = self._fleet.engines
        counts = self.counts()
        result: dict[str, Any] = {
            "seconds": round(seconds),
            "engines": len(engines),
            "counts": dict(sorted(counts.items())),
            "faults": {} if self.faults is None else dict(sorted(self.faults.counts.items())),
            "answers spoiled": 0 if self.faults is None else self.faults.spoiled,
            "wrong": [text for e in engines for text in (e.lines[-1]["wrong"] if e.lines else ())],
            "hangs": self.hangs,
            "crashes": self.crashes,
            "errors": [
                text for e in engines for text in (e.lines[-1]["errors"] if e.lines else ())
            ],
            "left": {
                e.name: {k: v for k, v in e.lines[-1].get("left", {}).items() if v}
                for e in engines
                if e.lines and not e.killed
            },
            "ended": sum(bool(e.lines and e.lines[-1].get("over")) for e in engines),
            "killed": sum(e.killed for e in engines),
            "refused starts": self.refused_starts,
            "metrics": _metrics(engines),
            "growth": {e.name: _growth(e) for e in engines if e.lines},
            "samples": self.samples,
            "events": self.events,
        }
        result["broken"] = broken(result)
        return result


def _metrics(engines: list[Engine]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for engine in engines:
        for line in engine.lines:
            if "metrics" in line:
                total.update(line["metrics"])
    return dict(sorted(total.items()))


def _growth(engine: Engine) -> dict[str, float]:
    """Of the second half of its life, by a straight line through it."""
    lines = [line for line in engine.lines if not line.get("over")]
    half = lines[len(lines) // 2 :]
    found = {"seconds": round(half[-1]["at_s"] - half[0]["at_s"] if half else 0.0, 1)}
    for name in ("rss_mib", "files", "threads"):
        points = [(line["at_s"], line[name]) for line in lines]
        found[name] = round(second_half_growth(points), 2)
    return found


def broken(result: dict[str, Any]) -> list[str]:
    """What must not be, in words; nothing if the soak has passed."""
    found = [*result["wrong"], *result["hangs"], *result["crashes"]]
    found += [f"logged as an error: {text}" for text in result["errors"]]
    found += [f"{name} leaves {left}" for name, left in result["left"].items() if left]
    for name, growth in result["growth"].items():
        if growth["seconds"] >= GROWTH_S_MIN and growth["rss_mib"] > GROWTH_MIB_MAX:
            found.append(f"{name}: memory grew by {growth['rss_mib']} MiB in its second half")
        if growth["seconds"] >= GROWTH_S_MIN and growth["files"] > 30:
            found.append(f"{name}: {growth['files']} more files are open after its second half")
    if result["ended"] + result["killed"] != result["engines"] and not found:
        found.append("not all engines stopped normally")
    wanted = ["answers", "cached tokens"]
    found += [f"nothing was proven: no {name}" for name in wanted if not result["counts"].get(name)]
    return found


def show(result: dict[str, Any], console: Console) -> None:
    """The table at the end."""
    table = Table("what", "count", title=f"{result['seconds']} s, {result['engines']} engines")
    for name, count in result["counts"].items():
        table.add_row(name, f"{count:,}")
    for name in ("hangs", "crashes", "errors"):
        table.add_row(name, f"{len(result[name])}")
    table.add_section()
    for name, count in result["faults"].items():
        table.add_row(name, f"{count:,}")
    table.add_row("answers of servers spoiled", f"{result['answers spoiled']:,}")
    table.add_section()
    for name, growth in result["growth"].items():
        told = f"{growth['rss_mib']:+.1f} MiB, {growth['files']:+.0f} files"
        table.add_row(f"{name}, growth in its second half", told)
    console.print(table)
    for text in result["broken"]:
        console.print(f"broken: {text}", highlight=False, markup=False)
    console.print("broken" if result["broken"] else "no wrong answer and no leak")
