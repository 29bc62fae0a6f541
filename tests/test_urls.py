"""URLs of settings: what is understood, what is refused, and that no password ever shows."""

import os
import re
import traceback
from collections.abc import Callable
from unittest.mock import patch
from urllib.parse import unquote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from objkv import redact
from objkv.assembly.backends import open_backends
from objkv.config import load_config, resolve_config
from objkv.config.urls import FORMS, check_proxies, parse_url
from objkv.errors import ConfigError, ObjkvError
from objkv.ops.top import MetricsSource
from objkv.ops.warm.endpoint import Endpoint
from objkv.redact import without_secrets
from objkv.stores.s3.client import open_s3_access
from objkv.telemetry import NullRecorder


@pytest.mark.parametrize(
    ("url", "hosts", "path", "service", "is_tls"),
    [
        ("redis://h", (("h", 0),), "", "", False),
        ("rediss://h:7000/3", (("h", 7000),), "3", "", True),
        ("redis://[::1]:7000/", (("::1", 7000),), "", "", False),
        ("redis+cluster://a,b:2,[fe80::1]:3", (("a", 0), ("b", 2), ("fe80::1", 3)), "", "", False),
        ("rediss+sentinel://a,b:2/1?service=s", (("a", 0), ("b", 2)), "1", "s", True),
    ],
)
def test_urls_of_redis_are_understood(
    url: str, hosts: tuple[tuple[str, int], ...], path: str, service: str, is_tls: bool
) -> None:
    place = parse_url("index_url", url)
    assert (place.hosts, place.path, place.service, place.is_tls) == (hosts, path, service, is_tls)
    assert (place.user, place.password, place.shown) == ("", "", url)


def test_user_and_password_are_decoded_and_not_shown() -> None:
    place = parse_url("index_url", "redis://me:p%40s%2Fs@h/1")
    assert (place.user, place.password, place.path) == ("me", "p@s/s", "1")
    assert place.shown == "redis://***@h/1"
    assert "p%40" not in repr(place)
    assert "p@s" not in repr(place)
    assert without_secrets("wrong password p@s/s") == "wrong password ***"


def test_a_bucket_and_its_prefix_are_taken_as_written() -> None:
    place = parse_url("bulk_url", "s3://123456789012/p")
    assert place.host == "123456789012"
    arn = "arn:aws:s3:eu-west-1:123456789012:accesspoint:kv"
    assert parse_url("bulk_url", f"s3://{arn}/p").host == arn
    place = parse_url("bulk_url", "s3://my.bucket-1_x/a b/%20c/")
    assert (place.host, place.path) == ("my.bucket-1_x", "a b/%20c")


