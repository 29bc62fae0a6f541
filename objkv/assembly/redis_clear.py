"""Connections without TLS, which never leave this machine.

What ``index_url`` names is judged with the settings; the nodes that a cluster or a Sentinel then
names are not in it, and are judged here, before a password is sent to them.
"""

from typing import Any

import redis
from redis import exceptions
from redis.sentinel import SentinelManagedConnection

from objkv.config import is_this_machine


class _OnThisMachine(redis.Connection):
    def _connect(self) -> Any:
        if not is_this_machine(str(self.host)):
            raise exceptions.ConnectionError(
                f"{self.host} was named by a server on this machine, and is another: credentials "
                "and payloads would cross the network in clear; write rediss, or set "
                "allow_plaintext to true if nobody else can listen there"
            )
        return super()._connect()  # type: ignore[no-untyped-call]


class ClearConnection(_OnThisMachine):
    """To a server on this machine; ``ConnectionError`` before anything is sent to another."""


class ClearSentinelConnection(_OnThisMachine, SentinelManagedConnection):
    """The same, to the primary that a Sentinel names."""
