"""One scrape of one ``/metrics``: values by name, summed over labels, or the error."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from objkv.config.urls import parse_endpoint
from objkv.redact import without_secrets

ANSWER_BYTES_MAX: Final = 16 << 20
"""A server with hundreds of histograms sends about 1 MiB."""
_TOLD_MAX: Final = 120
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")


@dataclass(frozen=True, slots=True)
class Scrape:
    """The result of one scrape."""

    at_s: float
    """Time by the clock that rates use."""
    values: Mapping[str, float]
    """Values by name, with ``_`` for ``:``; empty if the scrape failed."""
    problem: str | None = None
    """The reason of a failed scrape."""


class MetricsSource:
    """An endpoint with metrics: a replica, the exporter or a node agent."""

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float,
        clock: Callable[[], float] = monotonic,
        socket: Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """``url``: the server's URL, with or without ``/metrics`` or ``/v1``.
        ``socket``: the Unix socket to connect to, whatever host the URL names. Raises
        ``ConfigError``."""
        self.url = _metrics_url(url)
        self._place = parse_endpoint(self.url)[1]
        self._deadline_s = deadline_s
        self._clock = clock
        self._socket = socket
        if socket is not None:
            transport = httpx.HTTPTransport(uds=str(socket))
        self._http = httpx.Client(
            timeout=deadline_s,
            # Servers on this machine are never reached through a proxy.
            trust_env=self._place.is_far,
            follow_redirects=False,
            transport=transport,
        )

    @property
    def name(self) -> str:
        """Host, port and path, without a password; of a node agent the path of its socket."""
        if self._socket is not None:
            return str(self._socket).removesuffix(".http")
        shown = self._place.shown.partition("://")[2]
        return shown.removeprefix("***@").removesuffix("/metrics")

    def scrape(self) -> Scrape:
        """Scrape once. Never raises. Ends at the deadline, or with the first read after it."""
        began = self._clock()
        try:
            text = self._text(began)
            return Scrape(self._clock(), values_of(text))
        except httpx.HTTPError as exc:
            said = _ERRNO.sub("", str(exc)) or type(exc).__name__
        except Exception as exc:  # the parser may raise anything
            said = f"no metrics: {exc}"
        return Scrape(self._clock(), {}, without_secrets(said)[:_TOLD_MAX])

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def _text(self, began: float) -> str:
        with self._http.stream("GET", self.url) as answer:
            if answer.status_code != httpx.codes.OK:
                raise ValueError(f"HTTP {answer.status_code}")
            content = bytearray()
            for piece in answer.iter_bytes():
                content += piece
                if len(content) > ANSWER_BYTES_MAX:
                    raise ValueError(f"more than {ANSWER_BYTES_MAX >> 20} MiB")
                if self._clock() - began > self._deadline_s:
                    raise httpx.ReadTimeout("too slow")
        return content.decode("utf-8")


def values_of(text: str) -> dict[str, float]:
    """Return finite values summed over labels. Raises ValueError for text that is not in Prometheus
    format."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.replace(":", "_")
            value = float(sample.value)
            if name.endswith(("_bucket", "_created")) or not isfinite(value):
                continue
            values[name] = values.get(name, 0.0) + value
    return values


def _metrics_url(url: str) -> str:
    place = parse_endpoint(url)[1]
    path = f"/{place.path}".removesuffix("/metrics").removesuffix("/v1").rstrip("/")
    return f"{place.root}{path}/metrics"
