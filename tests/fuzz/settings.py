"""Targets: what operators write, also by mistake: settings, prompts. No secret comes back."""

import tempfile
from pathlib import Path
from random import Random
from typing import Any

from objkv.config import Config, resolve_config
from objkv.errors import ConfigError
from objkv.ops.match import parse_tokens
from tests.fuzz.mutation import changed_text, odd_value, spoiled, text
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


def read_settings(toml: bytes) -> str:
    path = Path(_FOLDER.name) / "objkv.toml"
    path.write_bytes(toml)
    return _told(lambda: resolve_config(environ={}, file=path).config)


def _some_environment(random: Random) -> dict[str, str]:
    odd = ["1", "-1", "9" * 5000, "nan", "true", "none", "auto", SECRET, text(random)]
    found = {"redis_password": SECRET, "s3_secret_access_key": SECRET}
    for _ in range(random.randrange(6)):
        url = random.choice(_URLS)
        name = random.choice([*_NAMES, text(random, "abcdefgh_url")])
        value = random.choice([url, changed_text(random, url), random.choice(odd)])
        found.setdefault(name, value)
    return {f"OBJKV_{name.upper()}": value for name, value in found.items()}


def _environment(environ: dict[str, str]) -> str:
    # Where a secret is written into a setting that holds none, that setting may be told.
    return _told(lambda: resolve_config(environ=environ).config) if _fits(environ) else "skipped"


def _fits(environ: dict[str, str]) -> bool:
    return not any(
        SECRET in value and name not in _URL_NAMES
        for name, value in environ.items()
        if not name.endswith(("PASSWORD", "KEY"))
    )


def read_options(values: dict[str, Any]) -> str:
    secret = {"redis_password": SECRET, "s3_secret_access_key": SECRET}
    return _told(lambda: resolve_config(values | secret, environ={}).config)


@outcome(ConfigError)
def _prompt(prompt: str) -> str:
    tokens = parse_tokens(prompt)
    require(all(type(t) is int and 0 <= t < 2**32 for t in tokens), "no token ids")
    return "read"


_PROMPTS = ["[1, 2, 3]", "1 2,3\n4", '["1", 2]', "", "[" * 3000, "9" * 5000, "[1e5]", "0" * 5000]


def _some_options(random: Random) -> dict[str, Any]:
    names = random.choices([*_NAMES, text(random)], k=random.randrange(5))
    return {name: odd_value(random) for name in names}


TARGETS = (
    Target(
        "settings file",
        lambda random: spoiled(random, [_TOML] * 20 + [b"a=" + b"[" * 5000]),
        read_settings,
    ),
    Target("environment", _some_environment, _environment),
    Target("extra config", _some_options, read_options),
    Target("token ids", lambda random: changed_text(random, random.choice(_PROMPTS)), _prompt),
)
