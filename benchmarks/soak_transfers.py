"""The soak of replicas without an engine over real servers that fail: ``soak.py --engine none``.

Requests look up, load, compute and save, and are aborted or preempted. Replicas close while they
are busy. Stores refuse, hang and return wrong bytes, Redis is killed and returns empty, and stored
bytes change. Every loaded block is compared with the model's. The soak fails on a wrong block, or
if slabs, threads, files or memory leak.
"""

import argparse
import faulthandler
import gc
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.soak_faults import Faults, Targets
from benchmarks.soak_life import BLOCKS_OF_REPLICA, STUCK_S, Life
from benchmarks.soak_prompts import HOT_SAVE_BYTES_MAX, Documents
from benchmarks.soak_replica import Replica
from benchmarks.soak_shared import LoggedErrors, second_half_growth
from objkv.assembly.backends import open_bulk
from objkv.config import CodecName, Config
from objkv.stores.s3.client import open_s3_client
from objkv.telemetry import NullRecorder
from tests.support.servers.ceph import ceph_missing, ceph_radosgw
from tests.support.servers.redis import RedisServer, valkey_server

CODECS: tuple[CodecName, ...] = ("auto", "none", "blosc", "zstd", "lz4")
FAULT_S, PAUSE_S = 0.5, 0.3
GROWTH_MIB_MAX, GROWTH_S_MIN = 32.0, 60.0
"""Of resident memory within the second half, by a straight line through it; a second half that is
shorter than this says nothing: caches still fill, and so do the allocator's arenas."""
BUCKET = "soak"
THREAD_PREFIX = "objkv-"
END_S = 15.0
"""For threads and files to go once everything is closed."""


@dataclass
class Watch:
    """What is looked at from outside while the replicas live."""

    rss: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, MiB), once a second."""
    errors: LoggedErrors = field(default_factory=LoggedErrors)

    def sample(self, at_s: float) -> None:
        """Note how much memory is resident."""
        if not self.rss or at_s - self.rss[-1][0] >= 1.0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.rss.append((at_s, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))


@contextmanager
def servers(*, s3: bool) -> Iterator[tuple[RedisServer, dict[str, Any]]]:
    """A Valkey, and the settings of a bulk store that is a folder, or a bucket of Ceph."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objkv-soak-")))
        args = ("--maxmemory", "128mb", "--maxmemory-policy", "allkeys-lru")
        redis = stack.enter_context(valkey_server(folder / "valkey", args=args))
        if not s3:
            yield redis, {"bulk_url": f"file://{folder / 'bulk'}"}
            return
        if missing := ceph_missing():
            raise SystemExit(missing)
        ceph = stack.enter_context(ceph_radosgw(folder / "ceph"))
        bulk: dict[str, Any] = {
            "bulk_url": f"s3://{BUCKET}/soak",
            "s3_endpoint_url": ceph.endpoint_url,
            "s3_addressing": "path",
            "s3_access_key_id": ceph.access_key,
            "s3_secret_access_key": ceph.secret_key,
        }
        client = open_s3_client(Config(**bulk))
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield redis, bulk


def settings(redis: RedisServer, bulk: dict[str, Any], number: int) -> Config:
    """Of replica ``number``: short times everywhere, so that each is reached."""
    return Config(
        **bulk,
        index_url=redis.url,
        codec=CODECS[number % len(CODECS)],
        hot_save_bytes_max=HOT_SAVE_BYTES_MAX,
        hot_promote_loads=2,
        ttl_s=60,
        lease_ms=2_000,
        lookup_deadline_ms=500,
        load_deadline_ms=3_000,
        save_deadline_ms=5_000,
        breaker_failures=5,
        breaker_reset_ms=300,
    )


def soak(arguments: argparse.Namespace, console: Console, watch: Watch) -> dict[str, Any]:
    """Open, live, close; everything that was counted, and what is left."""
    with servers(s3=arguments.s3) as (redis, bulk):
        configs = [settings(redis, bulk, i) for i in range(arguments.replicas)]
        with closing(open_bulk(configs[0], NullRecorder())) as place:
            place.check()
            files = descriptors()
            documents = Documents(arguments.seed)
            lives = [
                Life(f"replica-{i}", partial(Replica, f"{i}", config, BLOCKS_OF_REPLICA), documents)
                for i, config in enumerate(configs)
            ]
            faults = Faults(Targets(lives, documents, redis, place), arguments.seed)
            stuck = live(arguments.seconds, console, watch, lives, faults)
            stuck += [life.name for life in lives if not life.end(4 * STUCK_S)]
            if stuck:
                faulthandler.dump_traceback(all_threads=True)
            threads, more_files = settled(files)
    return {
        "seconds": round(watch.rss[-1][0]),
        "counts": dict(sorted(sum((life.counts for life in lives), Counter()).items())),
        "faults": dict(faults.counts),
        "wrong": [text for life in lives for text in life.wrong],
        "stuck": stuck,
        "threads_left": threads,
        "files_left": more_files,
        "logged_errors": watch.errors.found,
        "rss_mib": round(watch.rss[-1][1], 1),
        "rss_growth_mib": round(second_half_growth(watch.rss), 1),
    }


