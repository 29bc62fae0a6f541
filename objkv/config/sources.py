"""Sources of settings: defaults, TOML file, environment, extra config. Later sources win. Only the
AWS client reads the environment, too, for settings that are unset here."""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from objkv.config.schema import SECRET_SETTINGS, Config
from objkv.errors import ConfigError
from objkv.redact import keep_secret

ENV_PREFIX = "OBJKV_"
CONFIG_FILE_VARIABLE = "OBJKV_CONFIG_FILE"

# Kubernetes sets these in every container for a Service such as ``objkv-redis``. They are not
# settings.
_SERVICE_LINK = re.compile(
    r"OBJKV(_.+)?_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_KEY_ID_CHARS_MIN = 8
"""A shorter access key id, which is only a name, may be a common word such as ``minio``, and
masking it would hide that everywhere."""

_KINDS = {"int_": "an integer", "float_": "a number", "bool_": "true or false"}
"""Names of types, by the beginning of pydantic's error type."""
_NUMBER_CHARS = 12
_NAME = "it must have 1 to 64 letters, digits, dots, underscores or hyphens"
_CREDENTIAL = "it must be printable ASCII, with no spaces or line breaks"
_ONE_LINE = "it must not contain a line break or another control character"
_FORMS = {
    "agent": "it must be auto, private, or unix:// and the absolute path of a socket, at most 101 "
    "characters, as in unix:///run/objkv/agent.sock",
    "agent_token": "it must have at least 16 printable ASCII characters, and no spaces",
    "redis_credentials": "it must be MODULE:FUNCTION",
    "redis_prefix": _NAME,
    "redis_password": _ONE_LINE,
    "redis_username": _ONE_LINE,
    "s3_access_key_id": _CREDENTIAL,
    "s3_secret_access_key": _CREDENTIAL,
    "sentinel_password": _ONE_LINE,
    "sentinel_username": _ONE_LINE,
    "tenant": _NAME,
}
"""Messages about settings that do not match their pattern."""

SettingSource = Literal["default", "file", "environment", "option"]
_Given = dict[SettingSource, tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, with the source of each."""

    config: Config
    sources: Mapping[str, SettingSource]


def load_config(
    overrides: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None
) -> Config:
    """Resolve all sources. ``overrides``: vLLM's extra config. Raises ``ConfigError``, which names
    the source, the key and the nearest known key."""
    return resolve_config(overrides, environ=environ, origin="kv_connector_extra_config").config


def resolve_config(
    overrides: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    origin: str = "the options",
) -> Resolved:
    """Resolve all sources. ``file`` replaces ``OBJKV_CONFIG_FILE``. ``origin`` names ``overrides``
    in messages. An empty variable is unset. Raises like ``load_config``."""
    environ = os.environ if environ is None else environ
    given: _Given = {}
    if name := file or environ.get(CONFIG_FILE_VARIABLE):
        given["file"] = (f"in {name}", _read_toml(Path(name)))
    given["environment"] = ("in the environment", _from_environment(environ))
    given["option"] = (f"in {origin}", dict(overrides or {}))

    merged: dict[str, Any] = {}
    sources: dict[str, SettingSource] = dict.fromkeys(Config.model_fields, "default")
    for source, (where, values) in given.items():
        _refuse_unknown(values, where, env=source == "environment")
        merged |= values
        _keep_secrets(values)
        sources |= dict.fromkeys(values, source)
    try:
        return Resolved(Config.model_validate(merged), sources)
    except ValidationError as exc:
        lines = [_explain(e["loc"], _plainly(e), sources, given) for e in exc.errors()]
        raise ConfigError("objkv settings: " + "; ".join(lines)) from exc


def _keep_secrets(values: Mapping[str, Any]) -> None:
    """Register secrets for masking before validation, because an error may quote them."""
    texts = {name: value.strip() for name, value in values.items() if isinstance(value, str)}
    for name in SECRET_SETTINGS:
        if name != "s3_access_key_id" or len(texts.get(name, "")) >= _KEY_ID_CHARS_MIN:
            keep_secret(texts.get(name))


def _refuse_unknown(values: Mapping[str, Any], where: str, *, env: bool) -> None:
    for key in values:
        if key in Config.model_fields:
            continue
        near = difflib.get_close_matches(str(key), Config.model_fields, n=1, cutoff=0.75)
        hint = f"; did you mean {_shown(near[0], env=env)!r}?" if near else ""
        raise ConfigError(f"objkv settings: unknown key {_shown(key, env=env)!r} {where}{hint}")


def _explain(
    location: tuple[int | str, ...],
    message: str,
    sources: Mapping[str, SettingSource],
    given: _Given,
) -> str:
    if not location:
        return message
    key, source = str(location[0]), sources[str(location[0])]
    where = f" {given[source][0]}" if source in given else ""
    return f"{_shown(key, env=source == 'environment')}{where}: {message}"


def _plainly(error: ErrorDetails) -> str:
    """Return the error's message without names of pydantic's types."""
    if error["type"] == "string_pattern_mismatch" and error["loc"]:
        return _FORMS.get(str(error["loc"][0]), error["msg"])
    message = error["msg"].removeprefix("Value error, ")
    for beginning, kind in _KINDS.items():
        if error["type"].startswith(beginning):
            value = repr(error["input"])
            # A longer value may be a secret in the wrong setting.
            return f"{value if len(value) <= _NUMBER_CHARS else 'the value'} is not {kind}"
    return message.replace("Input should be", "it must be")


def _shown(key: str, *, env: bool) -> str:
    return ENV_PREFIX + key.upper() if env else key


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    ours = {n: v for n, v in environ.items() if n.startswith(ENV_PREFIX) and v}
    ours.pop(CONFIG_FILE_VARIABLE, None)
    links = {name for name in ours if _SERVICE_LINK.fullmatch(name)}
    return {n.removeprefix(ENV_PREFIX).lower(): v for n, v in ours.items() if n not in links}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as exc:
        raise ConfigError(f"objkv settings: cannot read {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"objkv settings: {path} is not valid TOML: {exc}") from exc
