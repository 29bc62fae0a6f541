"""``bench store --far``: a bucket 25 ms and 10 Gbit/s away, 85 MB/s per connection, simulated.

The limit is plain sockets through the same kind of proxy, one per thread.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

from objkv.ops.bench.harness import (
    SCALES,
    Compared,
    Crew,
    Row,
    Section,
    Setting,
    Timings,
    interleave,
    make_slab,
    percentile,
)
from objkv.ops.bench.sample import (
    PAYLOAD_1_MIB,
    PAYLOAD_32_MIB,
    PAYLOAD_256_KIB,
    Sample,
    Shape,
    Verifier,
    make_samples,
)
from objkv.ops.bench.servers import s3_config
from objkv.ops.programs import Program
from objkv.stores.base import PruneStore
from tests.support.servers.plain_limit import PlainClient
from tests.support.servers.quick_s3 import quick_s3_process

DISTANCE: Mapping[str, float] = {"ttfb-ms": 25, "connection-mb-s": 85, "gbit-s": 10}
JITTERY: Mapping[str, float] = {**DISTANCE, "slow-share": 0.03, "slow-ms": 300}
CONNECTIONS = (1, 4, 16, 64)
_QUICK_CONNECTIONS = (1, 4)
_THROUGHPUT = Shape("4 MiB", layers=32, layer_bytes=128 << 10)
_HEDGED_CALLS = 300
_QUICK_CALLS = 10
_START_S = 60.0
_ONE_REQUEST = {"s3_ranges_max": "0", "s3_hedge_percent_max": "0"}
_PLAIN = "plain recv_into, as far away"


def bench_far(setting: Setting) -> Section:
    """Throughput as connections grow, when the first layer arrives, and what hedging does."""
    rows: list[Row] = []
    with quick_s3_process() as server:
        with (
            _far(setting, "bucket", server.url, DISTANCE) as url,
            _far(setting, "plain", f"tcp://{server.plain[0]}:{server.plain[1]}", DISTANCE) as plain,
        ):
            rows += _throughput(setting, url, plain)
            rows += _layers(setting, url, plain)
        with _far(setting, "jittery", server.url, JITTERY) as url:
            rows += _hedging(setting, url)
    note = "25 ms to the first byte, 85 MB/s per connection, 10 Gbit/s in all, simulated"
    return Section("far", tuple(rows), {"S3": "objkv.testing quick_s3 behind far"}, (note,))


def _throughput(setting: Setting, url: str, plain: str) -> Iterator[Row]:
    store = setting.factories.open_bulk(s3_config(url, bulk_calls_max="64", **_ONE_REQUEST))
    counts = _QUICK_CONNECTIONS if setting.quick else CONNECTIONS
    shape = PAYLOAD_1_MIB if setting.quick else _THROUGHPUT
    samples = make_samples(shape, max(counts))
    try:
        with _stored(store, samples):
            slabs = [make_slab(len(sample.payload)) for sample in samples]
            for count in counts:
                setting.tell("far bucket", f"{count} connections")
                with Crew(count) as crew, _clients(plain, count) as clients:

                    def ours(crew: Crew = crew) -> float:
                        return crew.run(lambda i: _get(store, samples[i], slabs[i]))

                    def limit(crew: Crew = crew, clients: Sequence[PlainClient] = clients) -> float:
                        return crew.run(lambda i: clients[i].get_into(slabs[i]))

                    timings = interleave({"ours": ours, "limit": limit}, setting.rounds)
                nbytes = sum(len(sample.payload) for sample in samples[:count])
                noun = "connection" if count == 1 else "connections"
                name = f"far GET {shape.name}, {count} {noun}"
                yield Compared(timings, "ours", "limit", _PLAIN).throughput(name, nbytes)
    finally:
        store.close()


def _layers(setting: Setting, url: str, plain: str) -> Iterator[Row]:
    """One payload in ranges, as replicas get it: all of it, and its first layer."""
    shape = PAYLOAD_1_MIB if setting.quick else PAYLOAD_32_MIB
    setting.tell("far bucket", f"the first layer of {shape.name}")
    (sample,) = make_samples(shape, 1)
    slab = make_slab(len(sample.payload))
    store = setting.factories.open_bulk(s3_config(url))
    first: list[float] = []
    try:
        with _stored(store, [sample]), _clients(plain, 1) as clients:

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


def _hedging(setting: Setting, url: str) -> Iterator[Row]:
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
        with _stored(stores["off"], [sample]):
            for number in range(2 * calls):
                for name, store in stores.items():
                    started = time.perf_counter()
                    _get(store, sample, slab)
                    if number >= calls:  # the first half teaches what is slow
                        seconds[name].append(time.perf_counter() - started)
    finally:
        for store in stores.values():
            store.close()
    for share in (0.5, 0.99):
        on, off = (percentile(seconds[name], share) for name in ("on", "off"))
        yield Row(
            f"far GET {PAYLOAD_256_KIB.name}, hedged, p{share * 100:.0f}",
            "ms",
            on * SCALES["ms"],
            limit=off * SCALES["ms"],
            limit_name="without hedging",
            ratio=on / off,
            detail=f"{calls} gets, 3 % of answers 300 ms late",
        )


@contextmanager
def _far(setting: Setting, name: str, target: str, distance: Mapping[str, float]) -> Iterator[str]:
    """A proxy to ``target``, in a process of its own; its URL."""
    place = urlsplit(target).netloc
    options = [word for key, value in distance.items() for word in (f"--{key}", str(value))]
    arguments = ("-m", "tests.support.servers.far", place, *options)
    with Program(f"far {name}", arguments, setting.folder / f"far-{name}.log", {}) as program:
        yield program.answer(bound_s=_START_S).strip()


@contextmanager
def _clients(url: str, count: int) -> Iterator[list[PlainClient]]:
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    with ExitStack() as stack:
        address = (place.hostname, place.port)
        yield [stack.enter_context(PlainClient(address)) for _ in range(count)]


@contextmanager
def _stored(store: PruneStore, samples: Sequence[Sample]) -> Iterator[None]:
    for sample in samples:
        store.put(sample.key, sample.payload)
    yield


def _get(store: PruneStore, sample: Sample, slab: memoryview) -> None:
    verifier = Verifier(sample, slab)
    verifier.finish(store.get_into(sample.key, slab, verifier.arrived))
