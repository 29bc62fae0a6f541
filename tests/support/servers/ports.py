"""Ports of loopback for servers that tests start, never the same one for two of them."""

import random
import socket
import sys

_PORTS = range(10_000, 22_000)
"""Below the ephemeral range, and so is the bus of a cluster, ``_BUS`` above."""
_BUS = 10_000
RESERVED: dict[int, socket.socket] = {}


def free_port(count: int = 1) -> int:
    """The first of ``count`` ports in a row that nobody listens on, nor on those 10,000 above.

    As long as this process lives, nobody on this machine is given one of them by this function
    again, so that a server can be stopped and started on its port, and two test processes that
    start servers at one moment do not meet.
    """
    while True:
        first = random.choice(_PORTS[:-count])
        row = range(first, first + count)
        if all(_is_free(port) and _is_free(port + _BUS) for port in row):
            row_and_bus = [*row, *(port + _BUS for port in row)]
            if _reserve(row_and_bus):
                return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _reserve(ports: list[int]) -> bool:
    taken: dict[int, socket.socket] = {}
    for port in ports:
        mark = _mark(port)
        if mark is None:
            for other in taken.values():
                other.close()
            return False
        taken[port] = mark
    RESERVED.update(taken)
    return True


def _mark(port: int) -> socket.socket | None:
    """What holds a reservation while it is open; None if another holds it.

    A name without a file exists once in what Linux calls a network, as a port does, and ends with
    its process. Elsewhere chance alone keeps processes apart.
    """
    if port in RESERVED:
        return None
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform != "linux":
        return mark
    try:
        mark.bind(f"\0objkv-port-{port}")
    except OSError:
        mark.close()
        return None
    return mark
