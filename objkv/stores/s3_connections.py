"""Connections of the S3 client that end with the call they are for.

The client knows time-outs only, each for one piece that is sent or received: a server that takes,
or sends, a byte now and then keeps a call for ever.
"""

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)
from urllib3.exceptions import HTTPError

from objkv.sockets import ends_s, punctual

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


_ADDRESS_S = 1.0
"""For connecting to one address of several, at least: a packet lost is sent again after as long."""


class _Plain(AWSHTTPConnection):
    def _new_conn(self) -> socket.socket:
        return punctual(_first_that_connects(self, super()._new_conn))


class _Tls(AWSHTTPSConnection):
    def _new_conn(self) -> socket.socket:
        return _first_that_connects(self, super()._new_conn)

    def connect(self) -> None:
        super().connect()
        self.sock = punctual(self.sock)


class _PlainPool(AWSHTTPConnectionPool):
    ConnectionCls = _Plain


class _TlsPool(AWSHTTPSConnectionPool):
    ConnectionCls = _Tls


def _first_that_connects(connection: Any, connect: Callable[[], socket.socket]) -> socket.socket:
    """A connection to the first address of the host that takes one: within the connection's
    time-out, which the client grants to each address."""
    host, timeout_s = connection._dns_host, connection.timeout
    now_s = time.monotonic()
    until_s = min(now_s + timeout_s, ends_s())
    try:
        found = socket.getaddrinfo(host, connection.port, 0, socket.SOCK_STREAM)
    except OSError:
        return connect()  # says that the name is not known
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    try:
        while True:
            left_s = until_s - time.monotonic()
            connection._dns_host = addresses.pop(0)
            connection.timeout = max(
                1e-3, min(left_s, max(_ADDRESS_S, left_s / (len(addresses) + 1)))
            )
            try:
                return connect()
            except HTTPError:
                if not addresses or time.monotonic() >= until_s:
                    raise
    finally:
        connection._dns_host, connection.timeout = host, timeout_s


def make_punctual(client: "S3Client") -> bool:
    """Have ``client`` connect so from now on; nothing was connected yet. False where this version
    of the client hides its connections: then only its time-outs bound what it does."""
    pools = {"http": _PlainPool, "https": _TlsPool}
    try:
        session: Any = client._endpoint.http_session  # type: ignore[attr-defined]
        session._manager.pool_classes_by_scheme = pools
        session._pool_classes_by_scheme = pools  # for proxies, whose managers are made later
    except AttributeError:
        return False
    return True
