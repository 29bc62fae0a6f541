"""What is stored of a prompt, whether loading it pays, and how long that takes."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.fleet.saving import put
from benchmarks.fleet.tiers import Held, Lane
from benchmarks.fleet.world import Job, Unit, World
from objkv.config.prices import RANGE_BYTES


@dataclass(frozen=True, slots=True)
class Load:
    """One load that could be made."""

    start: int
    """Tokens that the GPU has."""
    end: int
    """Tokens that it would have."""
    bulk_chunks: int
    arena_chunks: int
    """In the memory of the node's agent; likewise the next."""
    disk_chunks: int
    bulk_bytes: int
    gets: int
    ready_s: float
    """When the last of them can be read at the earliest."""


def lookup(world: World, job: Job, now: float) -> tuple[int, float]:
    """``(units, seconds)``: how many leading units are stored, and how long the answer took."""
    store, redis = world.store, world.costs.redis
    asked = sum(unit.chunks for unit in job.units)
    took_s = 0.0
    if asked and now < job.replica.closed_until_s:
        return 0, 0.0
    if asked:
        world.counts.lookup_commands += asked
        server_s = world.ask_redis(job.replica, now, asked * redis.lookup_s)
        deadline_s = world.settings.lookup_deadline_ms / 1000
        took_s = redis.round_trip_s + asked * redis.client_s_per_chunk + (server_s or 0.0)
        if server_s is None or took_s > deadline_s:
            return 0, deadline_s
    answers: list[bool] = []
    for unit in job.units:
        since_s = store.has(unit.key, now)
        answers.append(since_s is not None and since_s <= now)
        if not answers[-1] and world.fleet.agents:
            answers[-1] = job.replica.host.cache.find(unit.key) is not None
    return _leading(answers), took_s


def load(world: World, job: Job, now: float, stored: int) -> float:
    """Load what pays; returns when the request can be computed, and sets what it need not.

    Decided when the request is at the head of its replica's queue, as in vLLM.
    """
    tokens = job.arrival.tokens
    job.reused = start = min(job.replica.cache.match(job.private), tokens - 1)
    world.counts.gpu += start
    end = min(_tokens(world, job, _present(world, job, now, stored)), tokens - 1)
    if end <= start:
        return now
    what = _plan(world, job, now, (start, end))
    took_s = _seconds(world, job, now, what)
    if not _pays(world, job, what, took_s):
        return now
    return _carry_out(world, job, now, what, took_s)


def _leading(answers: list[bool]) -> int:
    for i, stored in enumerate(answers):
        if not stored:
            return i
    return len(answers)


def _present(world: World, job: Job, now: float, stored: int) -> int:
    """Leading units that can still be loaded."""
    for i, unit in enumerate(job.units[:stored]):
        if job.replica.host.cache.find(unit.key):
            continue
        since_s = world.store.has(unit.key, now)
        if since_s is None or since_s > now:
            return i
    return stored


def _tokens(world: World, job: Job, units: int) -> int:
    return sum(unit.chunks for unit in job.units[:units]) * world.settings.chunk_tokens


