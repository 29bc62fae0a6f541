"""Servers that make waiting for them long: one never answers, others a byte at a time."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from threading import Event

from tests.support.servers.listener import Listener

DROP_S = 0.02


class Trickle(Listener):
    """Sends the next byte of ``answer`` every ``DROP_S``, from the moment a client connects, over
    and over; takes in what it is sent."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._ended = Event()
        super().__init__()
        self.url = f"http://127.0.0.1:{self.address[1]}"

    def serve(self, connection: socket.socket) -> None:
        """Until the client is gone."""
        connection.settimeout(DROP_S)
        for number in cycle(self._answer):
            try:
                if not connection.recv(1 << 20):
                    return
            except TimeoutError:
                pass
            else:
                self._ended.wait(DROP_S)
            connection.sendall(bytes([number]))

    def close(self) -> None:
        """Also wakes who waits to send."""
        self._ended.set()
        super().close()


class Reluctant(Listener):
    """Takes a few bytes at a time of what it is sent, and answers nothing."""

    def __init__(self) -> None:
        self._ended = Event()
        super().__init__()
        self.url = f"http://127.0.0.1:{self.address[1]}"

    def serve(self, connection: socket.socket) -> None:
        """Until the client is gone."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        while not self._ended.wait(DROP_S) and connection.recv(512):
            pass

    def close(self) -> None:
        """Also wakes who waits to receive."""
        self._ended.set()
        super().close()


@contextmanager
def full_listener() -> Iterator[tuple[str, int]]:
    """An address to which nobody is let in: what connects waits, as behind a firewall that drops
    everything."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()[:2]
        waiting = []
        try:
            for _ in range(8):  # more than the kernel keeps for a backlog of none
                one = socket.socket()
                one.setblocking(False)
                one.connect_ex(address)
                waiting.append(one)
            yield address
        finally:
            for one in waiting:
                one.close()
