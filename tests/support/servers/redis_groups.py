"""Real Redis and Valkey on loopback, several that belong together: clusters, Sentinels."""

from pathlib import Path
from typing import Any, Self

import redis

from tests.support.servers.ports import free_port
from tests.support.servers.redis import RedisServer
from tests.support.waiting import wait_until

SERVICE = "objkv"
_NODES = 6
_DOWN_MS = 3_000
"""Shorter, and a server that a busy machine did not run for a moment is taken for dead."""
_FORMING_MS = 120_000
"""The same while a cluster forms: a node that is late to answer CLUSTER MEET is not met again."""
_FAILOVER_MS = 6_000
_SYNC_AT_ONCE = ("--repl-diskless-sync-delay", "0")


class ServerGroup:
    """Several servers that belong together; ``primaries`` and ``replicas`` as they began."""

    def __init__(self, url: str, primaries: list[RedisServer], replicas: list[RedisServer]) -> None:
        self.url = url
        self.primaries = primaries
        self.replicas = replicas
        self.watchers: list[RedisServer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for server in [*self.watchers, *self.replicas, *self.primaries]:
            server.kill()


def redis_cluster(binary: str, folder: Path, *, node_timeout_ms: int = _DOWN_MS) -> ServerGroup:
    """A started cluster of three primaries with a replica each.

    A server that does not answer the others for ``node_timeout_ms`` is replaced, and the cluster
    refuses commands meanwhile: give one that nobody is to kill a long time. A server that is
    started again has the time of a cluster that forms.
    """
    first = free_port(_NODES)
    timeout = ("--cluster-node-timeout", str(max(node_timeout_ms, _FORMING_MS)))
    args = ("--cluster-enabled", "yes", *timeout, *_SYNC_AT_ONCE)
    servers = [
        RedisServer(binary, folder / str(port), port=port, args=("--port", str(port), *args))
        for port in range(first, first + _NODES)
    ]
    primaries, followers = servers[: _NODES // 2], servers[_NODES // 2 :]
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in primaries)
    group = ServerGroup(f"redis+cluster://{hosts}", primaries, followers)
    try:
        for server in servers:
            server.start()
        _form(primaries, followers)
        for server in servers:
            server.client().config_set("cluster-node-timeout", node_timeout_ms)
    except BaseException:
        group.stop()
        raise
    return group


def redis_sentinel(binary: str, folder: Path) -> ServerGroup:
    """A started primary with one replica, watched by three Sentinels as service ``objkv``."""
    first = free_port(5)
    primary = RedisServer(
        binary, folder / "primary", port=first, args=("--port", str(first), *_SYNC_AT_ONCE)
    )
    replica = RedisServer(
        binary,
        folder / "replica",
        port=first + 1,
        args=("--port", str(first + 1), "--replicaof", f"127.0.0.1 {first}", *_SYNC_AT_ONCE),
    )
    ports = range(first + 2, first + 5)
    watchers = [_watcher(binary, folder / f"s{port}", port, first) for port in ports]
    hosts = ",".join(f"127.0.0.1:{watcher.port}" for watcher in watchers)
    group = ServerGroup(f"redis+sentinel://{hosts}/0?service={SERVICE}", [primary], [replica])
    group.watchers = watchers
    try:
        for server in (primary, replica, *watchers):
            server.start()
        wait_until(lambda: all(_agrees(watcher) for watcher in watchers), "the Sentinels to agree")
    except BaseException:
        group.stop()
        raise
    return group


def _form(primaries: list[RedisServer], followers: list[RedisServer]) -> None:
    servers = [*primaries, *followers]
    clients = [server.client() for server in servers]
    count = len(primaries)
    for i in range(count):
        first, end = 16_384 * i // count, 16_384 * (i + 1) // count
        _ask(clients[i], "CLUSTER ADDSLOTS", *range(first, end))
        _ask(clients[i], "CLUSTER SET-CONFIG-EPOCH", i + 1)
    for server in servers[1:]:
        _ask(clients[0], "CLUSTER MEET", "127.0.0.1", server.port)
    ids = [_ask(client, "CLUSTER MYID") for client in clients[:count]]
    for i, client in enumerate(clients[count:]):
        wait_until(lambda c=client, i=i: _follows(c, ids[i % count]), "nodes to meet")  # type: ignore[misc]
    wait_until(lambda: all(_is_ready(client, len(servers)) for client in clients), "the cluster")


def _ask(client: redis.Redis, *command: str | int | bytes) -> Any:
    return client.execute_command(*command)


def _follows(client: redis.Redis, primary: bytes) -> bool:
    try:
        _ask(client, "CLUSTER REPLICATE", primary)
    except redis.ResponseError:
        return False  # it has not heard of the primary yet
    return True


def _is_ready(client: redis.Redis, count: int) -> bool:
    state = _ask(client, "CLUSTER INFO")
    replication = _ask(client, "INFO", "replication")
    synced = replication["role"] == "master" or replication["master_link_status"] == "up"
    known = state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == count
    return known and synced


def _watcher(binary: str, folder: Path, port: int, primary: int) -> RedisServer:
    folder.mkdir(parents=True)
    settings = folder / "sentinel.conf"
    settings.write_text(
        f"sentinel monitor {SERVICE} 127.0.0.1 {primary} 2\n"
        f"sentinel down-after-milliseconds {SERVICE} {_DOWN_MS}\n"
        f"sentinel failover-timeout {SERVICE} {_FAILOVER_MS}\n"
    )
    args = (str(settings), "--port", str(port), "--sentinel")
    return RedisServer(binary, folder, port=port, args=args)


def _agrees(watcher: RedisServer) -> bool:
    state = _ask(watcher.client(), "SENTINEL MASTER", SERVICE)
    return int(state["num-slaves"]) == 1 and int(state["num-other-sentinels"]) == 2
