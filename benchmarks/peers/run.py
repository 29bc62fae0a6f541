"""Compare objkv with its peers in turn: same servers, same bytes, a separate environment for each.

    benchmarks/peers/setup.sh lmcache mooncake nixl      once
    .venv/bin/python benchmarks/peers/run.py [--peer lmcache-resp ...] [--rounds 5] [--markdown]

Measures puts until the servers have everything, verified gets into existing memory, and lookups of
128 chunks by a process that has never seen them. Figures are medians; the ratio is how many times
as fast objkv was in the same round. Writes only temporary files. See docs/performance.md.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.table import Table

from benchmarks.harness import machine
from benchmarks.peers.contest import Contest, Options, Result, Row
from benchmarks.peers.crew import ENTRANTS, Entrant
from objkv.config import Config
from objkv.stores.s3.client import open_s3_access
from tests.support.servers.quick_s3 import quick_s3_process
from tests.support.servers.redis import valkey_server

BUCKET = "bench"
VALKEY = ("--maxmemory", "4gb", "--maxmemory-policy", "noeviction", "--io-threads", "1")
COLUMNS = ("what", "who", "median", "rounds", "objkv is times as fast")
SIZES = ((2 << 20, 32), (32 << 20, 4))
SETTINGS = {
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "NIXL_LOG_LEVEL": "WARN",
    "PYTHONHASHSEED": "0",  # LMCache's keys depend on it
}
"""Of every worker; nothing here that makes anybody faster or slower."""


@contextmanager
def servers() -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """One Valkey and one S3 server in memory, and what empties both."""
    with tempfile.TemporaryDirectory(prefix="objkv-peers-") as name:
        folder = Path(name)
        with valkey_server(folder / "valkey", args=VALKEY) as redis, quick_s3_process() as s3:
            config = Config(
                s3_endpoint_url=s3.url,
                s3_region="us-east-1",
                s3_addressing="path",
                s3_access_key_id=BUCKET,
                s3_secret_access_key=BUCKET,
            )
            client = open_s3_access(config).client
            client.create_bucket(Bucket=BUCKET)
            commands = redis.client()

            def clear() -> None:
                commands.flushall()
                while found := client.list_objects_v2(Bucket=BUCKET).get("Contents"):
                    for item in found:
                        client.delete_object(Bucket=BUCKET, Key=item["Key"])

            place = {
                "redis_port": redis.port,
                "s3_port": urlsplit(s3.url).port,
                "bucket": BUCKET,
                "folder": name,
            }
            yield place, clear
            commands.close()
            client.close()


def chosen(names: list[str]) -> list[Entrant]:
    """These entrants, and those of objkv's that they are compared with; all by default."""
    wanted = set(names) or {entrant.name for entrant in ENTRANTS}
    wanted |= {e.rival for e in ENTRANTS if e.name in wanted and e.rival}
    return [entrant for entrant in ENTRANTS if entrant.name in wanted]


def show(result: Result, console: Console, title: str) -> None:
    """The table."""
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    for cells in _cells(result):
        table.add_row(*cells)
    console.print(table)
    console.print(*_remarks(result), sep="\n", highlight=False, markup=False)


def markdown(result: Result, title: str) -> str:
    """The table in Markdown."""
    lines = [title, "", f"| {' | '.join(COLUMNS)} |", "| --- | --- | ---: | ---: | ---: |"]
    lines += [f"| {' | '.join(cells)} |" for cells in _cells(result)]
    return "\n".join(lines + [f"\n{remark}" for remark in _remarks(result)])


def _remarks(result: Result) -> list[str]:
    out = [f"{name}: {reason}" for name, reason in result.out.items()]
    return out + [f"failed: {text}" for text in result.failures]


def _cells(result: Result) -> list[tuple[str, ...]]:
    order = {entrant.name: place for place, entrant in enumerate(ENTRANTS)}
    seen = list(dict.fromkeys(row.what for row in result.rows))

    def place(row: Row) -> tuple[int, int]:
        return seen.index(row.what), order.get(row.entrant, 0)

    cells: list[tuple[str, ...]] = []
    for row in sorted(result.rows, key=place):
        median, ratio = row.median(), result.ratio(row)
        shown = (
            "-" if median is None else f"{median:.0f} MB/s" if row.nbytes else f"{median:.2f} ms"
        )
        rounds = f"{len(row.good())}/{len(row.seconds)}"
        cells.append((row.what, row.entrant, shown, rounds, f"{ratio:.2f}" if ratio else ""))
    return cells


def main() -> int:
    """Run and print; exit code 1 if an entrant that was set up did not finish."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [entrant.name for entrant in ENTRANTS if entrant.rival]
    parser.add_argument("--peer", action="append", default=[], choices=names)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8, help="threads of each client")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="timeout of one request")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    arguments = parser.parse_args()
    options = Options(
        sizes=SIZES,
        rounds=arguments.rounds,
        threads=arguments.threads,
        timeout_s=arguments.timeout_s,
        environment=SETTINGS,
    )
    progress = Console(stderr=True)
    with servers() as (place, clear), progress.status("starting") as status:
        contest = Contest(place, options, clear=clear, progress=status.update)
        result = contest.run(chosen(arguments.peer))
    title = f"{machine()}; {options.threads} threads, medians of {options.rounds} rounds in turn"
    if arguments.markdown:
        print(markdown(result, title))
    else:
        show(result, Console(), title)
    tried = [name for name, reason in result.out.items() if not reason.startswith("not set up")]
    return 1 if tried else 0


if __name__ == "__main__":
    sys.exit(main())
