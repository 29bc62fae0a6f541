"""No memory is allocated for bytes that a server announces beyond the request."""

import io
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from objkv.errors import StoreError
from objkv.stores.s3.body import VALUE_BYTES_MAX, read_all
from objkv.stores.s3.store import S3Store
from tests.support.servers.s3_stores import s3_store

HUGE = VALUE_BYTES_MAX + 1


class Liar(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        part = 206 if "part" in self.path else 200
        self.send_response(part)
        self.send_header("Content-Length", "9" if part == 206 else str(HUGE))
        self.end_headers()
        self.wfile.write(b"123456789")
        self.close_connection = True


@pytest.fixture
def store() -> Iterator[S3Store]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with s3_store(f"http://127.0.0.1:{server.server_port}") as store:
        yield store
    server.shutdown()
    server.server_close()


def test_a_part_longer_than_the_range_that_was_asked_for_is_an_error(store: S3Store) -> None:
    assert store.get_range("part", 0, 9) == b"123456789"
    with pytest.raises(StoreError, match="9 bytes, more than the limit of 8"):
        store.get_range("part", 0, 8)


def test_a_value_longer_than_any_is_an_error(store: S3Store) -> None:
    for read in (lambda: store.get("whole"), lambda: store.get_range("whole", 0, 8)):
        with pytest.raises(StoreError, match=f"{HUGE} bytes, more than the limit"):
            read()


class Body(io.BytesIO):
    pass


def test_so_is_a_body_whose_length_nobody_announced() -> None:
    bound_s = time.monotonic() + 60
    assert read_all({"Body": Body(b"123")}, bound_s, 3) == b"123"
    body = Body(b"1234")
    with pytest.raises(StoreError, match="4 bytes, more than the limit of 3"):
        read_all({"Body": body}, bound_s, 3)
    assert body.closed
