"""What a replica saves of what it computed, and what it drops because it cannot keep up."""

from benchmarks.fleet.world import Job, Unit, World


def save(world: World, job: Job, start_s: float, end_s: float) -> None:
    """Save the chunks of a prompt that was computed from ``start_s`` to ``end_s``.

    Chunks become ready evenly over that time. One that others are saving is left to them (lease);
    one that finds ``save_queue_max`` others waiting is dropped.
    """
    spread_s = (end_s - start_s) / len(job.private)
    for unit in job.units:
        now = start_s + (unit.place + 1) * spread_s
        since_s = world.store.has(unit.key, now)
        if since_s is None:
            _save_unit(world, job, unit, now)
        elif since_s > now:
            world.counts.leased += unit.chunks
            commands = unit.chunks * world.model.shards
            world.counts.save_commands += commands
            world.ask_redis(job.replica, now, commands * world.costs.redis.save_command_s)


def _save_unit(world: World, job: Job, unit: Unit, now: float) -> None:
    counts, client, shards = world.counts, world.costs.client, world.model.shards
    lane = job.replica.saves
    parts = -(-world.payload_bytes // world.settings.s3_multipart_bytes)
    part_bytes = min(world.payload_bytes, world.settings.s3_multipart_bytes)
    each_s = world.bulk.first_byte_s + part_bytes / world.bulk.connection_bytes_s
    chunk_s = max(
        each_s * parts / world.connections(save=True),
        world.payload_bytes / client.save_bytes_s,
    )
    waiting = (lane.start_s(now) - now) / chunk_s
    commands = 3 * unit.chunks * shards  # lease, publish, release
    room = world.settings.save_queue_max + world.settings.save_threads
    if waiting + unit.chunks > room or now < job.replica.closed_until_s:
        counts.dropped += unit.chunks
        return
    counts.save_commands += commands
    work_s = commands * world.costs.redis.save_command_s
    if world.ask_redis(job.replica, now, work_s) is None:
        counts.dropped += unit.chunks
        return
    nbytes = unit.chunks * world.chunk_bytes
    end_s = max(lane.take(now, unit.chunks * chunk_s), now + each_s)
    end_s = max(end_s, job.replica.host.send.take(now, nbytes / client.nic_bytes_s))
    counts.puts += unit.chunks * shards * (1 if parts == 1 else parts + 2)
    counts.bytes_saved += nbytes
    counts.saved += unit.chunks
    world.store.add(unit.key, unit.chunks, end_s)
    job.replica.near.forget(job.private[unit.place])
    if world.payload_bytes <= world.settings.hot_save_bytes_max:
        world.keep_hot(unit, now)
