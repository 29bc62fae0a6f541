"""What would cross a network in clear is refused by the settings, unless it is allowed by name."""

import pytest

from objkv.config import Config, load_config
from objkv.config.urls import parse_url
from objkv.errors import ConfigError
from objkv.stores.s3.client import open_s3_access

HERE = ("127.0.0.1", "127.8.9.1", "localhost", "LOCALHOST.", "a.localhost", "[::1]")
ELSEWHERE = (
    *("h", "minio.svc", "10.0.0.7", "192.168.1.1", "[fe80::1]", "[::]"),
    *("127.0.0.1.example", "localhost.example", "127.1", "0x7f.0.0.1", "2130706433"),
)


def settings(**given: object) -> Config:
    return load_config({"bulk_url": "file:///dev/null/kv", **given}, environ={})


def url_of(scheme: str, *hosts: str) -> str:
    """A URL of ``hosts``, or of the last if the scheme takes only one."""
    named = ",".join(hosts if "+" in scheme else hosts[-1:])
    return f"{scheme}://u:p@{named}/0{'?service=s' if 'sentinel' in scheme else ''}"


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
@pytest.mark.parametrize("host", HERE)
def test_this_machine_is_spoken_to_in_clear(scheme: str, host: str) -> None:
    url = url_of(scheme, f"{host}:7000", host)
    assert settings(index_url=url).index_url == url


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
@pytest.mark.parametrize("host", ELSEWHERE)
def test_another_machine_is_not_though_it_is_one_of_several(scheme: str, host: str) -> None:
    url = url_of(scheme, "127.0.0.1", f"{host}:7000")
    with pytest.raises(ConfigError) as caught:
        settings(index_url=url)
    secure = scheme.replace("redis", "rediss", 1)
    assert f"write {secure}://, or set allow_plaintext to index" in str(caught.value)
    assert ":p@" not in str(caught.value)
    assert settings(index_url=url.replace("redis", "rediss", 1)).index_url != url
    assert settings(index_url=url, allow_plaintext="index").index_url == url
    with pytest.raises(ConfigError, match="index_url"):
        settings(index_url=url, allow_plaintext="bulk,agent")


@pytest.mark.parametrize("host", ELSEWHERE)
def test_an_s3_endpoint_on_another_machine_wants_https(host: str) -> None:
    place = {"bulk_url": "s3://bucket/p", "s3_endpoint_url": f"http://{host}:9000"}
    with pytest.raises(ConfigError, match=r"s3_endpoint_url .*write https://, or set allow_plain"):
        settings(**place)
    settings(**place, allow_plaintext="index, bulk")
    with pytest.raises(ConfigError, match="name what may be reached without TLS: agent, bulk"):
        settings(**place, allow_plaintext="true")
    settings(**place | {"s3_endpoint_url": f"https://{host}:9000"})


def test_an_s3_endpoint_that_is_not_used_is_not_judged() -> None:
    assert settings(s3_endpoint_url="http://minio.svc").s3_endpoint_url == "http://minio.svc"


@pytest.mark.parametrize("host", HERE)
def test_an_s3_endpoint_on_this_machine_may_be_http(host: str) -> None:
    settings(bulk_url="s3://bucket", s3_endpoint_url=f"http://{host}:9000")


@pytest.mark.parametrize(
    ("setting", "url"),
    [
        ("index_url", "redis://evil?x=@localhost"),
        ("s3_endpoint_url", "http://evil/@localhost"),
        ("s3_endpoint_url", "http://evil#@localhost"),
        ("s3_endpoint_url", "HTTP://evil"),
    ],
)
def test_what_only_looks_like_this_machine_is_refused(setting: str, url: str) -> None:
    with pytest.raises(ValueError, match=f"{setting}: "):
        parse_url(setting, url)
    assert parse_url("index_url", "redis://localhost:1@evil").is_far


@pytest.mark.parametrize("prefix", ["", "a:b", "a*", "a b", "a/b", "x" * 65])
def test_a_redis_prefix_cannot_reach_into_another(prefix: str) -> None:
    """A colon ends it, and no character of it is a pattern: ``a:*`` allows nobody ``ab:…``."""
    with pytest.raises(ConfigError, match="redis_prefix"):
        settings(redis_prefix=prefix)


def test_an_endpoint_that_only_awss_own_settings_name_is_refused_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://minio.svc:9000")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(ConfigError, match=r"http://minio\.svc:9000.* set allow_plaintext"):
        open_s3_access(settings(bulk_url="s3://bucket"))
    open_s3_access(settings(bulk_url="s3://bucket", allow_plaintext="bulk")).close()
