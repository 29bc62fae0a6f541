"""A real Prometheus with the example's configuration, and pages for it to scrape.

The server needs no root and keeps everything in the folder it is given.
"""

import json
import re
import shutil
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.support.needs import need
from tests.support.servers.ports import free_port
from tests.support.servers.process import Daemon
from tests.support.waiting import wait_for_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "monitoring"
START_S = 120.0
Result = list[dict[str, Any]]


def need_prometheus() -> None:
    if not (shutil.which("prometheus") and shutil.which("promtool")):
        need("prometheus is missing: apt-get install -y --no-install-recommends prometheus")


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, **parameters: str) -> Any:
        """The data that its API answers. A query that it refuses raises ``HTTPError``."""
        asked = urllib.parse.urlencode(parameters)
        with self._http.open(f"{self.url}/api/v1/{path}?{asked}", timeout=60) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> Result:
        found: Result = self.get("query", query=expression)["result"]
        return found

    def scraped(self, job: str, times: int) -> bool:
        """Whether every target of ``job`` was scraped so often, lately."""
        counts = self.query(f'count_over_time(up{{job="{job}"}}[10m])')
        return bool(counts) and all(float(one["value"][1]) >= times for one in counts)

    def targets(self) -> list[tuple[str, str, str]]:
        active = self.get("targets")["activeTargets"]
        return [(one["labels"]["job"], one["health"], one["lastError"]) for one in active]


@contextmanager
def prometheus(
    folder: Path, targets: Mapping[str, Sequence[str]], *, every_s: int = 1
) -> Iterator[Prometheus]:
    """The example's configuration, but with ``targets`` by job, scraped often."""
    folder.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load((EXAMPLE / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{every_s}s", "evaluation_interval": f"{every_s}s"}
    assert {job["job_name"] for job in config["scrape_configs"]} == set(targets)
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
    shutil.copy(EXAMPLE / "alerts.yml", folder)
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={address}", "--log.level=warn"]
    daemon = Daemon(command, folder / "prometheus.log").start()
    try:
        server = Prometheus(f"http://{address}")

        def is_ready() -> bool:
            daemon.check()
            try:
                with server._http.open(f"{server.url}/-/ready", timeout=5):
                    return True
            except OSError:
                return False

        wait_for_server(is_ready, "Prometheus", bound_s=START_S)
        yield server
    finally:
        daemon.kill()


@contextmanager
def serving(pages: Sequence[str]) -> Iterator[str]:
    """An address where ``/metrics`` is one page after the other, and at last always the last."""
    assert pages
    left = list(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = left.pop(0) if len(left) > 1 else left[0]
            if "openmetrics" in self.headers.get("Accept", ""):
                # As prometheus_client escapes names for whoever asks so, Prometheus 2 among them.
                page = re.sub(r"^(# \w+ )?vllm:", r"\1vllm_", page, flags=re.MULTILINE)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