@pytest.mark.parametrize(
    ("setting", "url", "words"),
    [
        ("bulk_url", "/mnt/x", "a path needs file:// in front of it"),
        ("index_url", "/mnt/i", "a path needs sqlite:// in front of it"),
        ("bulk_url", "gs://b", "write s3://BUCKET/PREFIX or file:///PATH"),
        ("bulk_url", "s3", "write s3://BUCKET/PREFIX or"),
        ("bulk_url", "s3n://b/p", "write s3:// instead of s3n://"),
        ("bulk_url", "http://u:pw@h:9000/b", "set s3_endpoint_url to the server, http://HOST:PORT"),
        ("bulk_url", "s3:b", "the slashes are missing"),
        ("bulk_url", "s3:///p", "it names no bucket"),
        ("bulk_url", "s3://127.0.0.1:9000/bucket", "a server belongs in s3_endpoint_url"),
        ("bulk_url", "s3://k:s@b/p", "set s3_access_key_id and s3_secret_access_key"),
        ("bulk_url", "s3://k/s@b/p", "set s3_access_key_id and s3_secret_access_key"),
        ("bulk_url", "s3://b/p#red", "a fragment (#...) is not used"),
        ("bulk_url", "s3://b/p?region=x", "a query (?...) is not used"),
        ("bulk_url", "s3://b/p\nq", "a control character"),
        ("bulk_url", "file://a/b", "the path must be absolute; write file:///PATH"),
        ("bulk_url", "memory:", "write s3://BUCKET/PREFIX or file:///PATH"),
        ("index_url", "bulk:///x", "nothing may follow the colon; write bulk:"),
        ("index_url", "sqlite://a.db", "the path must be absolute; write sqlite:///PATH"),
        ("index_url", "http://h", "index_url: write "),
        ("index_url", "redis+socket://h", "index_url: write "),
        ("index_url", "redis://", "each host must be"),
        ("index_url", "redis://[x", "each host must be"),
        ("index_url", "redis://h:port", "each host must be"),
        ("index_url", "redis://h:70000", "each host must be"),
        ("index_url", "redis+cluster://a,,b", "each host must be"),
        ("index_url", "redis://a,b", "it may name only one host; write redis://HOST:6379/0"),
        ("index_url", "redis://h/zero", "the number of a database"),
        ("index_url", "redis+cluster://h/1", "only database 0"),
        ("index_url", "redis+sentinel://h/0", "?service= and the name of the primary"),
        ("index_url", "redis+sentinel://h/0?service=a&x=1", "?service= and the name"),
        ("index_url", "redis://h?ssl_cert_reqs=none", "a query (?...) is not used"),
        ("index_url", "rediss://:s3cr@et/w0rd@host:6379/0", "/ as %2F"),
        ("index_url", "redis://:a?b@127.0.0.1", "or set redis_username and redis_password"),
        ("s3_endpoint_url", "h:9000", "write http://HOST:PORT or https://HOST:PORT"),
        ("s3_endpoint_url", "https://u:p@h", "set s3_access_key_id and s3_secret_access_key"),
        ("s3_endpoint_url", "https://h#x", "a fragment"),
        ("agent_disk_url", "file://h/p", "the path must be absolute"),
        ("endpoint", "http://h/metrics?x=1", "a query"),
    ],
)
def test_what_would_not_be_used_is_refused_and_the_right_form_named(
    setting: str, url: str, words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        parse_url(setting, url)
    assert str(caught.value).startswith(f"{setting}: ")


def test_every_form_that_a_message_names_is_accepted() -> None:
    for setting, forms in FORMS.items():
        for form in forms.values():
            parse_url(setting, form.replace("PORT", "1"))


def test_an_endpoint_does_not_repeat_the_bucket() -> None:
    given = {"bulk_url": "s3://kv/p", "s3_endpoint_url": "https://h/kv"}
    with pytest.raises(ConfigError, match="s3_endpoint_url ends with the bucket of bulk_url"):
        load_config(given, environ={})
    load_config(given | {"s3_endpoint_url": "https://h/storage/v1/s3"}, environ={})


_TELLING = "QXZJ"
_PASSWORDS = st.text(_TELLING + "79-._~:/?#[]@!$&'()*+,;=%", min_size=4, max_size=30)
_SETTINGS = (
    ("index_url", "redis://u:{}@127.0.0.1:9/0"),
    ("index_url", "rediss://:{}@127.0.0.1:9"),
    ("index_url", "rediss://{}@127.0.0.1:9"),
    ("index_url", "redis+cluster://u:{}@127.0.0.1:9,127.0.0.1:8"),
    ("index_url", "rediss+sentinel://u:{}@127.0.0.1:9/0?service=s"),
    ("index_url", "redis://u:{}@far.example"),
    ("index_url", "https://u:{}@h"),
    ("index_url", "sqlite://u:{}@h/x"),
    ("index_url", "bulk://u:{}@h/x"),
    ("bulk_url", "s3://k:{}@bucket/p"),
    ("bulk_url", "s3://{}@bucket/p"),
    ("bulk_url", "file://u:{}@h/p"),
    ("bulk_url", "gs://k:{}@bucket/p"),
    ("bulk_url", "https://k:{}@h/bucket"),
    ("s3_endpoint_url", "https://k:{}@h:9000"),
    ("s3_endpoint_url", "http://{}@127.0.0.1:9000"),
    ("s3_endpoint_url", "k:{}@h"),
    ("agent", "unix://u:{}@h/x"),
    ("agent_listen", "u:{}@h:1"),
    ("agent_disk_url", "file://u:{}@h/x"),
)


def shown(password: str, text: str) -> list[str]:
    """Return the parts of ``password``, of 4 characters, that ``text`` contains. Parts without a
    telling letter may be there by chance."""
    spellings = (password, unquote(password))
    parts = {word[at : at + 4] for word in spellings for at in range(len(word) - 3)}
    return [part for part in parts if set(part) & set(_TELLING) and part in text]


def told(error: BaseException) -> str:
    """Return all that is known of ``error`` and of those before it."""
    texts = []
    one: BaseException | None = error
    while one is not None:
        texts += [str(one), repr(one), repr(one.args), *traceback.format_exception(one)]
        one = one.__cause__ or one.__context__
    return "\n".join(texts)


def outcome(work: Callable[[], object]) -> str:
    redact.forget_secrets()  # nothing may depend on the masking of an earlier password
    try:
        return repr(work())
    except (ObjkvError, ValueError) as exc:
        return told(exc)


@given(place=st.sampled_from(_SETTINGS), password=_PASSWORDS)
@settings(max_examples=100)
def test_no_part_of_a_password_in_a_setting_is_shown(place: tuple[str, str], password: str) -> None:
    name, form = place
    value = form.format(password)

    def opened() -> str:
        config = load_config({"bulk_url": "file:///dev/null/kv", name: value}, environ={})
        with open_backends(config, NullRecorder()) as backends:
            return f"{config!r} {config} {config.public()} {backends!r}"

    for environ in ({}, {f"OBJKV_{name.upper()}": value}):
        assert shown(password, outcome(lambda e=environ: resolve_config(environ=e))) == []
    assert shown(password, outcome(opened)) == []
    assert shown(password, outcome(lambda: parse_url("index_url", value))) == []


@given(st.sampled_from(["http://u:{}@127.0.0.1:9", "u:{}@h", "https://{}@[::1"]), _PASSWORDS)
@settings(max_examples=50)
def test_no_part_of_a_password_in_an_endpoint_is_shown(form: str, password: str) -> None:
    url = form.format(password)

    def scraped() -> str:
        source = MetricsSource(url, deadline_s=1)
        try:
            return f"{source!r} {source.scrape()}"
        finally:
            source.close()

    assert shown(password, outcome(scraped)) == []
    assert shown(password, outcome(lambda: Endpoint(url))) == []


_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "HTTPS_PROXY", "http_proxy", "ALL_PROXY")


