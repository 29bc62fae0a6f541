"""Prices of buckets, by their endpoint."""

from dataclasses import replace

import pytest

from objkv.config import load_config
from objkv.config.prices import LIST_PRICES, Prices, prices_of


def of(endpoint: str | None = None, **settings: str) -> Prices:
    given = {"bulk_url": "s3://bucket", "index_url": "sqlite:///dev/null/i"} | settings
    if endpoint is not None:
        given["s3_endpoint_url"] = f"https://{endpoint}"
    return prices_of(load_config(given, environ={}))


@pytest.mark.parametrize(
    ("endpoint", "source", "gb_month"),
    [
        (None, "S3 Standard", 0.023),
        ("s3.eu-west-1.amazonaws.com", "S3 Standard", 0.023),
        ("bucket.vpce-1.s3.us-east-1.vpce.amazonaws.com", "S3 Standard", 0.023),
        ("storage.googleapis.com", "Google Cloud Storage", 0.02),
        ("0abc.r2.cloudflarestorage.com:443", "Cloudflare R2", 0.015),
        ("s3.us-west-004.backblazeb2.com", "Backblaze B2", 0.006),
        ("store.example.com", "S3 Standard, since store.example.com is not known", 0.023),
        ("amazonaws.com.example.com", "S3 Standard, since amazonaws.com.example.com is not known",
         0.023),
    ],
)  # fmt: skip
def test_providers_are_known_by_their_endpoint(
    endpoint: str | None, source: str, gb_month: float
) -> None:
    found = of(endpoint)
    assert (found.source, found.gb_month) == (source, gb_month)
    assert not found.is_free


@pytest.mark.parametrize(
    "endpoint",
    [
        *("10.1.2.3:9000", "192.168.0.9", "127.0.0.1:9000", "[::1]:9000", "[fd00::7]"),
        *("100.64.1.1", "minio:9000", "minio.kv.svc", "minio.kv.svc.cluster.local"),
        *("rgw.internal", "localhost"),
    ],
)
def test_private_addresses_have_no_price(endpoint: str) -> None:
    found = of(endpoint)
    assert found.is_free
    assert "private address" in found.source
    assert not of("8.8.8.8").is_free
    assert of(bulk_url="file:///dev/null/kv").is_free


@pytest.mark.parametrize("endpoint", [None, "10.1.2.3:9000", "0abc.r2.cloudflarestorage.com"])
def test_reports_price_a_folder_as_s3_standard_whatever_the_endpoint(endpoint: str | None) -> None:
    given = {"bulk_url": "file:///dev/null/kv", "index_url": "sqlite:///dev/null/i"}
    if endpoint is not None:
        given["s3_endpoint_url"] = f"https://{endpoint}"
    found = prices_of(load_config(given, environ={}), folder=LIST_PRICES)
    assert replace(found, gpu_hour=None) == LIST_PRICES
    config = load_config(given | {"price_gb_month": "0.5"}, environ={})
    found = prices_of(config, folder=LIST_PRICES)
    assert (found.gb_month, found.per_1000_puts) == (0.5, LIST_PRICES.per_1000_puts)


def test_settings_replace_what_the_endpoint_says() -> None:
    found = of("10.0.0.1", price_gb_month="0.01", price_gpu_hour="2.5")
    assert (found.gb_month, found.per_1000_puts, found.gpu_hour) == (0.01, 0, 2.5)
    both = of("store.example.com", price_gb_month="0", price_puts="0")
    assert both.is_free
    assert both.source == "settings"
    assert of(price_puts="1").gb_month == LIST_PRICES.gb_month


def test_a_directory_bucket_is_priced_as_express() -> None:
    for endpoint in (None, "s3express-usw2-az1.us-west-2.amazonaws.com"):
        assert of(endpoint, bulk_url="s3://kv--usw2-az1--x-s3").put_gb > 0


def test_endpoints_of_awss_own_variables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://10.0.0.7")
    assert of().is_free
