"""TCP servers on loopback: a thread for each connection, all of them ended with the server."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Self

DROP_S = 0.02
Serve = Callable[[socket.socket], None]


class Listener:
    """Listens from the moment it is made until ``close``; a context manager.

    ``serve`` is called for each connection on a thread of its own and may raise ``OSError``: then,
    and when it returns, the connection is closed.
    """

    def __init__(self, port: int = 0) -> None:
        self._socket = socket.create_server(("127.0.0.1", port), backlog=512)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._is_closed = False
        self.connections = 0
        """How many were accepted so far."""
        self.address: tuple[str, int] = ("127.0.0.1", self._socket.getsockname()[1])
        self.url = "http://{}:{}".format(*self.address)
        self._thread = threading.Thread(target=self._accept, name="listener", daemon=True)
        self._thread.start()

    def wrap(self, connection: socket.socket) -> socket.socket:
        """What ``serve`` gets for ``connection``: TLS, for instance. May raise ``OSError``."""
        return connection

    def serve(self, connection: socket.socket) -> None:
        raise NotImplementedError

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            threads = [self._thread, *self._threads]
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self.hang_up()
        for thread in threads:
            thread.join()
        self._socket.close()

    def hang_up(self) -> None:
        """End all connections; new ones are welcome."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError):  # not that of TLS, which does more than to shut
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._run, args=(connection,), daemon=True)
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self.connections += 1
                self._open.add(connection)
                self._threads.add(thread)
                thread.start()

    def _run(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError):
                wrapped = self.wrap(connection)
                with self._lock:
                    self._open.discard(connection)
                    connection = wrapped
                    self._open.add(connection)
                self.serve(connection)
        finally:
            with self._lock:
                self._open.discard(connection)
                self._threads.discard(threading.current_thread())
                connection.close()


class Scripted(Listener):
    def __init__(self, serve: Serve) -> None:
        self._script = serve
        super().__init__()

    def serve(self, connection: socket.socket) -> None:
        self._script(connection)


def silent(connection: socket.socket) -> None:
    while connection.recv(1 << 20):
        pass


def reluctant(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    while connection.recv(512):
        time.sleep(DROP_S)


def trickling(answer: bytes) -> Serve:
    """Send the next byte of ``answer`` every ``DROP_S``, over and over; take in what comes."""

    def serve(connection: socket.socket) -> None:
        connection.settimeout(DROP_S)
        for number in cycle(answer):
            try:
                if not connection.recv(1 << 20):
                    return
                time.sleep(DROP_S)
            except TimeoutError:
                pass
            connection.sendall(bytes([number]))

    return serve


def hasty(answer: bytes) -> Serve:
    """Send ``answer`` once the head of a request is there, and close: no body is read."""

    def serve(connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            more = connection.recv(65536)
            if not more:
                return
            head += more
        connection.sendall(answer)

    return serve


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
