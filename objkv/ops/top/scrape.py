"""One look at one ``/metrics``: its numbers by name, summed over labels, or why there are none."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Final
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from objkv.config.urls import is_this_machine, passwords_in, without_password
from objkv.errors import ConfigError
from objkv.redact import keep_secret, without_secrets

ANSWER_BYTES_MAX: Final = 16 << 20
"""A server with hundreds of histograms tells about one."""
_TOLD_MAX: Final = 120
_ERRNO = re.compile(r"^\[Errno \d+\] ")


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one endpoint told, and when."""

    at_s: float
    """By the clock that rates are taken from."""
    values: Mapping[str, float]
    """By name, ``:`` as ``_``; empty where it did not answer."""
    problem: str | None = None
    """Why there are no values."""


class MetricsSource:
    """An endpoint with metrics: a replica, or the exporter."""

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float,
        clock: Callable[[], float] = monotonic,
        is_exact: bool = False,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """``url``: of the server, with or without ``/metrics`` or ``/v1``; ``is_exact``: any other
        path is that of the metrics. Raises ``ConfigError``."""
        self.url = _metrics_url(url, is_exact=is_exact)
        self._deadline_s = deadline_s
        self._clock = clock
        self._http = httpx.Client(
            timeout=deadline_s,
            # What is on this machine is never asked through a proxy.
            trust_env=not is_this_machine(urlsplit(self.url).hostname or ""),
            follow_redirects=False,
            transport=transport,
        )

    def __repr__(self) -> str:
        return f"<Source {self.name}>"

    @property
    def name(self) -> str:
        """Host and port, without a password."""
        parts = urlsplit(self.url)
        return parts.netloc.rpartition("@")[2] + parts.path.removesuffix("/metrics")

    def scrape(self) -> Scrape:
        """Ask once; never raises. Ends within the deadline, or the first read after it."""
        began = self._clock()
        try:
            text = self._text(began)
            return Scrape(self._clock(), values_of(text))
        except httpx.HTTPError as exc:
            said = _ERRNO.sub("", str(exc)) or type(exc).__name__
        except Exception as exc:  # the parser raises whatever it stumbles over
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
    """Counters and sums added up over labels; of gauges that say what is open, the largest.
    Raises ValueError for what Prometheus could not read."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.replace(":", "_")
            value = float(sample.value)
            if name.endswith(("_bucket", "_created")) or value != value:
                continue
            old = values.get(name, 0.0)
            is_state = "_breaker_open_" in name or name.endswith("_seconds_max")
            values[name] = max(old, value) if is_state else old + value
            if "end" in sample.labels:
                values[f"{name}:{sample.labels['end']}"] = value
    return values


def _metrics_url(url: str, *, is_exact: bool) -> str:
    keep_secret(*passwords_in(url))
    shown = without_secrets(without_password(url))
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        host, _port = parts.hostname, parts.port
        httpx.URL(whole)
    except (ValueError, httpx.InvalidURL) as exc:
        # What it follows from may quote more of the address.
        raise ConfigError(f"endpoint {shown}: {without_secrets(str(exc))}") from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ConfigError(f"endpoint {shown}: give it as http://host:port, or https://")
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    if is_exact and path:
        return whole
    return parts._replace(path=f"{path}/metrics").geturl()
