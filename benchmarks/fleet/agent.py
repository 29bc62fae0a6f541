"""A node's agent: what is stored of a prompt, whether loading it pays and how long that takes, what
is saved of what was computed, and what is dropped because the agent cannot keep up.

A unit is committed to the node's memory, and ``save_to_bucket`` decides when it is put into the
bucket.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.fleet.tiers import Held
from benchmarks.fleet.world import Host, Job, Unit, World
from objkv.config.prices import RANGE_BYTES

_WAITING_SHARE, _WAITING_MAX = 0.25, 1024
"""Of an arena: payloads that may wait to be put, and how many."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load that could be made."""

    start: int
    """Tokens that the GPU has."""
    end: int
    """Tokens that it would have."""
    bulk: int
    """Chunks in the bucket alone."""
    gets: int
    """Requests for them."""
    near: int
    """Chunks in the node's memory or on its disk."""
    ready_s: float
    """When the last of these can be read at the earliest."""
    verify_s: float
    """Of the agent, for what it fetches."""
    wire_s: float
    disk_s: float
    """Of the disk, for what is there."""


def lookup(world: World, job: Job, now: float) -> tuple[int, float]:
    """``(units, seconds)``: how many leading units are stored, and how long the answer took."""
    redis = world.costs.redis
    asked = sum(unit.chunks for unit in job.units)
    if not asked:
        return 0, 0.0
    server_s = world.ask_redis(job.replica.host, now, asked * redis.lookup_s)
    if server_s is None:
        return 0, 0.0
    world.counts.lookup_commands += asked
    deadline_s = world.settings.lookup_deadline_ms / 1000
    took_s = redis.round_trip_s + asked * redis.client_s_per_chunk + server_s
    if took_s > deadline_s:
        return 0, deadline_s
    return _leading(world, job, len(job.units), now), took_s


def load(world: World, job: Job, now: float) -> float:
    """Load what pays; returns when the request can be computed, and sets what it need not.

    Decided when the request is at the head of its replica's queue, as in vLLM.
    """
    tokens = job.arrival.tokens
    job.reused = start = min(job.replica.cache.match(job.private), tokens - 1)
    world.counts.gpu += start
    units = _leading(world, job, job.stored, now)
    chunks = sum(unit.chunks for unit in job.units[:units])
    end = min(chunks * world.settings.chunk_tokens, tokens - 1)
    if end <= start:
        return now
    what = _plan(world, job, now, (start, end))
    took_s = _seconds(world, job, now, what)
    saved_s = world.model.prefill_s(start, end)
    if took_s >= saved_s * (1 + len(job.replica.waiting)):
        return now
    return _carry_out(world, job, now, what, took_s)


def _leading(world: World, job: Job, units: int, now: float) -> int:
    """How many of the first ``units`` can be loaded without a gap."""
    for i, unit in enumerate(job.units[:units]):
        since_s = world.store.has(unit.key, now)
        is_stored = since_s is not None and since_s <= now
        if not is_stored and not job.replica.host.cache.find(job.private[unit.place]):
            return i
    return units


