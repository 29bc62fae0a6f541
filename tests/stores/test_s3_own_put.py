"""A conditional put that is sent twice reports what its first attempt did."""

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.servers.s3_stores import s3_store


class Server(BaseHTTPRequestHandler):
    """Stores each new value, and answers the first put of a key in the way ``loses`` says."""

    protocol_version = "HTTP/1.1"
    values: dict[str, bytes]
    asked: list[tuple[str, str]]
    loses = ""
    has_md5 = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_PUT(self) -> None:
        self.asked.append(("PUT", self.path))
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path in self.values:
            self._answer(412)
            return
        self.values[self.path] = body
        loses, key = self.loses, self.path.rpartition("/")[2]
        if key != "first" and loses == "chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"0\r\n\r\n")
        elif key != "first" and loses in ("closed", "rival"):
            self.values[self.path] = body if loses == "closed" else b"rival"
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif key != "first" and loses == "unavailable":
            self._answer(503)
        else:
            self._answer(200)

    def do_HEAD(self) -> None:
        self._read("HEAD")

    def do_GET(self) -> None:
        self._read("GET")

    def _read(self, method: str) -> None:
        self.asked.append((method, self.path))
        value = self.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"", sends=method == "GET")

    def _answer(self, status: int, value: bytes = b"", *, sends: bool = False) -> None:
        tag = hashlib.md5(value, usedforsecurity=False).hexdigest() if self.has_md5 else "kms-1"
        self.send_response(status)
        self.send_header("ETag", f'"{tag}"')
        self.send_header("Content-Length", str(len(value)))
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 10:00:00 GMT")
        self.end_headers()
        if sends:
            self.wfile.write(value)


@pytest.fixture
def url() -> Iterator[str]:
    Server.values, Server.asked, Server.loses, Server.has_md5 = {}, [], "", True
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("has_md5", [True, False])
@pytest.mark.parametrize("loses", ["chunked", "closed", "unavailable"])
def test_a_put_that_wrote_is_true(url: str, loses: str, has_md5: bool) -> None:
    Server.loses, Server.has_md5 = loses, has_md5
    with s3_store(url) as store:
        assert store.put_if_absent("first", b"0")
        assert store.put_if_absent("k", b"value")
        assert store.get("k") == b"value"


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_put_that_another_writer_beat_is_false(url: str, is_direct: bool) -> None:
    with s3_store(url, is_direct=is_direct) as store:
        assert store.put_if_absent("first", b"0")
        assert store.put_if_absent("k", b"other")
        before = len(Server.asked)
        assert not store.put_if_absent("k", b"value")
        assert Server.asked[before:] == [("PUT", "/kv-cache/p/k")]


def test_a_repeated_put_that_another_writer_beat_is_false(url: str) -> None:
    with s3_store(url) as store:
        assert store.put_if_absent("first", b"0")
        Server.loses = "unavailable"
        assert store.put_if_absent("k", b"other")
        assert not store.put_if_absent("k", b"value")


def test_a_lost_put_that_another_writer_beat_is_false(url: str) -> None:
    with s3_store(url) as store:
        assert store.put_if_absent("first", b"0")
        Server.loses = "rival"
        assert not store.put_if_absent("k", b"value")
        assert store.get("k") == b"rival"
