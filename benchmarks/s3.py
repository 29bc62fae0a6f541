"""Compare payloads between an S3 server in memory and a slab with plain sockets on the same route.

objkv verifies every byte while it arrives; the limit does not.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks.alone import run_alone
from objkv.config import Config
from objkv.ops.bench.harness import BenchRow, BenchSetting, Section, Target
from objkv.ops.bench.servers import local_config
from objkv.ops.bench.store import (
    CONNECTIONS,
    Limit,
    Move,
    PayloadBench,
    connections,
    large_payloads,
)
from tests.support.servers.plain_limit import PlainClient
from tests.support.servers.quick_s3 import QuickS3Process, quick_s3_process

S3_GET = Target(0.85)
S3_PUT = Target(0.80)


def bench_s3(setting: BenchSetting) -> Section:
    """Gets and puts. Raises ``ObjkvError`` if anything was not as it was put."""
    with quick_s3_process() as server:
        return Section("s3", tuple(_rows(setting, server)), {"S3": "quick_s3, in memory"})


def s3_config(endpoint_url: str, **changes: str) -> Config:
    """Settings for a bucket behind ``endpoint_url``; ``changes`` are values of other settings."""
    settings = {
        "bulk_url": "s3://bench/kv",
        "s3_endpoint_url": endpoint_url,
        "s3_region": "us-east-1",
        "s3_addressing": "path",
        "s3_access_key_id": "bench",
        "s3_secret_access_key": "bench",
    }
    return local_config(**settings | changes)


def _rows(setting: BenchSetting, server: QuickS3Process) -> Iterator[BenchRow]:
    # One request per payload: the limit has as many connections as there are threads, and no more.
    config = s3_config(server.url, s3_ranges_max="0", s3_hedge_percent_max="0")
    store = setting.factories.open_bulk(config)
    try:
        for shape in large_payloads(setting):
            for threads in CONNECTIONS:
                case = f"{shape.name}, {connections(threads)}"
                with (
                    plain_clients(server.plain, threads) as clients,
                    PayloadBench(setting, shape, threads) as bench,
                ):
                    setting.tell("S3", f"GET {case}")
                    gets = Limit("plain recv_into", bench.gets(_plain_gets(clients)))
                    yield bench.compare_gets(f"S3 GET {case}", store, gets, S3_GET)
                    setting.tell("S3", f"PUT {case}")
                    puts = Limit("plain sendall", bench.each(_plain_puts(clients)))
                    yield bench.compare_puts(f"S3 PUT {case}", store, puts, S3_PUT)
    finally:
        store.close()


@contextmanager
def plain_clients(address: tuple[str, int], count: int) -> Iterator[list[PlainClient]]:
    """As many connections to a ``PlainServer``."""
    with ExitStack() as stack:
        yield [stack.enter_context(PlainClient(address)) for _ in range(count)]


def _plain_gets(clients: Sequence[PlainClient]) -> Move:
    return lambda number, _, slab: clients[number].get_into(slab)


def _plain_puts(clients: Sequence[PlainClient]) -> Move:
    return lambda number, sample, _: clients[number].put(sample.payload)


if __name__ == "__main__":
    run_alone(bench_s3)
