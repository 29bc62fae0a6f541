"""Measure a simulated remote bucket: 25 ms, 10 Gbit/s, and 85 MB/s per connection.

The limit uses plain sockets, one per thread, through the same kind of proxy.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from benchmarks.alone import run_alone
from benchmarks.s3 import plain_clients, s3_config
from objkv.ops.bench.harness import (
    SCALES,
    BenchRow,
    BenchSetting,
    Compared,
    Section,
    Threads,
    Timings,
    interleave,
    make_slab,
    percentile,
)
from objkv.ops.bench.sample import (
    PAYLOAD_1_MIB,
    PAYLOAD_32_MIB,
    PAYLOAD_256_KIB,
    PayloadSample,
    Shape,
    Verifier,
    get_verified,
    make_samples,
)
from objkv.ops.bench.store import connections
from objkv.stores.base import PruneStore
from tests.support.servers.plain_limit import PlainClient
from tests.support.servers.process import running_server
from tests.support.servers.quick_s3 import quick_s3_process

DISTANCE: Mapping[str, float] = {"ttfb-ms": 25, "connection-mb-s": 85, "gbit-s": 10}
JITTERY: Mapping[str, float] = {**DISTANCE, "slow-share": 0.03, "slow-ms": 300}
CONNECTIONS = (1, 4, 16, 64)
_QUICK_CONNECTIONS = (1, 4)
_THROUGHPUT = Shape("4 MiB", layers=32, layer_bytes=128 << 10)
_HEDGED_CALLS = 300
_QUICK_CALLS = 10
_ONE_REQUEST = {"s3_ranges_max": "0", "s3_hedge_percent_max": "0"}
_PLAIN = "plain recv_into, as far away"


def bench_far(setting: BenchSetting) -> Section:
    """Throughput as connections grow, when the first layer arrives, and what hedging does."""
    rows: list[BenchRow] = []
    with quick_s3_process() as server:
        with (
            _far(server.url, DISTANCE) as url,
            _far(f"tcp://{server.plain[0]}:{server.plain[1]}", DISTANCE) as plain,
        ):
            rows += _throughput(setting, url, plain)
            rows += _layers(setting, url, plain)
        with _far(server.url, JITTERY) as url:
            rows += _hedging(setting, url)
    note = "25 ms to the first byte, 85 MB/s per connection, 10 Gbit/s in all, simulated"
    return Section("far", tuple(rows), {"S3": "quick_s3 behind far"}, (note,))


def _throughput(setting: BenchSetting, url: str, plain: str) -> Iterator[BenchRow]:
    store = setting.factories.open_bulk(s3_config(url, bulk_calls_max="64", **_ONE_REQUEST))
    counts = _QUICK_CONNECTIONS if setting.quick else CONNECTIONS
    shape = PAYLOAD_1_MIB if setting.quick else _THROUGHPUT
    samples = make_samples(shape, max(counts))
    try:
        _store_all(store, samples)
        slabs = [make_slab(len(sample.payload)) for sample in samples]
        for count in counts:
            setting.tell("far bucket", connections(count))
            with Threads(count) as crew, plain_clients(_address(plain), count) as clients:

                def ours(crew: Threads = crew) -> float:
                    return crew.run(lambda i: get_verified(store, samples[i], slabs[i]))

                def limit(crew: Threads = crew, clients: Sequence[PlainClient] = clients) -> float:
                    return crew.run(lambda i: clients[i].get_into(slabs[i]))

                timings = interleave({"ours": ours, "limit": limit}, setting.rounds)
            nbytes = sum(len(sample.payload) for sample in samples[:count])
            name = f"far GET {shape.name}, {connections(count)}"
            yield Compared(timings, "ours", "limit", _PLAIN).throughput(name, nbytes)
    finally:
        store.close()


def _layers(setting: BenchSetting, url: str, plain: str) -> Iterator[BenchRow]:
    """One payload in ranges, as replicas get it: all of it, and its first layer."""
    shape = PAYLOAD_1_MIB if setting.quick else PAYLOAD_32_MIB
    setting.tell("far bucket", f"the first layer of {shape.name}")
    (sample,) = make_samples(shape, 1)
    slab = make_slab(len(sample.payload))
    store = setting.factories.open_bulk(s3_config(url))
    first: list[float] = []
    try:
        _store_all(store, [sample])
        with plain_clients(_address(plain), 1) as clients:

            def whole() -> float:
                verifier = Verifier(sample, slab)
                layers: list[float] = []

                def arrived(nbytes: int) -> None:
                    verifier.arrived(nbytes)
                    if verifier.frames and not layers:
                        layers.append(time.perf_counter() - started)

                started = time.perf_counter()
                verifier.finish(store.get_into(sample.key, slab, arrived))
                seconds = time.perf_counter() - started
                first.append(layers[0] if layers else seconds)
                return seconds

            def limit() -> float:
                started = time.perf_counter()
                clients[0].get_into(slab)
                return time.perf_counter() - started

            timings = interleave({"whole": whole, "limit": limit}, setting.rounds)
    finally:
        store.close()
    compared = Compared(timings, "whole", "limit", "plain recv_into, 1 connection")
    yield compared.duration(f"far GET {shape.name}, in ranges", "ms")
    both = Timings({"layer": first[-setting.rounds :], "whole": timings.seconds["whole"]})
    compared = Compared(both, "layer", "whole", "the whole payload")
    yield compared.duration(f"far GET {shape.name}, layer 0 verified", "ms")


def _hedging(setting: BenchSetting, url: str) -> Iterator[BenchRow]:
    setting.tell("far bucket", "hedging, 3 % of answers 300 ms late")
    (sample,) = make_samples(PAYLOAD_256_KIB, 1)
    slab = make_slab(len(sample.payload))
    calls = _QUICK_CALLS if setting.quick else _HEDGED_CALLS
    stores = {
        "on": setting.factories.open_bulk(s3_config(url)),
        "off": setting.factories.open_bulk(s3_config(url, **_ONE_REQUEST)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in stores}
    try:
        _store_all(stores["off"], [sample])
        for number in range(2 * calls):
            for name, store in stores.items():
                started = time.perf_counter()
                get_verified(store, sample, slab)
                if number >= calls:  # the first half teaches what is slow
                    seconds[name].append(time.perf_counter() - started)
    finally:
        for store in stores.values():
            store.close()
    for share in (0.5, 0.99):
        on, off = (percentile(seconds[name], share) for name in ("on", "off"))
        yield BenchRow(
            f"far GET {PAYLOAD_256_KIB.name}, hedged, p{share * 100:.0f}",
            "ms",
            on * SCALES["ms"],
            limit=off * SCALES["ms"],
            limit_name="without hedging",
            ratio=on / off,
            detail=f"{calls} gets, 3 % of answers 300 ms late",
        )


@contextmanager
def _far(target: str, distance: Mapping[str, float]) -> Iterator[str]:
    """A proxy to ``target``, in a process of its own; its URL."""
    options = [word for key, value in distance.items() for word in (f"--{key}", str(value))]
    with running_server("far", urlsplit(target).netloc, *options) as (_, url):
        yield url


def _address(url: str) -> tuple[str, int]:
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    return place.hostname, place.port


def _store_all(store: PruneStore, samples: Sequence[PayloadSample]) -> None:
    for sample in samples:
        store.put(sample.key, sample.payload)


if __name__ == "__main__":
    run_alone(bench_far)