@given(
    st.sampled_from(_VARIABLES),
    st.sampled_from(["http://u:{}@127.0.0.1:9", "u:{}@127.0.0.1:9", "https://{}@h"]),
    _PASSWORDS,
)
@example("http_proxy", "http://u:{}@127.0.0.1:9", "[777J]")
@settings(max_examples=20)
def test_no_part_of_a_password_in_another_variable_is_shown(
    name: str, form: str, password: str
) -> None:
    environ = {name: form.format(password), "AWS_CONFIG_FILE": "/dev/null", "HOME": "/nowhere"}
    with patch.dict(os.environ, environ):
        text = outcome(lambda: open_s3_access(load_config({"bulk_url": "s3://b"}, environ={})))
        text += outcome(lambda: MetricsSource("http://far.example", deadline_s=1))
        text += outcome(lambda: check_proxies("https_proxy", "all_proxy"))
    assert shown(password, text) == []


def test_an_endpoint_of_a_profile_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: "os.PathLike[str]"
) -> None:
    for url in ("u:QXZJ-QXZJ@h:9", "https://u:QXZJ-QXZJ@h:9", "https://u:QXZJ/QXZJ@h:9"):
        file = os.path.join(tmp_path, "config")
        with open(file, "w") as out:
            out.write(f"[default]\nendpoint_url = {url}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", file)
        config = load_config({"bulk_url": "s3://b"}, environ={})
        with pytest.raises(ConfigError, match="endpoint_url of the AWS profile") as caught:
            open_s3_access(config)
        assert shown("QXZJ-QXZJ/QXZJ", told(caught.value)) == []
