"""Counts round trips: a TCP proxy that holds answers back until the client has fallen silent."""

import select
import socket
from threading import Event, Thread
from typing import Self

_SILENCE_S = 0.2
_READ_BYTES = 1 << 16


class RoundTrips:
    """Listens on ``port`` and forwards to 127.0.0.1:``target`` while in its ``with`` block.

    A round trip is what a distant server makes expensive: the client sends, then waits. The proxy
    passes what the client sends at once, but answers only after neither side has said anything
    for 0.2 s; each such delivery counts. Pipelined commands are therefore one trip, however many.
    """

    def __init__(self, target: int) -> None:
        self.count = 0
        """Round trips so far, over all connections."""
        self._target = target
        self._closing = Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        # Closing alone would leave the thread waiting in accept.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        held = bytearray()
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            while not self._closing.is_set():
                readable, _, _ = select.select([client, server], [], [], _SILENCE_S)
                if not readable and held:
                    self.count += 1
                    client.sendall(held)
                    held.clear()
                for one in readable:
                    received = one.recv(_READ_BYTES)
                    if not received:
                        return
                    if one is client:
                        server.sendall(received)
                    else:
                        held += received