def _plan(world: World, job: Job, now: float, tokens: tuple[int, int]) -> Load:
    """Where the tokens ``[start, end)`` are."""
    start, end = tokens
    chunk = world.settings.chunk_tokens
    first, last = start // chunk, -(-end // chunk)
    arena = disk = seen = 0
    ready_s = now
    if world.fleet.agents:
        for unit in job.units:
            chunks = unit.chunks if first <= seen < last else 0
            seen += unit.chunks
            if not chunks:
                continue
            held = job.replica.host.cache.find(unit.key)
            arena += chunks if held and held[1] else 0
            disk += chunks if held and not held[1] else 0
            since_s = held[0].ready_s if held else world.store.has(unit.key, now)
            ready_s = max(ready_s, since_s or now)
    arena = min(arena, last - first)
    disk = min(disk, last - first - arena)
    bulk = last - first - arena - disk
    parts = -(-world.chunk_bytes // RANGE_BYTES)
    return Load(start, end, bulk, arena, disk, bulk * world.chunk_bytes, bulk * parts, ready_s)


def _seconds(world: World, job: Job, now: float, what: Load) -> float:
    """How long the load takes, behind those of this worker and host that are under way."""
    client, ranks, host = world.costs.client, world.model.ranks, job.replica.host
    done_s = now
    if what.gets:
        lane_s = _lane(world, job).start_s(now)
        each_s = _each_s(world)
        connections = world.connections(save=False) * world.width()
        done_s = lane_s + -(-what.gets // connections) * each_s
        done_s = max(done_s, lane_s + what.bulk_bytes / (client.load_bytes_s * world.width()))
        done_s = max(done_s, what.ready_s + (each_s if what.ready_s > now else 0.0))
    if what.arena_chunks:
        copy_s = what.arena_chunks * world.chunk_bytes / (world.costs.node.arena_bytes_s * ranks)
        done_s = max(done_s, what.ready_s + copy_s)
    if what.disk_chunks:
        done_s = max(done_s, host.reads.start_s(now) + _disk_s(world, what))
    return max(done_s, host.receive.start_s(now) + _wire_s(world, what)) - now


def _wire_s(world: World, what: Load) -> float:
    return what.bulk_bytes * _readers(world) / world.costs.client.nic_bytes_s


def _disk_s(world: World, what: Load) -> float:
    return what.disk_chunks * world.chunk_bytes / world.costs.node.disk_bytes_s


def _lane(world: World, job: Job) -> Lane:
    return job.replica.host.loads if world.fleet.agents else job.replica.loads


def _readers(world: World) -> int:
    """How often a payload is fetched for one request."""
    return 1 if world.fleet.agents else world.model.readers


def _each_s(world: World) -> float:
    """One ranged read on one connection."""
    size = min(world.chunk_bytes, RANGE_BYTES)
    return world.bulk.first_byte_s + size / world.bulk.connection_bytes_s


def _pays(world: World, job: Job, what: Load, took_s: float) -> bool:
    saved_s = world.model.prefill_s(what.start, what.end)
    return took_s < saved_s * (1 + len(job.replica.waiting))


def _carry_out(world: World, job: Job, now: float, what: Load, took_s: float) -> float:
    counts, client = world.counts, world.costs.client
    readers = _readers(world)
    counts.gets += what.gets * readers
    counts.bytes_bulk += what.bulk_bytes * readers
    if what.gets:
        width = world.width()
        connections_s = what.gets * _each_s(world) / (world.connections(save=False) * width)
        worker_s = what.bulk_bytes / (client.load_bytes_s * width)
        _lane(world, job).take(now, max(connections_s, worker_s))
    job.replica.host.reads.take(now, _disk_s(world, what))
    job.replica.host.receive.take(now, _wire_s(world, what))
    _touch(world, job, now, what)
    if world.fleet.agents:
        _share(world, job, now, what, now + took_s)
    deadline_s = world.settings.load_deadline_ms / 1000
    if took_s > deadline_s:
        return now + deadline_s
    tokens, chunk = what.end - what.start, world.settings.chunk_tokens
    arena = min(what.arena_chunks * chunk, tokens)
    disk = min(what.disk_chunks * chunk, tokens - arena)
    counts.arena += arena
    counts.disk += disk
    counts.bulk += tokens - arena - disk
    job.reused = what.end
    return now + took_s


def _touch(world: World, job: Job, now: float, what: Load) -> None:
    chunks = what.bulk_chunks
    world.counts.touch_commands += chunks
    world.ask_redis(job.replica, now, chunks * world.costs.redis.touch_s)
    for unit in _loaded(world, job, what):
        world.store.touch(unit.key, now)


def _loaded(world: World, job: Job, what: Load) -> Iterator[Unit]:
    seen = 0
    for unit in job.units:
        if seen * world.settings.chunk_tokens >= what.end:
            break
        seen += unit.chunks
        if seen * world.settings.chunk_tokens > what.start:
            yield unit


def _share(world: World, job: Job, now: float, what: Load, ready_s: float) -> None:
    """Keep in the node what was loaded; what was in its memory or on its disk was seen again."""
    cache = job.replica.host.cache
    for unit in _loaded(world, job, what):
        if cache.find(unit.key) is None:
            nbytes = unit.chunks * world.chunk_bytes
            cache.add(unit.key, Held(nbytes, ready_s))
            continue
        cache.read(unit.key, ready_s)
        if world.store.has(unit.key, now) is None:
            put(world, job.replica, unit, now)
