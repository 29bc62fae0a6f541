"""The bare Redis client reads what comes, in whatever pieces."""

import socket
import threading
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from objkv.ops.bench.servers import PlainRedis

LIMIT = 2000


class OnePeer:
    """Accepts one connection, answers the first command in pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}"
        self.asked = b""
        self._thread = threading.Thread(target=self._serve, args=(pieces,), daemon=True)
        self._thread.start()

    def _serve(self, pieces: list[bytes]) -> None:
        connection, _ = self._socket.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.asked = connection.recv(4096)
            for piece in pieces:
                connection.sendall(piece)
        self._socket.close()


@given(st.binary(max_size=LIMIT), st.lists(st.integers(0, LIMIT + 20), max_size=5))
def test_a_value_is_read_whole_however_it_is_cut(value: bytes, cuts: list[int]) -> None:
    answer = b"$%d\r\n%s\r\n" % (len(value), value)
    places = [0, *sorted(cuts), len(answer)]
    peer = OnePeer([answer[a:b] for a, b in pairwise(places)])
    buffer = memoryview(bytearray(LIMIT))
    with PlainRedis(peer.url) as client:
        assert client.get_into("key", buffer) == len(value)
    assert buffer[: len(value)] == value
    assert peer.asked == b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"
