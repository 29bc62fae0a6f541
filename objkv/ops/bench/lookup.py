"""``bench lookup``: the time to look up a prompt's chunks, against a round trip."""

import hashlib
import time
from collections.abc import Callable, Iterator

from pydantic import BaseModel, ConfigDict

from objkv.index.near import NearIndex
from objkv.keys.prefix import prefix_hashes
from objkv.ops.bench.harness import (
    SCALES,
    BenchRow,
    BenchSetting,
    Compared,
    Section,
    Target,
    Timings,
    interleave,
)
from objkv.ops.bench.sample import (
    CHUNK_TOKENS,
    FIELD,
    NAMESPACE,
    chunk_hashes,
    make_tokens,
    publish,
)
from objkv.ops.bench.servers import PlainRedis, local_config, running_redis
from objkv.ops.programs import Program

FRESH_TARGETS = {128: Target(8, at_most=True), 1024: Target(40, at_most=True)}
NEAR_US = Target(100, at_most=True, of="ours")
HASH_MS = Target(10, at_most=True, of="ours")
_PROMPT_TOKENS = 128 << 10
_NEAR_CHUNKS = 128
_NEAR_CALLS = 50
_PROCESS_S = 300.0
_PING = "PING, bare socket"


class FreshAnswer(BaseModel):
    """Durations measured by a fresh process (``objkv.cli.bench_fresh``), in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_s: float
    """The first lookup after ``check()``, as in a replica that has just started."""
    again_s: float
    """Median of later lookups."""
    ping_s: float
    """Median of PING over a bare socket."""
    check_s: float
    """Median of ``check()``, one cheap round trip of the index client."""


def bench_lookup(setting: BenchSetting) -> Section:
    """Measure lookups in Redis and in the near cache, and hashing, which precedes every lookup.

    Raises ``ConfigError`` if no Redis is installed, and ``ProgramFailed`` if a child process fails.
    """
    with running_redis(setting.folder / "redis") as url, PlainRedis(url) as plain:
        servers = {"Redis": plain.version()}
        rows = [*_in_redis(setting, url), _near(setting, url)]
    rows.append(_hashing(setting))
    return Section("lookup", tuple(rows), servers)


def _in_redis(setting: BenchSetting, url: str) -> Iterator[BenchRow]:
    counts = list(FRESH_TARGETS)[:1] if setting.quick else list(FRESH_TARGETS)
    index = setting.factories.open_index(local_config(index_url=f"{url}/0"))
    try:
        publish(index, chunk_hashes(max(counts)))
    finally:
        index.close()
    for chunks in counts:
        setting.tell("fresh processes", f"looking up {chunks} chunks")
        answers = [_fresh(setting, url, chunks, n) for n in range(setting.rounds)]
        timings = Timings(
            {
                "first": [answer.first_s for answer in answers],
                "again": [answer.again_s for answer in answers],
                "ping": [answer.ping_s for answer in answers],
                "check": [answer.check_s for answer in answers],
            }
        )
        name = f"lookup of {chunks:,} chunks"
        first = Compared(timings, "first", "ping", _PING)
        target, detail = FRESH_TARGETS[chunks], "the first after check()"
        yield first.duration(f"{name}, fresh process", "µs", target, detail)
        yield Compared(timings, "again", "ping", _PING).duration(f"{name}, again", "µs")
        if chunks == min(FRESH_TARGETS):
            check = Compared(timings, "check", "ping", _PING)
            yield check.duration("check() of the index", "µs")


def _fresh(setting: BenchSetting, url: str, chunks: int, number: int) -> FreshAnswer:
    arguments = ("-m", "objkv.cli.bench_fresh", url, str(chunks))
    log = setting.folder / f"fresh-{chunks}-{number}.log"
    with Program("a fresh process", arguments, log, {}) as program:
        lines = list(program.lines(bound_s=_PROCESS_S))
    return FreshAnswer.model_validate_json(lines[-1])


def _near(setting: BenchSetting, url: str) -> BenchRow:
    setting.tell("near cache", f"looking up {_NEAR_CHUNKS} chunks")
    inner = setting.factories.open_index(local_config(index_url=f"{url}/0"))
    near = NearIndex(inner, records_max=65_536, ttl_s=600.0, fields=frozenset({FIELD}))
    try:
        hashes = chunk_hashes(_NEAR_CHUNKS)
        near.find(NAMESPACE, hashes, (FIELD,))

        def find() -> None:
            found = near.find(NAMESPACE, hashes, (FIELD,))
            assert all(found)

        timings = interleave({"near": _times(find, _NEAR_CALLS)}, setting.rounds)
    finally:
        near.close()
    # No round trip is involved, so there is no limit to compare with.
    name = f"lookup of {_NEAR_CHUNKS} chunks, near cache"
    return BenchRow(name, "µs", timings.median("near") * SCALES["µs"], target=NEAR_US)


def _hashing(setting: BenchSetting) -> BenchRow:
    setting.tell("hashing", f"{_PROMPT_TOKENS:,} tokens")
    tokens = make_tokens(_PROMPT_TOKENS)
    encoded = bytes(4 * _PROMPT_TOKENS)
    sides = {
        "ours": _times(lambda: prefix_hashes(NAMESPACE, tokens, CHUNK_TOKENS), 1),
        "sha256": _times(lambda: hashlib.sha256(encoded).digest(), 1),
    }
    timings = interleave(sides, setting.rounds)
    name = f"hashing of {_PROMPT_TOKENS:,} tokens"
    compared = Compared(timings, "ours", "sha256", "SHA-256 of as many bytes")
    return compared.duration(name, "ms", HASH_MS)


def _times(call: Callable[[], object], times: int) -> Callable[[], float]:
    """Return a round of ``times`` calls that gives the seconds of one call."""

    def work() -> float:
        started = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - started) / times

    return work
