"""Listens on the Unix socket that ``vllm serve`` would, and prints its arguments."""

import os
import signal
import socketserver
import sys
from http.server import BaseHTTPRequestHandler
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Healthy."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Of no interest."""

    def address_string(self) -> str:
        return ""


def main() -> None:
    if "broken" in sys.argv:
        sys.exit("(EngineCore pid=7) ValueError: no such model.\nmore")
    print(*sys.argv[1:], os.environ["OBJKV_BULK_URL"], flush=True)
    if key := os.environ.get("VLLM_API_KEY"):
        print(f"asks for the key {key}", flush=True)

    def end(*_: Any) -> None:
        print("ended in order", flush=True)
        sys.exit()

    signal.signal(signal.SIGTERM, end)
    path = sys.argv[sys.argv.index("--uds") + 1]
    with socketserver.UnixStreamServer(path, Handler) as server:
        server.serve_forever(0.01)


main()
