"""AWS's own settings: which region signs, and credentials that no request can carry."""

import re
from pathlib import Path
from socket import socket
from typing import Any

import pytest

from objkv.assembly.fetchers import open_s3
from objkv.config import load_config
from objkv.errors import ConfigError, StoreDenied
from objkv.telemetry import NullRecorder
from tests.support.servers.listener import Listener

_EMPTY = b'<?xml version="1.0"?><ListBucketResult></ListBucketResult>'
_WRONG = b"<Error><Code>AuthorizationHeaderMalformed</Code></Error>"
_SCOPE = re.compile(rb"(?i)authorization: \S+ Credential=[^/]*/[^/]*/([^/]*)/s3/aws4_request,")


class OneRegion(Listener):
    """Lists an empty bucket for requests whose signature names its region, and refuses others."""

    def __init__(self, region: str) -> None:
        self._region = region.encode()
        super().__init__()

    def serve(self, connection: socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (more := connection.recv(65536)):
                return
            head += more
        signed = _SCOPE.search(head)
        fits = signed is not None and signed[1] == self._region
        status, body = (b"200 OK", _EMPTY) if fits else (b"400 Bad Request", _WRONG)
        connection.sendall(
            b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Type: application/xml\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (status, len(body), body)
        )


def check(**settings: Any) -> None:
    """Check the bucket of ``settings`` with one request."""
    given = {"bulk_url": "s3://bucket/p", "s3_addressing": "path", "load_deadline_ms": 2000}
    store = open_s3(load_config(given | settings, environ={}), NullRecorder())
    try:
        store.check()
    finally:
        store.close()


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of AWS's profiles; no variable of this machine applies."""
    for name in ("REGION", "DEFAULT_REGION", "PROFILE", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-key")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


@pytest.mark.parametrize("by", ["s3_endpoint_url", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize(
    ("environ", "profile", "setting", "region"),
    [
        ({}, "", None, "us-east-1"),
        ({}, "eu-north-1", None, "eu-north-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-2"}, "eu-north-1", None, "eu-west-2"),
        ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "x-1"}, "eu-north-1", None, "eu-west-1"),
        ({"AWS_REGION": "eu-west-1\n"}, "", None, "eu-west-1"),
        ({"AWS_REGION": "", "AWS_DEFAULT_REGION": "eu-west-2\n"}, "", None, "eu-west-2"),
        ({"AWS_REGION": "eu-west-1"}, "eu-north-1", "ap-south-1", "ap-south-1"),
    ],
)
def test_the_region_of_a_signature_is_that_of_the_setting_then_awss(
    by: str,
    environ: dict[str, str],
    profile: str,
    setting: str | None,
    region: str,
    aws: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if profile:
        (aws / "config").write_text(f"[default]\nregion = {profile}\n")
    with OneRegion(region) as server:
        url = "http://{}:{}".format(*server.address)
        settings: dict[str, Any] = {"s3_region": setting}
        if by == "s3_endpoint_url":
            settings[by] = url
        else:
            monkeypatch.setenv(by, url)
        check(**settings)
        with pytest.raises(StoreDenied, match="another region"):
            check(**settings | {"s3_region": "us-west-2"})


@pytest.mark.parametrize(
    "name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
)
@pytest.mark.parametrize("value", ["secret-one\n", "secret-one\r\n", "secret one", "sécret-one"])
def test_malformed_credentials_of_aws_are_named_and_not_shown(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name} contains a space, a line break") as caught:
        check(s3_endpoint_url="http://127.0.0.1:9")
    assert "one" not in str(caught.value)


def test_awss_credentials_are_not_judged_if_they_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "malformed\n")
    with OneRegion("us-east-1") as server:
        url = "http://{}:{}".format(*server.address)
        check(s3_endpoint_url=url, s3_access_key_id="key\n", s3_secret_access_key="secret\n")


@pytest.mark.parametrize("setting", ["s3_access_key_id", "s3_secret_access_key"])
@pytest.mark.parametrize("value", ["secret one", "secret\none", "sécret-one"])
def test_malformed_credentials_of_settings_are_named_and_not_shown(
    setting: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=f"{setting} .*printable ASCII") as caught:
        load_config({setting: value}, environ={})
    assert "one" not in str(caught.value)


@pytest.mark.parametrize("setting", ["redis_password", "redis_username", "sentinel_password"])
def test_a_line_break_within_a_login_of_redis_is_named_and_its_end_is_not(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} .*a line break") as caught:
        load_config({setting: "secret\none"}, environ={})
    assert "one" not in str(caught.value)
    assert getattr(load_config({setting: "sécret one\r\n"}, environ={}), setting) == "sécret one"


def test_malformed_credentials_of_a_profile_are_denied_and_not_shown(
    aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (aws / "credentials").write_text(
        "[default]\naws_access_key_id = sécret-one\naws_secret_access_key = x\n"
    )
    with pytest.raises(StoreDenied, match="correct them in the AWS profile") as caught:
        check(s3_endpoint_url="http://127.0.0.1:9")
    assert "one" not in str(caught.value)
