"""Real Redis and Valkey on loopback, several that belong together: clusters, Sentinels."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import redis

from tests.support.servers.ports import free_port
from tests.support.servers.redis import RedisServer
from tests.support.waiting import wait_for_server

SERVICE = "objkv"
_NODES = 6
_DOWN_MS = 3_000
"""Shorter, and a server that a busy machine did not run for a moment is taken for dead."""
_FORMING_MS = 120_000
"""The same while a cluster forms: a node that is late to answer CLUSTER MEET is not met again."""
_FAILOVER_MS = 6_000
_SYNC_AT_ONCE = ("--repl-diskless-sync-delay", "0")


@dataclass
class ServerGroup:
    """Several servers that belong together; ``primaries`` and ``replicas`` as they began."""

    url: str
    primaries: list[RedisServer]
    replicas: list[RedisServer]
    watchers: list[RedisServer] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[Self]:
        servers = [*self.primaries, *self.replicas, *self.watchers]
        try:
            for server in servers:
                server.start()
            yield self
        finally:
            for server in reversed(servers):
                server.kill()


@contextmanager
def redis_cluster(
    binary: str, folder: Path, *, node_timeout_ms: int = _DOWN_MS
) -> Iterator[ServerGroup]:
    """A cluster of three primaries with a replica each.

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
    with ServerGroup(f"redis+cluster://{hosts}", primaries, followers).running() as group:
        _form(primaries, followers)
        for server in servers:
            server.client().config_set("cluster-node-timeout", node_timeout_ms)
        yield group


@contextmanager
def redis_sentinel(binary: str, folder: Path) -> Iterator[ServerGroup]:
    """A primary with one replica, watched by three Sentinels as service ``objkv``."""
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
    url = f"redis+sentinel://{hosts}/0?service={SERVICE}"
    with ServerGroup(url, [primary], [replica], watchers).running() as group:
        wait_for_server(lambda: all(map(_agrees, watchers)), "the Sentinels to agree")
        yield group


def _form(primaries: list[RedisServer], followers: list[RedisServer]) -> None:
    servers = [*primaries, *followers]
    clients: list[Any] = [server.client() for server in servers]
    count = len(primaries)
    for i in range(count):
        first, end = 16_384 * i // count, 16_384 * (i + 1) // count
        clients[i].execute_command("CLUSTER ADDSLOTS", *range(first, end))
        clients[i].execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
    for server in servers[1:]:
        clients[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port)
    ids = [client.execute_command("CLUSTER MYID") for client in clients[:count]]
    for i, client in enumerate(clients[count:]):
        wait_for_server(lambda c=client, i=i: _follows(c, ids[i % count]), "nodes to meet")  # type: ignore[misc]
    wait_for_server(
        lambda: all(_is_ready(client, len(servers)) for client in clients), "the cluster"
    )


def _follows(client: Any, primary: bytes) -> bool:
    with suppress(redis.ResponseError):  # it has not heard of the primary yet
        client.execute_command("CLUSTER REPLICATE", primary)
        return True
    return False


def _is_ready(client: Any, count: int) -> bool:
    state = client.execute_command("CLUSTER INFO")
    replication = client.info("replication")
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
    state: Any = watcher.client().execute_command("SENTINEL MASTER", SERVICE)
    return int(state["num-slaves"]) == 1 and int(state["num-other-sentinels"]) == 2
