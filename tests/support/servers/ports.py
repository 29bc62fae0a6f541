"""Ports of loopback for servers that tests start, never the same one for two of them."""

import errno
import random
import socket
from contextlib import ExitStack, suppress

_PORTS = range(10_000, 22_000)
"""Below the ephemeral range, and so is the bus of a cluster, ``_BUS`` above."""
_BUS = 10_000
RESERVED: list[socket.socket] = []


def free_port(count: int = 1) -> int:
    """The first of ``count`` ports in a row that nobody listens on, nor on those 10,000 above.

    As long as this process lives, nobody on this machine is given one of them by this function
    again, so that a server can be stopped and started on its port, and two test processes that
    start servers at one moment do not meet.
    """
    while True:
        first = random.choice(_PORTS[:-count])
        row = range(first, first + count)
        row_and_bus = [*row, *(port + _BUS for port in row)]
        try:
            for port in row_and_bus:
                socket.create_server(("127.0.0.1", port)).close()
            _reserve(row_and_bus)
            return first
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise


def is_accepting(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _reserve(ports: list[int]) -> None:
    """A name without a file exists once in what Linux calls a network, as a port does, and ends
    with its process. Raises OSError, also if another process has one of them."""
    with ExitStack() as opened:
        unix = (socket.AF_UNIX, socket.SOCK_DGRAM)
        marks = [opened.enter_context(socket.socket(*unix)) for _ in ports]
        for mark, port in zip(marks, ports, strict=True):
            mark.bind(f"\0objkv-port-{port}")
        RESERVED.extend(marks)
        opened.pop_all()
