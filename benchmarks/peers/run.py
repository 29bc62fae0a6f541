"""Compare objkv with its peers in turn: same servers, same bytes, a separate environment for each.

    benchmarks/peers/setup.sh lmcache mooncake nixl      once
    .venv/bin/python benchmarks/peers/run.py [--peer lmcache-resp ...] [--rounds 5]

Measures puts until the servers have everything, verified gets into existing memory, and lookups of
128 chunks by a process that has never seen them. Figures are medians; the ratio is how many times
as fast objkv was in the same round. Prints Markdown. Writes only temporary files. See
docs/performance.md.
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

from benchmarks.harness import QUICK_S3, machine
from benchmarks.peers.contest import ENTRANTS, Contest, Entrant, Result
from objkv.config import load_config
from objkv.stores.s3.client import open_s3_access
from tests.support.servers.quick_s3 import quick_s3_process
from tests.support.servers.redis import valkey_server

BUCKET = "bench"
VALKEY = ("--maxmemory", "4gb", "--maxmemory-policy", "noeviction", "--io-threads", "1")
SIZES = ((2 << 20, 32), (32 << 20, 4))
SETTINGS = {
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "NIXL_LOG_LEVEL": "WARN",
    "PYTHONHASHSEED": "0",  # LMCache's keys depend on it
}
"""Of every worker; nothing here that makes any of them faster or slower."""


@contextmanager
def servers() -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """One Valkey and one S3 server in memory, and what empties both."""
    with tempfile.TemporaryDirectory(prefix="objkv-peers-") as name:
        folder = Path(name)
        with valkey_server(folder / "valkey", args=VALKEY) as redis, quick_s3_process() as s3:
            config = load_config({"s3_endpoint_url": s3.url, **QUICK_S3}, environ={})
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


def markdown(result: Result, title: str) -> Iterator[str]:
    """The table, a line each, and why entrants are not in it."""
    yield from (title, "", "| what | who | median | rounds | objkv is times as fast |")
    yield "| --- | --- | ---: | ---: | ---: |"
    what = {row.what: place for place, row in enumerate(result.rows)}
    for row in sorted(result.rows, key=lambda row: what[row.what]):
        ratio = result.ratio(row)
        shown = f"{ratio:.2f}" if ratio else ""
        yield f"| {row.what} | {row.entrant} | {row.median()} | {len(row.seconds)} | {shown} |"
    for name, reason in result.out.items():
        yield f"\n{name}: {reason}"


def main() -> int:
    """Run and print; exit code 1 if an entrant that was set up did not finish."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [entrant.name for entrant in ENTRANTS if entrant.rival]
    parser.add_argument("--peer", action="append", default=[], choices=names)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8, help="threads of each client")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="timeout of one request")
    given = parser.parse_args()
    title = f"{machine()}; {given.threads} threads, medians of {given.rounds} rounds in turn"
    with servers() as (place, clear):
        rest = given.rounds, given.threads, given.timeout_s, SETTINGS
        result = Contest(place, clear, SIZES, *rest).run(chosen(given.peer))
    print(*markdown(result, title), sep="\n")
    return int(any(not reason.startswith("not set up") for reason in result.out.values()))


if __name__ == "__main__":
    sys.exit(main())
