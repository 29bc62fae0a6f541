"""Time as a real server sees it, without waiting for it."""

import redis

from objkv.testing.clock import ManualClock
from tests.support.servers.redis import RedisServer


class ServerClock(ManualClock):
    """Time as the servers see it: passing means that every key has so much less to live."""

    def __init__(self, *clients: redis.Redis) -> None:
        super().__init__()
        self.clients = clients

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass for every key of the servers."""
        super().advance(seconds)
        for client in self.clients:
            for key in client.scan_iter():
                left_ms = client.pttl(key)
                if 0 <= left_ms <= seconds * 1000:
                    client.delete(key)
                elif left_ms > 0:
                    client.pexpire(key, left_ms - int(seconds * 1000))


def flushed(*servers: RedisServer) -> ServerClock:
    """The clock of ``servers``, which are empty now."""
    clients = [server.client() for server in servers]
    for client in clients:
        client.flushall()
    return ServerClock(*clients)
