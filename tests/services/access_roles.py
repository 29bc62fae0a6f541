"""The use of its stores by a process of each role, through objkv's own code; a refusal is an
error."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from objkv.assembly.backends import Backends, check_backends, describe_index, open_backends
from objkv.assembly.redis import connect_redis
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.cache.switch import SWITCH_PATH
from objkv.codec.payload import Claim, read_header
from objkv.config import Config, Role
from objkv.index.base import ChunkEntry, Usage
from objkv.index.redis.find import Finder
from objkv.keys.identity import identity_path
from objkv.telemetry import MemoryRecorder
from tests.codec.payloads import CLAIM, sample
from tests.contracts.index_contract import LONG_S

PAYLOAD = bytes(sample("none"))
HEADER = read_header(PAYLOAD)
KEY = CLAIM.key
NAMESPACE, HASH, FIELD = KEY.namespace, KEY.prefix_hash, KEY.field
DOCUMENT = b"{}"
SMALL_BYTES = 1 << 20


def open_cache(ends: Backends, recorder: MemoryRecorder, name: str) -> ChunkCache:
    settings = CacheSettings(name, LONG_S, 60_000, SMALL_BYTES)
    return ChunkCache(ends.bulk, ends.hot, ends.index, settings, recorder)


def claim_of(number: int) -> Claim:
    """Chunks that differ in their hash alone."""
    return replace(CLAIM, key=replace(KEY, prefix_hash=number.to_bytes(20, "big")))


def no_errors(recorder: MemoryRecorder) -> None:
    """Counted, and forgotten: nothing that a role does may be that."""
    counted = recorder.drain()
    assert {n: v for n, v in counted.items() if "error" in n or "denied" in n} == {}


def save(ends: Backends, recorder: MemoryRecorder, name: str) -> bool:
    ends.bulk.put_if_absent(identity_path(NAMESPACE), DOCUMENT)
    cache = open_cache(ends, recorder, name)
    assert cache.in_flight.begin(KEY.path())
    assert cache.take_lease(KEY.path())
    try:
        return cache.save(KEY.path(), PAYLOAD, HEADER)
    finally:
        cache.release_lease(KEY.path())
        cache.in_flight.end(KEY.path())


def load(ends: Backends, recorder: MemoryRecorder) -> bool:
    """As a replica finds and loads a chunk; whether it was a hit."""
    found = ends.index.find(NAMESPACE, [HASH], [FIELD])[0]
    if found is None or FIELD not in found:
        return False
    cache, buffer = open_cache(ends, recorder, "loader"), memoryview(bytearray(len(PAYLOAD)))
    ways = [partial(cache.get_into, KEY)]
    if found[FIELD].hot and ends.hot is not None:
        ways.append(partial(cache.hot.get_into, KEY.path()))
    for get_into in ways:
        assert get_into(buffer, None, None) == len(PAYLOAD)
        assert buffer == PAYLOAD
        part = buffer[:100]
        assert get_into(part, None, 50) == 100
        assert part == PAYLOAD[50:150]
    ends.index.touch(NAMESPACE, [HASH], ttl_s=LONG_S)
    return True


def read(config: Config) -> None:
    recorder = MemoryRecorder()
    with open_backends(config, recorder) as ends:
        check_backends(ends, config)
        if config.index_url.startswith("redis"):
            assert load(ends, recorder)
        else:
            assert ends.bulk.get(KEY.path()) == PAYLOAD
        cache, buffer = open_cache(ends, recorder, "reader"), memoryview(bytearray(10))
        missing = claim_of(404).key
        for start in (None, 0):
            assert cache.hot.get_into(missing.path(), buffer, None, start) is None
            assert cache.get_into(missing, buffer, start=start) is None
        assert ends.bulk.get(missing.path()) is None
        assert ends.bulk.head(missing.path()) is None
        assert [entry.key for entry in ends.bulk.scan(NAMESPACE[:4])] == (
            [entry.key for entry in ends.bulk.scan("")]
        )
        no_errors(recorder)
    _finds_in_one_trip(config)


def write(config: Config) -> None:
    read_first = config.model_copy(update={"role": "reader"})
    recorder = MemoryRecorder()
    with open_backends(config, recorder) as ends:
        check_backends(ends, config)
        assert save(ends, recorder, "first")
        assert not save(ends, recorder, "second")
        index = ends.index
        assert index.lease("x", "first", ttl_ms=60_000)
        assert index.lease("x", "first", ttl_ms=60_000)
        assert not index.lease("x", "second", ttl_ms=60_000)
        index.release("x", "first")
        assert index.lease("x", "second", ttl_ms=60_000)
        index.release("x", "second")
        assert index.record_sightings(["x", "y"], ttl_s=LONG_S) == [False, False]
        if config.index_url.startswith("redis"):
            assert load(ends, recorder)
            assert [(one.nbytes, one.payloads) for one in index.usage()] == [(len(PAYLOAD), 1)]
            [record] = index.lookup(NAMESPACE, [HASH])
            assert record is not None
            assert record.hits == 1
            records = record.shards
            cache = open_cache(ends, recorder, "first")
            cache.reject(KEY, records[KEY.field], corrupt=True)
            assert index.lookup(NAMESPACE, [HASH]) == [None]
            assert cache.save(KEY.path(), PAYLOAD, HEADER)
        no_errors(recorder)
    read(read_first)


def sweep(config: Config) -> None:
    recorder = MemoryRecorder()
    with open_backends(config, recorder) as ends:
        ends.bulk.check()
        ends.index.check()
        bulk = ends.bulk
        assert bulk.get(KEY.path()) == PAYLOAD
        assert bulk.head(KEY.path()) is not None
        assert bulk.folders("") == [NAMESPACE]
        assert KEY.path() in [entry.key for entry in bulk.scan(f"{NAMESPACE}/")]
        pin = f"{NAMESPACE}/pins/{HASH.hex()}.json"
        for path in (pin, f"quarantine/{KEY.path()}", SWITCH_PATH):
            bulk.put(path, DOCUMENT)
            bulk.delete(path)
            assert bulk.get(path) is None
        if config.index_url.startswith("redis"):
            _sweep_index(ends)
        bulk.delete(KEY.path())
        assert bulk.get(KEY.path()) is None
        no_errors(recorder)
    _finds_in_one_trip(config)


def _sweep_index(ends: Backends) -> None:
    index = ends.index
    assert index.namespaces() == [NAMESPACE]
    [record] = index.scan(NAMESPACE)
    assert index.find(NAMESPACE, [HASH], [FIELD, "0.other"]) != [None]
    assert ends.admin.pin(NAMESPACE, HASH, until_s=2**33, ttl_s=LONG_S)
    index.touch(NAMESPACE, [HASH], ttl_s=LONG_S)
    assert ends.admin.pin(NAMESPACE, HASH, until_s=0, ttl_s=LONG_S)
    assert index.lease(KEY.path(), "sweeper", ttl_ms=60_000)
    assert index.lease(KEY.path(), "sweeper", ttl_ms=60_000)
    if ends.hot is not None:
        assert ends.hot.get(KEY.path()) == PAYLOAD
        entry = ends.hot.head(KEY.path())
        assert entry is not None
        assert entry.nbytes == len(PAYLOAD)
        assert ends.hot.delete(KEY.path())
    assert index.forget(NAMESPACE, HASH, FIELD, record.shards[FIELD])
    assert index.usage() == []
    index.release(KEY.path(), "sweeper")
    assert index.lease(KEY.path(), "saver", ttl_ms=60_000)
    index.release(KEY.path(), "saver")
    key = claim_of(2).key
    chunk = ChunkEntry(NAMESPACE, key.prefix_hash, HASH, 0, 1)
    index.publish(chunk, {FIELD: record.shards[FIELD]}, ttl_s=LONG_S)
    assert [one.payloads for one in index.usage()] == [1]
    assert ends.admin.drop(key.namespace, key.prefix_hash)
    ends.admin.set_usage(Usage(NAMESPACE, 7, 7, 7))
    assert index.usage() == [Usage(NAMESPACE, 7, 7, 7)]
    ends.admin.set_usage(Usage(NAMESPACE, 0, 0, 7))
    assert index.usage() == []


def _finds_in_one_trip(config: Config) -> None:
    """Also without the rights for that chunks are found, but by slower commands."""
    if config.role == "sweeper" and config.index_url.startswith("redis"):
        facts = describe_index(config)
        assert facts is not None
        assert not facts.denied, "doctor checks memory and clock of the server"
    if config.index_url.startswith("redis"):
        client = connect_redis(config)
        finder = Finder(client)
        place = f"{config.redis_prefix}:i:{NAMESPACE}:"
        try:
            for fields in ([FIELD], [FIELD, "0.other"]):
                assert finder.find(place, [HASH], fields) is not None
        finally:
            finder.close()
            client.close()


WORK: dict[Role, Callable[[Config], None]] = {"reader": read, "writer": write, "sweeper": sweep}
