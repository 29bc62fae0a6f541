"""``objkv exporter``: serve store and index metrics to Prometheus."""

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated

import typer
from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
    start_http_server,
)

from objkv.assembly.backends import Backends, describe_index, open_backends
from objkv.cli.command import FINE, UNREACHABLE, Session, command, end_signals
from objkv.cli.options import time_option
from objkv.errors import ConfigError, StoreUnavailable
from objkv.ops.backends_view import BackendsView
from objkv.ops.exporter.metrics import StoreCollector
from objkv.ops.exporter.watch import BackendsWatch, End, Scans
from objkv.telemetry import NullRecorder

PORT = 9108
_LATE_MIN_S = 10.0


@command
def exporter(
    session: Session,
    host: Annotated[
        str, typer.Option(help="Listen address; 0.0.0.0 for all networks.", metavar="ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Listen port; 0 for any free port.", min=0, max=65_535, metavar="N")
    ] = PORT,
    every: Annotated[
        float, time_option("Time between checks", "--every", least=1, shown="15s")
    ] = 15.0,
    scan_every: Annotated[
        float | None,
        time_option("Also list the whole bulk store, at this interval", "--scan-every", least=60),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Check once, print the metrics and exit.")
    ] = False,
) -> int:
    """Serve store and index metrics to Prometheus."""
    logging.basicConfig(format="%(asctime)s %(levelname)s objkv: %(message)s")
    with open_backends(session.config, NullRecorder(), logs=False) as backends:
        watch, scans = _watch(session, backends, every), None
        if scan_every is not None:
            view = BackendsView.of(session.config, backends, "exporter")
            scans = Scans(view, every_s=scan_every, grace_s=session.config.sweep_grace_s)
        registry = CollectorRegistry()
        registry.register(StoreCollector(session.config, watch, scans))
        if once:
            _print_once(session, registry, watch, scans)
            is_seen = all(answer.is_up for answer in watch.answers().values())
            if scans is not None:
                is_seen = is_seen and scans.last is not None
            return FINE if is_seen else UNREACHABLE
        ProcessCollector(registry=registry)
        _serve(session, registry, watch, scans, (host, port))
    return FINE


def _serve(
    session: Session,
    registry: CollectorRegistry,
    watch: BackendsWatch,
    scans: Scans | None,
    address: tuple[str, int],
) -> None:
    with ExitStack() as stack, end_signals() as ended:
        host, port = address
        try:
            server, _ = start_http_server(port, host, registry)
        except OSError as exc:
            raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
        stack.callback(server.shutdown)
        watch.start()
        stack.callback(watch.stop)
        if scans is not None:
            scans.start()
            stack.callback(scans.stop)
        url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}"
        if not session.out.document({"url": url, "metrics": f"{url}/metrics"}):
            session.out.line(f"serving {url}/metrics")
        sys.stdout.flush()
        ended.wait()


def _print_once(
    session: Session, registry: CollectorRegistry, watch: BackendsWatch, scans: Scans | None
) -> None:
    with session.out.waiting("checking store and index"):
        if scans is not None:
            scans.scan()
        watch.ask_all()
    samples = [
        {"name": sample.name, "labels": sample.labels, "value": sample.value}
        for family in registry.collect()
        for sample in family.samples
    ]
    if not session.out.document(samples):
        sys.stdout.write(generate_latest(registry).decode())


def _watch(session: Session, backends: Backends, every_s: float) -> BackendsWatch:
    config = session.config
    is_own_index = config.index_url.startswith("bulk:")
    was_there = False

    def check_bulk() -> None:
        nonlocal was_there
        if session.has_bulk():
            backends.bulk.check()
            was_there = True
        elif was_there:  # before its first save, a replica has no folder
            raise StoreUnavailable(f"no such folder: {config.bulk_url}")

    def check_index() -> None:
        if config.index_url.startswith("sqlite:"):
            backends.index.usage()  # a check would write
        elif is_own_index:
            check_bulk()
        else:
            backends.index.check()

    checks: dict[End, Callable[[], None]] = {"bulk": check_bulk, "index": check_index}
    if backends.hot is not None:
        checks["hot"] = backends.hot.check
    return BackendsWatch(
        checks,
        backends.bulk,
        usage=None if is_own_index else backends.index.usage,
        facts=lambda: describe_index(config),
        every_s=every_s,
        late_s=max(every_s, _LATE_MIN_S),
    )