def live(
    seconds: float, console: Console, watch: Watch, lives: list[Life], faults: Faults
) -> list[str]:
    """Watch for so long, and cause faults; the names of those who do not move any more."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    started, fault, change_s = time.monotonic(), "", 0.0
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("soak", total=seconds)
        while (now := time.monotonic() - started) < seconds:
            watch.sample(now)
            for life in lives:
                life.replica.bulk.calls.clear()
                life.replica.hot.calls.clear()
            if now >= change_s:
                if fault:
                    faults.mend()
                fault = "" if fault else faults.cause()
                change_s = now + (FAULT_S if fault else PAUSE_S)
            counts = sum((life.counts for life in lives), Counter())
            text = (
                f"{counts['chunks_loaded']} chunks loaded, {counts['chunks_computed']} computed, "
                f"{counts['aborts']} aborts, {counts['wrong']} wrong · {fault:22}"
            )
            progress.update(bar, completed=now, description=text)
            stuck = [x.name for x in lives if time.monotonic() - x.stepped_s > STUCK_S]
            if stuck:
                return stuck
            time.sleep(0.05)
        faults.mend()
    return []


def settled(files: int) -> tuple[list[str], int]:
    """The product's threads, and files beyond ``files``, that are open a while after the end."""
    end = time.monotonic() + END_S
    while True:
        gc.collect()
        threads = sorted(t.name for t in threading.enumerate() if t.name.startswith(THREAD_PREFIX))
        more = max(0, descriptors() - files)
        if not (threads or more) or time.monotonic() > end:
            return threads, more
        time.sleep(0.05)


def descriptors() -> int:
    """Files and sockets that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def broken(result: dict[str, Any]) -> list[str]:
    """What must not be, in words; nothing if the soak has passed."""
    counts, found = result["counts"], list(result["wrong"])
    found += [f"no step any more: {name}" for name in result["stuck"]]
    found += [f"logged as an error: {text}" for text in result["logged_errors"]]
    if result["threads_left"]:
        found.append(f"threads left after close: {', '.join(result['threads_left'])}")
    if result["files_left"]:
        found.append(f"files left open after close: {result['files_left']}")
    if result["seconds"] >= 2 * GROWTH_S_MIN and result["rss_growth_mib"] > GROWTH_MIB_MAX:
        found.append(f"memory grew by {result['rss_growth_mib']} MiB in the second half")
    found += [
        f"nothing was proven: no {name}"
        for name in ("chunks_loaded", "chunks_computed", "finished", "aborts")
        if not counts.get(name)
    ]
    return found


def show(result: dict[str, Any], console: Console) -> None:
    """The table at the end."""
    table = Table("what", "count", title=f"{result['seconds']} s")
    for group in ("counts", "faults"):
        for name, count in result[group].items():
            if "seconds" in name or "Store" in name:  # of interest to --json alone
                continue
            table.add_row(name.replace("_", " "), f"{count:,}")
        table.add_section()
    table.add_row("resident MiB at the end", f"{result['rss_mib']:.0f}")
    table.add_row("growth in the second half, MiB", f"{result['rss_growth_mib']:+.1f}")
    console.print(table)
    for text in result["broken"]:
        console.print(f"[red]broken[/red] {text}", highlight=False)
    console.print("broken" if result["broken"] else "no wrong block and no leak")


def run(arguments: argparse.Namespace) -> int:
    """Run the soak, print the result and return the exit code."""
    console, watch = Console(stderr=arguments.json), Watch()
    logger = logging.getLogger("objkv")  # warnings of the faults that are wanted are no news
    logger.addHandler(watch.errors)
    logger.propagate = False
    result = soak(arguments, console, watch)
    result["broken"] = broken(result)
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result, console)
    sys.stdout.flush()
    if result["stuck"]:
        os._exit(1)  # what is stuck may hold up an orderly end for ever
    return 1 if result["broken"] else 0
