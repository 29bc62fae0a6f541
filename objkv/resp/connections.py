"""Connections of redis-py that end with the call they are for.

The client knows time-outs only, each for one piece that is sent or received: a server that sends a
byte now and then keeps a call for ever.
"""

import socket
import time
from functools import lru_cache
from typing import Any

import redis

from objkv.sockets import ends_s, punctual


def make_punctual(pool: Any) -> None:
    """Have ``pool`` connect so from now on; nothing was connected yet."""
    pool.connection_class = _punctual_class(pool.connection_class)


class PunctualPool(redis.BlockingConnectionPool):
    """Makes such connections from the beginning: what a cluster's client makes pools of."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]  # its base class is
        make_punctual(self)


class _Punctual:
    """Comes before a class of connections."""

    socket_connect_timeout: float

    def _connect(self) -> socket.socket:
        usual_s, left_s = self.socket_connect_timeout, ends_s() - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline passed")
        self.socket_connect_timeout = min(usual_s, left_s)
        try:
            made: socket.socket = super()._connect()  # type: ignore[misc]  # of the class after it
            return punctual(made)
        finally:
            self.socket_connect_timeout = usual_s


@lru_cache
def _punctual_class(kind: type) -> type:
    return type(f"Punctual{kind.__name__}", (_Punctual, kind), {})
