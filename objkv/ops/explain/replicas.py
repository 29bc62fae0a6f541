"""What replicas tell of loads that they did not make, and of saves that they dropped.

Their counters are of all requests since they started, and not of one prompt: they can say that a
replica refuses matches, never that it refused this one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from objkv.config.urls import passwords_in, without_password
from objkv.errors import ConfigError, StoreUnavailable
from objkv.redact import keep_secret, without_secrets

_PREFIX: Final = "vllm:objkv_"
_TEXT_BYTES_MAX: Final = 16 << 20
_TOLD: Final = {
    "admission_refused": "{n} matches not loaded, because computing was measured to be sooner",
    "admission_cut": "{n} matches of which a tail was not loaded, for the same reason",
    "load_failures": "{n} loads of which something was computed after all",
    "load_refused": "{n} chunks not loaded, because the queue was full",
    "lookup_errors": "{n} lookups that the index did not answer",
    "lookup_deadlines": "{n} lookups that took too long",
    "lookup_refused": "{n} lookups not made, because the queue was full",
    "save_drops": "{n} chunks not saved: no slab, queue full, or too late",
    "save_errors": "{n} chunks not saved, because a store failed",
    "saves_shed": "{n} chunks not saved, because the store was left alone or asked too much",
    "save_over_quota": "{n} chunks not saved, because the quota is used up",
    "publish_errors": "{n} payloads saved, but not announced",
    "adapters_unknown": "{n} requests not shared, because their adapter cannot be told",
}


@dataclass(frozen=True, slots=True)
class ReplicaTold:
    """One replica's counters, since it started."""

    endpoint: str
    """Its address, without a password."""
    counters: dict[str, int]
    """Of those that mean something was not loaded or not saved, the ones above 0."""
    sentences: tuple[str, ...]
    problem: str | None
    """Why nothing could be read, if so."""


def ask_replica(
    endpoint: str, *, deadline_s: float = 5.0, clock: Callable[[], float] = monotonic
) -> ReplicaTold:
    """Read ``endpoint``'s metrics: its base address, or that of its metrics. Raises
    ``ConfigError`` for what is no address."""
    keep_secret(*passwords_in(endpoint))
    shown = without_secrets(without_password(endpoint))
    url = _metrics_url(endpoint, shown)
    try:
        return _told(shown, _read(url, deadline_s, clock))
    except (StoreUnavailable, httpx.HTTPError) as exc:
        return ReplicaTold(shown, {}, (), without_secrets(f"no metrics: {exc}"))
    except Exception as exc:  # the parser raises whatever it stumbles over
        why = f"what it answers are no metrics: {exc}"
        return ReplicaTold(shown, {}, (), without_secrets(why))


def _metrics_url(endpoint: str, shown: str) -> httpx.URL:
    try:
        url = httpx.URL(endpoint if "://" in endpoint else f"http://{endpoint}")
    except httpx.InvalidURL as exc:
        raise ConfigError(f"--endpoint {shown!r}: {without_secrets(str(exc))}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--endpoint {shown!r}: give http://HOST:PORT of a replica")
    return url.copy_with(path="/metrics") if url.path.rstrip("/") in ("", "/v1") else url


def _read(url: httpx.URL, deadline_s: float, clock: Callable[[], float]) -> str:
    began = clock()
    with httpx.stream("GET", url, timeout=deadline_s, follow_redirects=False) as answer:
        if answer.status_code != httpx.codes.OK:
            raise StoreUnavailable(f"HTTP {answer.status_code}")
        content = bytearray()
        for piece in answer.iter_bytes():
            content += piece
            if len(content) > _TEXT_BYTES_MAX:
                raise StoreUnavailable(f"longer than {_TEXT_BYTES_MAX} bytes")
            if clock() - began > deadline_s:  # the client's own bound is for each read
                raise StoreUnavailable("too slow")
    return content.decode("utf-8", "replace")


def _told(endpoint: str, text: str) -> ReplicaTold:
    sums: dict[str, float] = {}
    is_ours = False
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(_PREFIX):
            continue
        is_ours = True
        name = family.name.removeprefix(_PREFIX)
        for sample in family.samples:
            if name in _TOLD and not sample.name.endswith("_created"):
                sums[name] = sums.get(name, 0.0) + sample.value
    if not is_ours:
        return ReplicaTold(endpoint, {}, (), "it has no metrics of objkv: is its connector loaded?")
    found = {n: int(sums[n]) for n in _TOLD if math.isfinite(sums.get(n, 0.0)) and sums.get(n)}
    told = tuple(_TOLD[name].format(n=f"{count:,}") for name, count in found.items())
    return ReplicaTold(endpoint, found, told, None)
