"""``bench store --configured``: the user's own stores, as they are, against a round trip to them.

What is written lies below ``bench/`` and in a namespace of its own, and is deleted at the end.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from objkv.config import Config, without_password
from objkv.index.base import WriteIndex
from objkv.ops.bench.harness import SCALES, Crew, Row, Section, Setting, make_slab, percentile
from objkv.ops.bench.records import FIELD, RECORD, chunk_hashes, publish
from objkv.ops.bench.sample import (
    FOLDER,
    PAYLOAD_8_MIB,
    PAYLOAD_256_KIB,
    Sample,
    Shape,
    Verifier,
    make_samples,
)
from objkv.stores.base import PruneStore

CONNECTIONS = (1, 4, 16)
PERCENTILES = (0.50, 0.95, 0.99)
_CALLS = 100
_QUICK_CALLS = 5
_CHUNKS = 128


def bench_configured(setting: Setting, config: Config) -> Section:
    """All ends of ``config``. Raises ``StoreError`` if one is unreachable."""
    bulk = setting.factories.open_bulk(config)
    try:
        bulk.check()
        rows = [*_store(setting, bulk, "bulk", _bulk_shape(setting))]
    finally:
        bulk.close()
    index = setting.factories.open_index(config)
    try:
        index.check()
        rows += _index(setting, index)
    finally:
        index.close()
    if (hot := setting.factories.open_hot(config)) is not None:
        try:
            hot.check()
            rows += _store(setting, hot, "hot", PAYLOAD_256_KIB)
        finally:
            hot.close()
    places = {
        "bulk": without_password(config.bulk_url),
        "index": without_password(config.index_url),
    }
    return Section("store", tuple(rows), places, ("the stores of the settings, as they are",))


def _store(setting: Setting, store: PruneStore, name: str, shape: Shape) -> Iterator[Row]:
    most = 4 if setting.quick else max(CONNECTIONS)
    samples = make_samples(shape, most, f"{FOLDER}/{secrets.token_hex(8)}")
    calls = _QUICK_CALLS if setting.quick else _CALLS
    with _removed(store, samples):
        setting.tell(name, f"put and get {shape.name}")
        slab = make_slab(len(samples[0].payload))
        puts, gets, heads = _life(store, samples, slab, calls)
        head = f"{name} head"
        for verb, seconds in (("put", puts), ("get", gets)):
            for share in PERCENTILES:
                yield _latency(f"{name} {verb} {shape.name}", seconds, heads, share, head)
        for threads in CONNECTIONS:
            if threads <= most:
                setting.tell(name, f"get {shape.name}, {threads} at once")
                yield _throughput(setting, store, f"{name} get {shape.name}", samples[:threads])


def _life(
    store: PruneStore, samples: Sequence[Sample], slab: memoryview, calls: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each put, get and head, one after the other; all samples are there at the end."""
    puts, gets, heads = [], [], []
    for sample in samples[1:]:
        store.put(sample.key, sample.payload)
    first = samples[0]
    for _ in range(calls):
        store.delete(first.key)
        puts.append(_seconds(lambda: store.put_if_absent(first.key, first.payload)))
        gets.append(_seconds(lambda: _get(store, first, slab)))
        heads.append(_seconds(lambda: store.head(first.key)))
    return puts, gets, heads


def _get(store: PruneStore, sample: Sample, slab: memoryview) -> None:
    verifier = Verifier(sample, slab)
    verifier.finish(store.get_into(sample.key, slab, verifier.arrived))


def _throughput(setting: Setting, store: PruneStore, name: str, samples: Sequence[Sample]) -> Row:
    slabs = [make_slab(len(sample.payload)) for sample in samples]
    repeats = 1 if setting.quick else 4
    nbytes = repeats * sum(len(sample.payload) for sample in samples)

    def thread(number: int) -> None:
        for _ in range(repeats):
            _get(store, samples[number], slabs[number])

    with Crew(len(samples)) as crew:
        crew.run(thread)
        seconds = [crew.run(thread) for _ in range(setting.rounds)]
    median = percentile(seconds, 0.5)
    return Row(f"{name}, {len(samples)} at once", "MB/s", nbytes / median / 1e6, detail="verified")


def _index(setting: Setting, index: WriteIndex) -> Iterator[Row]:
    namespace = secrets.token_hex(16)
    hashes = chunk_hashes(_CHUNKS)
    calls = _QUICK_CALLS if setting.quick else _CALLS
    setting.tell("index", f"looking up {_CHUNKS} chunks")
    try:
        publish(index, hashes, ttl_s=600, namespace=namespace)
        finds, checks = [], []
        for _ in range(calls):
            finds.append(_seconds(lambda: index.find(namespace, hashes, (FIELD,))))
            checks.append(_seconds(index.check))
    finally:
        for prefix_hash in hashes:
            index.forget(namespace, prefix_hash, FIELD, RECORD)
    for share in PERCENTILES:
        yield _latency(f"lookup of {_CHUNKS} chunks", finds, checks, share, "one round trip")


def _latency(
    name: str, ours: Sequence[float], limit: Sequence[float], share: float, limit_name: str
) -> Row:
    scale = SCALES["ms"]
    one, other = percentile(ours, share), percentile(limit, share)
    return Row(
        f"{name}, p{share * 100:.0f}",
        "ms",
        one * scale,
        limit=other * scale,
        limit_name=limit_name,
        ratio=one / other,
    )


@contextmanager
def _removed(store: PruneStore, samples: Sequence[Sample]) -> Iterator[None]:
    """Nothing of ``samples`` is left after the block, however it ends."""
    try:
        yield
    finally:
        for sample in samples:
            store.delete(sample.key)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _bulk_shape(setting: Setting) -> Shape:
    return PAYLOAD_256_KIB if setting.quick else PAYLOAD_8_MIB
