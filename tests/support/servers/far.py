"""A TCP proxy that makes a server on loopback as far away, as narrow and as faulty as wanted.

``python -m tests.support.servers.far HOST:PORT --ttfb-ms 25 --connection-mb-s 85 --gbit-s 10``
prints the address to use instead. It counts turns, a request and its answer, but parses neither:
an answer starts with the first bytes from the server after bytes of the client.
"""

import argparse
import random
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Literal

from tests.support.servers.listener import Listener

_STEP_BYTES = 256 << 10
_BURST_S = 0.002
"""What a bucket lets through at once: sleeping for less costs more than it is worth."""
_REASON = b"<Error><Code>SlowDown</Code><Message>far</Message></Error>"
_UNAVAILABLE = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_REASON), _REASON)
)

Fault = Literal["reset", "stall", "unavailable"]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far, how narrow, how faulty; zeros do nothing. Probabilities are per answer."""

    ttfb_ms: float = 0
    """Before the first byte of each answer."""
    jitter_ms: float = 0
    """Mean of what is added to it, exponentially distributed."""
    slow_share: float = 0
    """Of answers, so many wait ``slow_ms`` on top."""
    slow_ms: float = 0
    connection_mb_s: float = 0
    """MB/s of each connection, each way. Of S3: about 85."""
    gbit_s: float = 0
    """Gbit/s of all connections together, each way."""
    reset_share: float = 0
    """Of answers, so many end in a reset of the connection, before or in the body."""
    stall_share: float = 0
    """Of answers, so many stop, before or in the body, and never go on."""
    unavailable_share: float = 0
    """Of answers, so many are a 503 instead, after which the connection is closed."""
    fault_bytes_max: float = 1 << 20
    """A reset or a stall comes after at most so many bytes of the answer."""


class Far(Listener):
    """The proxy to ``target``, listening until it is closed; a context manager."""

    def __init__(
        self, target: tuple[str, int], distance: Distance, *, port: int = 0, seed: int = 1
    ) -> None:
        self._target = target
        self.distance = distance
        """May be replaced at any time."""
        self._random = random.Random(seed)
        self._ended = threading.Event()
        self._up, self._down = _Bucket(), _Bucket()
        self.turns = 0
        """Answers so far."""
        super().__init__(port)
        self.url = f"http://127.0.0.1:{self.address[1]}"
        """For clients of a target that speaks HTTP."""

    def close(self) -> None:
        """Also frees what stalls."""
        self._ended.set()
        super().close()

    def serve(self, connection: socket.socket) -> None:
        """Carry bytes both ways until one end closes or a fault ends it."""
        with socket.create_connection(self._target) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = threading.Event()
            up = threading.Thread(target=self._carry_up, args=(connection, server, asked))
            up.start()
            try:
                self._carry_down(server, connection, asked)
            finally:
                for end in (connection, server):
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                up.join()

    def _carry_up(
        self, client: socket.socket, server: socket.socket, asked: threading.Event
    ) -> None:
        own, buffer = _Bucket(), memoryview(bytearray(_STEP_BYTES))
        with suppress(OSError):
            while got := client.recv_into(buffer):
                asked.set()
                self._pay(self._up, own, got)
                server.sendall(buffer[:got])
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _carry_down(
        self, server: socket.socket, client: socket.socket, asked: threading.Event
    ) -> None:
        own, buffer = _Bucket(), memoryview(bytearray(_STEP_BYTES))
        fault: Fault | None = None
        left = 0
        while got := server.recv_into(buffer):
            if asked.is_set():
                asked.clear()
                self.turns += 1
                fault, left = self._draw_fault()
                if fault == "unavailable":
                    client.sendall(_UNAVAILABLE)
                    return
                self._ended.wait(self._wait_s())
            if fault is not None and got > left:
                client.sendall(buffer[:left])
                self._end(fault, client)
                return
            left -= got
            self._pay(self._down, own, got)
            client.sendall(buffer[:got])

    def _draw_fault(self) -> tuple[Fault | None, int]:
        far, drawn = self.distance, self._random.random()
        faults: tuple[tuple[Fault, float], ...] = (
            ("reset", far.reset_share),
            ("stall", far.stall_share),
            ("unavailable", far.unavailable_share),
        )
        for fault, share in faults:
            if drawn < share:
                after = self._random.choice((0, self._random.randrange(int(far.fault_bytes_max))))
                return fault, after
            drawn -= share
        return None, 0

    def _wait_s(self) -> float:
        far = self.distance
        wait_ms = far.ttfb_ms
        if far.jitter_ms:
            wait_ms += self._random.expovariate(1 / far.jitter_ms)
        if far.slow_share and self._random.random() < far.slow_share:
            wait_ms += far.slow_ms
        return wait_ms / 1000

    def _end(self, fault: Fault, client: socket.socket) -> None:
        if fault == "stall":
            while not self._ended.wait(0.05) and _is_open(client):
                pass
            return
        # Closing with this option set sends a reset instead of an orderly end.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _pay(self, shared: "_Bucket", own: "_Bucket", nbytes: int) -> None:
        far = self.distance
        wait_s = max(
            shared.wait_s(nbytes, far.gbit_s * 1e9 / 8),
            own.wait_s(nbytes, far.connection_mb_s * 1e6),
        )
        if wait_s > 0:
            self._ended.wait(wait_s)


class _Bucket:
    """When what is sent has passed a link of so many bytes a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passed_s = 0.0

    def wait_s(self, nbytes: int, rate: float) -> float:
        if not rate:
            return 0
        with self._lock:
            now = time.monotonic()
            self._passed_s = max(self._passed_s, now - _BURST_S) + nbytes / rate
            return self._passed_s - now


def _is_open(client: socket.socket) -> bool:
    """Whether the client is still there; what it sends meanwhile is left to the other way."""
    try:
        return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1  # ESTABLISHED
    except (OSError, AttributeError):
        return False


def main() -> None:
    """Carry until killed; print the address to use instead of the target's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="HOST:PORT")
    parser.add_argument("--port", type=int, default=0)
    for field in fields(Distance):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=float, default=field.default)
    given = vars(parser.parse_args())
    host, _, target_port = given.pop("target").rpartition(":")
    port = given.pop("port")
    with Far((host, int(target_port)), Distance(**given), port=port) as far:
        print(far.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
