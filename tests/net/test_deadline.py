"""Sockets that keep the deadline of a call."""

import math
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from objkv.net.deadline import EndsBy, check_end, deadline_socket, ends_s
from tests.support.servers.certificates import make_certificates

USUAL_S = 600.0


@pytest.fixture(params=["plain", "tls"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A deadline socket whose time-out is long, and its peer, both connected."""
    left, right = socket.socketpair()
    left.settimeout(USUAL_S)
    right.settimeout(USUAL_S)
    if request.param == "tls":
        folder = make_certificates(tmp_path)
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        theirs.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        ours = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        ours.check_hostname = False
        ours.verify_mode = ssl.CERT_NONE
        wrapped: list[socket.socket] = []
        server = Thread(target=lambda: wrapped.append(theirs.wrap_socket(right, server_side=True)))
        server.start()
        left = ours.wrap_socket(left)
        server.join(60)
        (right,) = wrapped
    one = deadline_socket(left)
    yield one, right
    one.close()
    right.close()


def test_without_a_deadline_nothing_is_different(pair: tuple[socket.socket, socket.socket]) -> None:
    one, peer = pair
    assert one.gettimeout() == USUAL_S
    one.sendall(b"there")
    assert peer.recv(5) == b"there"
    peer.sendall(b"and back")
    assert one.recv(3) == b"and"
    buffer = bytearray(5)
    assert one.recv_into(buffer) == 5
    assert buffer == b" back"
    assert one.gettimeout() == USUAL_S


def test_waiting_ends_with_the_deadline_and_later_calls_are_patient_again(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, peer = pair
    with EndsBy(time.monotonic() + 0.05), pytest.raises(TimeoutError):
        one.recv(1)
    with EndsBy(time.monotonic() + 0.05), pytest.raises(TimeoutError):
        one.recv_into(bytearray(1))
    with EndsBy(time.monotonic() + 0.3), pytest.raises(TimeoutError):
        one.sendall(bytes(64 << 20))  # the other side never reads
    with EndsBy(time.monotonic() - 1):
        for call in (lambda: one.send(b"x"), lambda: one.recv(1), check_end):
            with pytest.raises(TimeoutError, match="deadline"):
                call()
    if not isinstance(one, ssl.SSLSocket):  # whose stream is broken off
        peer.sendall(b"x")
        assert one.recv(1) == b"x"
        assert one.gettimeout() == USUAL_S


def test_an_inner_deadline_cannot_be_later_than_an_outer_one() -> None:
    assert ends_s() == math.inf
    with EndsBy(100), EndsBy(200):
        assert ends_s() == 100
        with EndsBy(50):
            assert ends_s() == 50
        assert ends_s() == 100
    assert ends_s() == math.inf