def _plan(world: World, job: Job, now: float, tokens: tuple[int, int]) -> Load:
    """Where the tokens ``[start, end)`` are."""
    start, end = tokens
    chunk = world.settings.chunk_tokens
    chunks = -(-end // chunk) - start // chunk
    near = on_disk = 0
    ready_s = now
    for unit in _between(world, job, start, end):
        if found := job.replica.host.cache.find(job.private[unit.place]):
            held, in_memory = found
            near += unit.chunks
            on_disk += 0 if in_memory else unit.chunks
            ready_s = max(ready_s, held.ready_s)
    near = min(near, chunks)
    bulk, node = chunks - near, world.costs.node
    return Load(
        start,
        end,
        bulk,
        gets=bulk * -(-world.chunk_bytes // RANGE_BYTES),
        near=near,
        ready_s=ready_s,
        verify_s=bulk * world.chunk_bytes / node.fetch_bytes_s,
        wire_s=bulk * world.chunk_bytes / node.nic_bytes_s,
        disk_s=on_disk * world.chunk_bytes / node.disk_bytes_s,
    )


def _between(world: World, job: Job, start: int, end: int) -> Iterator[Unit]:
    """The units with any of the tokens ``[start, end)``."""
    seen = 0
    for unit in job.units:
        if seen >= end:
            break
        seen += unit.chunks * world.settings.chunk_tokens
        if seen > start:
            yield unit


def _get_s(world: World) -> float:
    """One ranged read on one connection."""
    size = min(world.chunk_bytes, RANGE_BYTES)
    return world.bulk.first_byte_s + size / world.bulk.connection_bytes_s


def _seconds(world: World, job: Job, now: float, what: Load) -> float:
    """How long the load takes, behind those of this node that are under way."""
    host, rounds = job.replica.host, -(-what.gets // world.loaders)
    copy_bytes_s = world.costs.node.arena_bytes_s * world.model.ranks
    done_s = what.ready_s + what.near * world.chunk_bytes / copy_bytes_s
    if what.bulk:
        fetch_s = max(rounds * _get_s(world), what.verify_s)
        done_s = max(done_s, host.loads.start_s(now) + fetch_s)
        done_s = max(done_s, host.receive.start_s(now) + what.wire_s)
    if what.disk_s:
        done_s = max(done_s, host.reads.start_s(now) + what.disk_s)
    return done_s - now


def _carry_out(world: World, job: Job, now: float, what: Load, took_s: float) -> float:
    counts, host, chunk = world.counts, job.replica.host, world.settings.chunk_tokens
    counts.gets += what.gets
    counts.fetched += what.bulk
    host.loads.take(now, max(what.gets * _get_s(world) / world.loaders, what.verify_s))
    host.receive.take(now, what.wire_s)
    host.reads.take(now, what.disk_s)
    counts.touch_commands += what.bulk
    world.ask_redis(host, now, what.bulk * world.costs.redis.touch_s)
    for unit in _between(world, job, what.start, what.end):
        world.store.touch(unit.key, now)
        _keep(world, job, unit, now, now + took_s)
    deadline_s = world.settings.load_deadline_ms / 1000
    if took_s > deadline_s:
        return now + deadline_s
    tokens = what.end - what.start
    near = min(what.near * chunk, tokens)
    counts.node += near
    counts.bulk += tokens - near
    job.reused = what.end
    return now + took_s


def _keep(world: World, job: Job, unit: Unit, now: float, ready_s: float) -> None:
    """Keep in the node what was loaded; what was in its memory or on its disk was seen again."""
    host, key = job.replica.host, job.private[unit.place]
    if host.cache.find(key) is None:
        host.cache.add(key, Held(unit.chunks * world.chunk_bytes, ready_s))
        return
    host.cache.read(key, ready_s)
    if world.store.has(unit.key, now) is None:
        _put(world, host, unit, now)


def save(world: World, job: Job, start_s: float, end_s: float) -> None:
    """Save the chunks of a prompt that was computed from ``start_s`` to ``end_s``.

    Chunks become ready evenly over that time. One that others are saving is left to them (lease);
    one that finds too many others waiting is dropped.
    """
    spread_s = (end_s - start_s) / len(job.private)
    for unit in job.units:
        now = start_s + (unit.place + 1) * spread_s
        since_s = world.store.has(unit.key, now)
        if since_s is None:
            if _commit(world, job, unit, now):
                _put(world, job.replica.host, unit, now)
        elif since_s > now:
            _ask(world, job.replica.host, unit, now, commands=1)


def _put(world: World, host: Host, unit: Unit, now: float) -> None:
    """Put a unit into the bucket, or drop it."""
    counts, node = world.counts, world.costs.node
    each_s = world.bulk.first_byte_s + world.chunk_bytes / world.bulk.connection_bytes_s
    chunk_s = max(each_s / world.savers, world.chunk_bytes / node.put_bytes_s)
    waiting = (host.saves.start_s(now) - now) / chunk_s
    room = min(_WAITING_MAX, world.arena_bytes * _WAITING_SHARE / world.chunk_bytes)
    has_room = waiting + unit.chunks <= room
    if not has_room or not _ask(world, host, unit, now, commands=2):  # lease, publish
        counts.dropped += unit.chunks
        return
    nbytes = unit.chunks * world.chunk_bytes
    end_s = max(host.saves.take(now, unit.chunks * chunk_s), now + each_s)
    end_s = max(end_s, host.send.take(now, nbytes / node.nic_bytes_s))
    counts.puts += unit.chunks
    world.store.add(unit.key, unit.chunks, end_s)


def _commit(world: World, job: Job, unit: Unit, now: float) -> bool:
    """Keep a unit in the node; returns whether it is put into the bucket now."""
    cache, key = job.replica.host.cache, job.private[unit.place]
    is_here = cache.find(key) is not None
    cache.add(key, Held(unit.chunks * world.chunk_bytes, now))
    if world.puts_all or is_here or world.sighted.get(unit.key, 0.0) > now:
        return True
    _ask(world, job.replica.host, unit, now, commands=1)
    world.sighted[unit.key] = now + world.settings.ttl_s
    return False


def _ask(world: World, host: Host, unit: Unit, now: float, *, commands: int) -> bool:
    """Send so many commands for each payload of a unit; returns whether Redis answered in time."""
    sent = commands * unit.chunks
    world.counts.save_commands += sent
    took_s = world.ask_redis(host, now, sent * world.costs.redis.save_command_s)
    return took_s is not None and math.isfinite(took_s)
