"""A server that sends every value in chunks is asked once for each, not twice."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.servers.s3_stores import s3_store

VALUE = b"0123456789"


class ChunkedServer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[str]

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("ETag", '"a"')
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(VALUE), VALUE))


@pytest.fixture
def url() -> Iterator[str]:
    ChunkedServer.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), ChunkedServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_only_the_first_get_is_sent_twice(url: str) -> None:
    with s3_store(url) as store:
        for count in (2, 3, 4):
            buffer = bytearray(len(VALUE))
            assert store.get_into("k", memoryview(buffer)) == len(VALUE)
            assert bytes(buffer) == VALUE
            assert len(ChunkedServer.asked) == count


def test_a_value_that_does_not_fit_is_still_refused(url: str) -> None:
    with s3_store(url) as store:
        for _ in range(2):
            with pytest.raises(Exception, match="10 bytes"):
                store.get_into("k", memoryview(bytearray(9)))
