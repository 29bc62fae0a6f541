"""Targets: what operators write, also by mistake: settings, prompts. No secret comes back."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from objkv.config import Config, resolve_config
from objkv.errors import ConfigError
from objkv.ops.match import parse_tokens
from tests.fuzz.mutation import changed_bytes, changed_text, odd_values, spoiled
from tests.fuzz.target import Target, outcome, require

SECRET = "hunter2hunter2"
_TOML = b"""
bulk_url = "s3://bucket/prefix"
index_url = "rediss://user:hunter2hunter2@host:6379/0"
redis_password = "hunter2hunter2"
s3_secret_access_key = "hunter2hunter2"
ttl_s = 60
codec = "none"
"""
_URLS = [
    f"rediss://user:{SECRET}@host:6379/0",
    f"rediss://:{SECRET}@[::1]:6379",
    f"rediss+sentinel://a:{SECRET}@h1:1,h2:2/0?service=x&sentinel_password={SECRET}",
    f"https://id:{SECRET}@s3.example.com:9000/",
    "s3://bucket/prefix",
    "file:///a/b",
    "sqlite:///a",
    "memory:",
    "bulk:",
]
_URL_NAMES = ("OBJKV_BULK_URL", "OBJKV_INDEX_URL", "OBJKV_S3_ENDPOINT_URL")
_NAMES = sorted(Config.model_fields)
_FOLDER = tempfile.TemporaryDirectory(prefix="objkv-fuzz-")


def _shows_nothing(config: Config) -> None:
    require(SECRET not in repr(config), "a secret in repr")
    require(SECRET not in str(config.public()), "a secret in public")


def _told(work: Any) -> str:
    """What reading settings ends in; neither they nor an error's chain show the secret."""
    try:
        config = work()
    except ConfigError as exc:
        error: BaseException | None = exc
        while error is not None:
            require(SECRET not in str(error), f"a secret in an error: {error}")
            error = error.__cause__ or error.__context__
        return "refused"
    _shows_nothing(config)
    return "read"


def read_settings(text: bytes) -> str:
    path = Path(_FOLDER.name) / "objkv.toml"
    path.write_bytes(text)
    return _told(lambda: resolve_config(environ={}, file=path).config)


@st.composite
def _environments(draw: st.DrawFn) -> dict[str, str]:
    url = st.sampled_from(_URLS)
    values = url | url.flatmap(changed_text) | st.text(max_size=10) | st.sampled_from(
        ["1", "-1", "9" * 5000, "nan", "true", "none", "auto", SECRET]
    )  # fmt: skip
    names = st.sampled_from(_NAMES) | st.text("abcdefgh_url", max_size=12)
    found = draw(st.dictionaries(names, values, max_size=5))
    secrets = {"redis_password": SECRET, "s3_secret_access_key": SECRET}
    return {f"OBJKV_{name.upper()}": value for name, value in (found | secrets).items()}


def _environment(environ: dict[str, str]) -> str:
    # Where a secret is written into a setting that holds none, that setting may be told.
    return _told(lambda: resolve_config(environ=environ).config) if _fits(environ) else "skipped"


def _fits(environ: dict[str, str]) -> bool:
    return not any(
        SECRET in value and name not in _URL_NAMES
        for name, value in environ.items()
        if not name.endswith(("PASSWORD", "KEY"))
    )


def _options(values: dict[str, Any]) -> str:
    secret = {"redis_password": SECRET, "s3_secret_access_key": SECRET}
    return _told(lambda: resolve_config(values | secret, environ={}).config)


@outcome(ConfigError)
def _prompt(text: str) -> str:
    tokens = parse_tokens(text)
    require(all(type(t) is int and 0 <= t < 2**32 for t in tokens), "no token ids")
    return "read"


_PROMPTS = ["[1, 2, 3]", "1 2,3\n4", '["1", 2]', "", "[" * 3000, "9" * 5000, "[1e5]", "0" * 5000]

TARGETS = (
    Target(
        "settings file",
        changed_bytes([_TOML]) | st.just(b"a=" + b"[" * 5000),
        read_settings,
        lambda random: spoiled(random, [_TOML]),
    ),
    Target("environment", _environments(), _environment),
    Target(
        "extra config",
        st.dictionaries(st.sampled_from(_NAMES) | st.text(max_size=8), odd_values, max_size=4),
        _options,
    ),
    Target("token ids", st.sampled_from(_PROMPTS).flatmap(changed_text), _prompt),
)
