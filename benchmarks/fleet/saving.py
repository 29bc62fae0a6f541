"""What a replica saves of what it computed, and what it drops because it cannot keep up.

With agents, a unit is committed to the node's memory, and ``Agents.save_to_bucket`` decides when it
is put into the bucket.
"""

from benchmarks.fleet.tiers import Held
from benchmarks.fleet.world import Job, Replica, Unit, World

_WAITING_SHARE = 0.25
"""Of an arena: payloads that may wait to be put."""


def save(world: World, job: Job, start_s: float, end_s: float) -> None:
    """Save the chunks of a prompt that was computed from ``start_s`` to ``end_s``.

    Chunks become ready evenly over that time. One that others are saving is left to them (lease);
    one that finds ``queue_max`` others waiting is dropped.
    """
    spread_s = (end_s - start_s) / len(job.private)
    for unit in job.units:
        now = start_s + (unit.place + 1) * spread_s
        since_s = world.store.has(unit.key, now)
        if since_s is None:
            is_due = world.fleet.agents is None or _commit(world, job, unit, now)
            if is_due:
                put(world, job.replica, unit, now)
        elif since_s > now:
            _ask(world, job.replica, unit, now, commands=1)


def put(world: World, replica: Replica, unit: Unit, now: float) -> bool:
    """Put a unit into the bucket, from the replica or from its node's agent. False: dropped."""
    counts, client, width = world.counts, world.costs.client, world.width()
    agents = world.fleet.agents
    lane = replica.host.saves if agents else replica.saves
    each_s = world.bulk.first_byte_s + world.chunk_bytes / world.bulk.connection_bytes_s
    chunk_s = max(
        each_s / (world.connections(save=True) * width),
        world.chunk_bytes / (client.save_bytes_s * width),
    )
    waiting = (lane.start_s(now) - now) / chunk_s
    room: float = world.settings.queue_max + world.settings.save_threads
    if agents:  # what waits is in the arena anyway
        room = agents.memory_bytes * _WAITING_SHARE / world.chunk_bytes
    if waiting + unit.chunks > room or now < replica.closed_until_s:
        counts.dropped += unit.chunks
        return False
    if not _ask(world, replica, unit, now, commands=2):  # lease, publish
        counts.dropped += unit.chunks
        return False
    nbytes = unit.chunks * world.chunk_bytes
    end_s = max(lane.take(now, unit.chunks * chunk_s), now + each_s)
    end_s = max(end_s, replica.host.send.take(now, nbytes / client.nic_bytes_s))
    counts.puts += unit.chunks
    counts.bytes_saved += nbytes
    counts.saved += unit.chunks
    world.store.add(unit.key, unit.chunks, end_s)
    return True


def _commit(world: World, job: Job, unit: Unit, now: float) -> bool:
    """Keep a unit in the node; returns whether it is put into the bucket now."""
    agents, cache = world.fleet.agents, job.replica.host.cache
    assert agents is not None
    is_here = cache.find(unit.key) is not None
    cache.add(unit.key, Held(unit.chunks * world.chunk_bytes, now))
    if agents.save_to_bucket == "all":
        return True
    if is_here or world.sighted.get(unit.key, 0.0) > now:
        return True
    _ask(world, job.replica, unit, now, commands=1)
    world.sighted[unit.key] = now + world.settings.ttl_s
    return False


def _ask(world: World, replica: Replica, unit: Unit, now: float, *, commands: int) -> bool:
    """Send so many commands for each payload of a unit; returns whether Redis answered in time."""
    sent = commands * unit.chunks
    world.counts.save_commands += sent
    return world.ask_redis(replica, now, sent * world.costs.redis.save_command_s) is not None
