"""What a bucket and a GPU cost: the list prices of an endpoint's provider, or settings."""

import ipaddress
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from objkv.config.aws import s3_endpoint
from objkv.config.schema import Config
from objkv.config.sources import Resolved
from objkv.config.urls import is_directory_bucket, parse_url
from objkv.errors import ConfigError

_UNKNOWN: Final = " is not known"
RANGE_BYTES: Final = 8 << 20
"""Larger payloads are read in ranges of this size, several at once. At the 85 MB/s that S3 gives a
connection, a range takes several times its latency."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in US dollars."""

    gb_month: float
    """Price of 10^9 bytes for a month."""
    per_1000_puts: float
    per_1000_gets: float
    gpu_hour: float | None = None
    """Of one GPU; None if not given, because it has no list price."""
    put_gb: float = 0.0
    """Price of 10^9 bytes that are put."""
    source: str = "given"
    """Whose prices these are."""

    @property
    def is_guessed(self) -> bool:
        """Whether they are S3 Standard's because the endpoint is not known."""
        return self.source.endswith(_UNKNOWN)

    @property
    def is_free(self) -> bool:
        """Whether puts and storage have no price."""
        return not (self.gb_month or self.per_1000_puts or self.put_gb)


LIST_PRICES: Final = Prices(0.023, 0.005, 0.0004, source="S3 Standard")
"""S3 Standard, us-east-1, as of November 2026. Other providers are of that month too."""
_EXPRESS: Final = Prices(0.11, 0.00113, 0.00003, put_gb=0.0032, source="S3 Express One Zone")
_PROVIDERS: Final = {
    "amazonaws.com": LIST_PRICES,
    "amazonaws.com.cn": LIST_PRICES,
    "storage.googleapis.com": Prices(0.02, 0.005, 0.0004, source="Google Cloud Storage"),
    "r2.cloudflarestorage.com": Prices(0.015, 0.0045, 0.00036, source="Cloudflare R2"),
    "backblazeb2.com": Prices(0.006, 0.0, 0.0004, source="Backblaze B2"),
}
"""By the end of the endpoint's host name."""
_PRIVATE_ENDS: Final = (".localhost", ".local", ".internal", ".svc", ".lan", ".home.arpa")
_NOTHING: Final = Prices(0.0, 0.0, 0.0, source="")
_FOLDER: Final = replace(_NOTHING, source="a folder")


def prices_of(config: Config, *, folder: Prices = _FOLDER) -> Prices:
    """Return the prices of the bucket and of a GPU. Settings replace those of the endpoint; one
    that is not known costs what S3 Standard does. Names are not resolved."""
    known = _known(config, folder)
    settings = {"gb_month": config.price_gb_month, "per_1000_puts": config.price_puts}
    given = {name: price for name, price in settings.items() if price is not None}
    source = "settings" if len(given) == 2 else known.source  # both
    return replace(known, **given, gpu_hour=config.price_gpu_hour, source=source)


def audit_prices(resolved: Resolved) -> Prices:
    """Return the prices of a report: a folder costs what S3 Standard does, and savings are priced
    only if ``price_gpu_hour`` was set."""
    prices = prices_of(resolved.config, folder=LIST_PRICES)
    if resolved.sources["price_gpu_hour"] == "default":
        return replace(prices, gpu_hour=None)
    return prices


def is_private_host(host: str) -> bool:
    """Whether ``host`` is an address, or a name, that is not of the internet."""
    name = host.strip("[]").rstrip(".").lower()
    try:
        return not ipaddress.ip_address(name).is_global
    except ValueError:
        return "." not in name or name.endswith(_PRIVATE_ENDS)


def _known(config: Config, folder: Prices) -> Prices:
    bulk = parse_url("bulk_url", config.bulk_url)
    if bulk.scheme != "s3":
        return folder
    endpoint = None
    with suppress(ConfigError):  # the store reports it
        endpoint = s3_endpoint(config)[1]
    standard = _EXPRESS if is_directory_bucket(bulk.host) else LIST_PRICES
    if endpoint is None:
        return standard
    host = endpoint.host.rstrip(".").lower()
    for end, prices in _PROVIDERS.items():
        if host == end or host.endswith(f".{end}"):
            return standard if prices is LIST_PRICES else prices
    if is_private_host(host):
        return replace(_NOTHING, source=f"{host}, a private address")
    return replace(LIST_PRICES, source=f"S3 Standard, since {host}{_UNKNOWN}")
