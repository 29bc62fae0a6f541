"""The limit of the wire: bytes between two processes over plain sockets, without any protocol.

``python -m benchmarks.plain_limit`` serves, in a process of its own as S3 is. A request is
nine bytes, ``G`` or ``P`` and a length in bytes: the server then sends so many, or takes so many
and answers one byte.
"""

import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.support.servers.listener import Listener

_REQUEST = struct.Struct(">cQ")
_STEP_BYTES = 64 << 20
_GIVEN_BYTES = 128 << 20
"""More than caches hold; one piece of memory for all connections."""


@cache
def _given() -> memoryview:
    return memoryview(b"g" * _GIVEN_BYTES)


class PlainServer(Listener):
    """Sends bytes of a buffer that it has, takes bytes into another; keeps nothing."""

    def serve(self, connection: socket.socket) -> None:
        """Answer requests until the client is gone. What is sent lies elsewhere each time, as that
        of a store does: from a processor's cache it would be sent half as fast again. No page is
        touched for the first time while it is measured."""
        given, at = _given(), 0
        taken = memoryview(b"")
        while request := _read_exactly(connection, _REQUEST.size):
            verb, nbytes = _REQUEST.unpack(request)
            if verb == b"G":
                if len(given) < nbytes:
                    given = memoryview(b"g" * nbytes)
                at = at if at + nbytes <= len(given) else 0
                connection.sendall(given[at : at + nbytes])
                at += nbytes
            else:
                if len(taken) < nbytes:
                    taken = memoryview(bytearray(b"p" * nbytes))
                _fill(connection, taken[:nbytes])
                connection.sendall(b"!")


class PlainClient:
    """One connection to a ``PlainServer``; a context manager. For one thread at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get_into(self, buffer: memoryview) -> None:
        """Fill ``buffer`` with what the server sends."""
        self._socket.sendall(_REQUEST.pack(b"G", len(buffer)))
        _fill(self._socket, buffer)

    def put(self, view: memoryview) -> None:
        """Send ``view`` and wait until the server has taken all of it."""
        self._socket.sendall(_REQUEST.pack(b"P", len(view)))
        self._socket.sendall(view)
        _fill(self._socket, memoryview(bytearray(1)))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __enter__(self) -> "PlainClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or ``b""`` if the client is gone."""
    buffer = bytearray(nbytes)
    with suppress(ConnectionError):
        _fill(connection, memoryview(buffer))
        return bytes(buffer)
    return b""


def _fill(connection: socket.socket, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        got = connection.recv_into(buffer[at : at + _STEP_BYTES])
        if not got:
            raise ConnectionError(f"closed after {at} of {len(buffer)} bytes")
        at += got


@contextmanager
def plain_server() -> Iterator[tuple[str, int]]:
    """The address of a ``PlainServer`` in a process of its own, killed at the end."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            host, port = process.stdout.readline().split()
            yield host, int(port)
        finally:
            process.kill()


def main() -> None:
    """Serve until killed; print host and port."""
    with PlainServer() as server:
        print(*server.address, flush=True)
        signal.pause()  # until the benchmark ends this process


if __name__ == "__main__":
    main()
