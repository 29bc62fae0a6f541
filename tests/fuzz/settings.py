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
    Target("extra config", _some_options, read_options),
    Target("token ids", lambda random: changed_text(random, random.choice(_PROMPTS)), _prompt),
)
