"""Settings: one strict schema for environment, TOML file, vLLM's extra config and options.

Later sources win: defaults, the TOML file (``OBJKV_CONFIG_FILE``), environment (``OBJKV_*``), then
``kv_connector_extra_config`` in the engine or the options of the command line. Nothing outside this
module reads the environment, except that the AWS client reads its own standard variables for what
is left unset here.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from objkv.errors import ConfigError

ENV_PREFIX = "OBJKV_"
CONFIG_FILE_VARIABLE = "OBJKV_CONFIG_FILE"

# Kubernetes puts these into every container for a Service named, say, ``objkv-redis``: not ours.
_SERVICE_LINK = re.compile(
    r"OBJKV(_.+)?_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_SECRETS = ("s3_access_key_id", "s3_secret_access_key", "redis_password")

Source = Literal["default", "file", "environment", "option"]
_Given = dict[Source, tuple[str, dict[str, Any]]]
LoadMode = Literal["async", "layerwise", "auto"]
CodecName = Literal["none", "lz4", "zstd", "blosc"]
BULK_SCHEMES = ("file", "memory", "s3")
_REDIS_KINDS = ("redis", "redis+cluster", "redis+sentinel")
_TLS_KINDS = tuple(kind.replace("redis", "rediss") for kind in _REDIS_KINDS)
INDEX_SCHEMES = ("sqlite", "memory", *_REDIS_KINDS, *_TLS_KINDS)


class Config(BaseModel):
    """Everything that can be set. Frozen; unknown keys are refused; units are in the names."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        str_strip_whitespace=True,
        hide_input_in_errors=True,  # an error that is logged must not carry a password along
        use_attribute_docstrings=True,  # they are the reference that tools print
    )

    bulk_url: str = Field(default_factory=lambda: f"file://{cache_folder() / 'chunks'}")
    """``file:///path``, ``s3://bucket/prefix`` or ``memory:``. Holds every chunk. The path of
    ``file`` is taken literally: nothing in it is an escape."""
    index_url: str = Field(default_factory=lambda: f"sqlite://{cache_folder() / 'index.sqlite'}")
    """``sqlite:///path``, ``redis://``, ``rediss://``, ``redis+cluster://``,
    ``redis+sentinel://h1:26379,h2:26379/0?service=name`` or ``memory:``."""

    s3_endpoint_url: str | None = None
    """For S3-compatible stores other than AWS; unset: ``AWS_ENDPOINT_URL_S3`` and the like."""
    s3_region: str | None = None
    """Unset: ``AWS_REGION``, then the profile's."""
    s3_ca_bundle: Path | None = None
    """PEM file that signs the endpoint's certificate; unset: ``AWS_CA_BUNDLE``, then certifi."""
    s3_addressing: Literal["auto", "path", "virtual"] = "auto"
    """Bucket in the path or in the host name; many servers other than AWS need ``path``."""
    s3_access_key_id: str | None = Field(default=None, repr=False)
    """Better left unset: the AWS client finds roles, profiles and variables by itself."""
    s3_secret_access_key: str | None = Field(default=None, repr=False)
    """Belongs to ``s3_access_key_id``."""
    s3_multipart_bytes: int = Field(default=64 << 20, ge=5 << 20)
    """Payloads above this size are uploaded in parts of this size."""
    bulk_calls_max: int = Field(default=64, ge=1)
    """Calls to the bulk store at once, per process."""

    redis_ca_file: Path | None = None
    """PEM file that signs the server's certificate; unset: the system's authorities."""
    redis_cert_file: Path | None = None
    """PEM certificate that this client shows, where the server asks for one."""
    redis_key_file: Path | None = None
    """PEM private key of ``redis_cert_file``."""
    redis_username: str | None = None
    """Overrides the URL's, so that secrets can stay out of URLs."""
    redis_password: str | None = Field(default=None, repr=False)
    """Overrides the URL's, so that secrets can stay out of URLs."""
    redis_calls_max: int = Field(default=16, ge=1)
    """Connections to Redis, per process."""

    chunk_tokens: int = Field(default=256, ge=1)
    """A wish: the effective chunk is the smallest multiple of all block sizes that reaches it."""
    codec: CodecName = "none"
    """How payloads are compressed: ``none`` suits fast links, ``blosc`` pays on slow ones."""
    load_mode: LoadMode = "async"
    """``async``: between steps, hidden by other requests' compute; ``layerwise``: within the step,
    layer by layer (not with asynchronous scheduling); ``auto``: by what is left to compute."""
    save_decode: bool = False
    """Whether chunks that end in generated tokens are saved too, not only prompts."""
    hot_payload_bytes_max: int = Field(default=256 << 10, ge=0)
    """Payloads up to this size are also kept in Redis. 0: none. Has no effect without Redis."""
    tenant: str = Field(default="default", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Part of the identity: tenants never share."""
    model_id: str | None = None
    """Overrides the model's name in the identity, e.g. when mount paths differ."""
    weights_epoch: int = Field(default=0, ge=0)
    """Raise it to start afresh after weights changed in place."""
    ttl_s: int = Field(default=7 * 86_400, ge=1)
    """Life of an index record after its last save or hit."""
    pinned_bytes_max: int = Field(default=1 << 30, ge=1 << 20)
    """Pinned (page-locked) memory per worker, for loads and saves together."""

    lookup_deadline_ms: int = Field(default=500, ge=1)
    """A lookup that takes longer is a miss."""
    load_deadline_ms: int = Field(default=30_000, ge=1)
    """A load that takes longer is a miss: the rest of it is recomputed."""
    step_load_deadline_ms: int = Field(default=5_000, ge=1)
    """The same for a load within the step, which holds up every request of the replica."""
    save_deadline_ms: int = Field(default=60_000, ge=1)
    """A save that takes longer is dropped."""
    drain_deadline_ms: int = Field(default=10_000, ge=0)
    """How long a shutdown waits for saves in flight."""
    load_threads: int = Field(default=8, ge=1, le=256)
    """Threads that fetch and decode chunks, per worker."""
    save_threads: int = Field(default=4, ge=1, le=256)
    """Threads that encode and upload chunks, per worker."""
    load_queue_max: int = Field(default=4096, ge=1)
    """Chunks waiting to be loaded, per worker; more are misses."""
    save_queue_max: int = Field(default=64, ge=1)
    """Chunks waiting to be saved, per worker; more are dropped."""
    lookup_queue_max: int = Field(default=1024, ge=1)
    """Requests waiting for a lookup; more are misses."""
    near_records_max: int = Field(default=65_536, ge=0)
    """Index records kept in the scheduler's memory."""
    near_ttl_ms: int = Field(default=30_000, ge=0)
    """How long a record in the scheduler's memory is believed."""
    lease_ms: int = Field(default=30_000, ge=1)
    """How long one replica alone may be saving a chunk."""
    breaker_failures: int = Field(default=5, ge=1)
    """Failures in a row after which a store is left alone for ``breaker_reset_ms``."""
    breaker_reset_ms: int = Field(default=5_000, ge=1)
    """How long a failing store is left alone before one call tries it again."""

    admission: Literal["always"] = "always"
    """Which matches are loaded."""
    at_start: Literal["degraded", "strict"] = "degraded"
    """An unreachable store at start: serve without it until it is back, or refuse to start."""
    load_failure: Literal["recompute", "vllm"] = "recompute"
    """``recompute`` sets vLLM's ``kv_load_failure_policy`` so; ``vllm`` leaves it alone."""
    store_tokens: bool = False
    """Whether payloads carry their token ids, for audits. They are the prompt in plain sight."""

    @model_validator(mode="after")
    def _urls_are_known(self) -> Self:
        _check_url("bulk_url", self.bulk_url, BULK_SCHEMES)
        _check_url("index_url", self.index_url, INDEX_SCHEMES)
        return self

    def public(self) -> dict[str, Any]:
        """All settings as plain values, secrets masked: for ``doctor`` and logs."""
        out = self.model_dump(mode="json")
        for name in _SECRETS:
            if out[name] is not None:
                out[name] = "***"
        for name in ("bulk_url", "index_url", "s3_endpoint_url"):
            if out[name] is not None:
                out[name] = without_password(out[name])
        return out


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, and where each of them comes from."""

    config: Config
    sources: Mapping[str, Source]


def load_config(
    overrides: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None
) -> Config:
    """Resolve all sources. ``overrides`` is vLLM's extra config.

    Raises ``ConfigError`` naming the source, the key, and the nearest known key.
    """
    return resolve_config(overrides, environ=environ, origin="kv_connector_extra_config").config


def resolve_config(
    overrides: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    origin: str = "the options",
) -> Resolved:
    """Resolve all sources, and tell which one each setting comes from.

    ``file`` replaces ``OBJKV_CONFIG_FILE``; ``origin`` names ``overrides`` in messages. Empty
    variables count as unset. Raises ``ConfigError`` as ``load_config`` does.
    """
    environ = os.environ if environ is None else environ
    given: _Given = {}
    if name := file or environ.get(CONFIG_FILE_VARIABLE):
        given["file"] = (f"in {name}", _read_toml(Path(name)))
    given["environment"] = ("in the environment", _from_environment(environ))
    given["option"] = (f"in {origin}", dict(overrides or {}))

    merged: dict[str, Any] = {}
    sources: dict[str, Source] = dict.fromkeys(Config.model_fields, "default")
    for source, (where, values) in given.items():
        _refuse_unknown(values, where, env=source == "environment")
        merged |= values
        sources |= dict.fromkeys(values, source)
    try:
        return Resolved(Config.model_validate(merged), sources)
    except ValidationError as exc:
        lines = [_explain(e["loc"], e["msg"], sources, given) for e in exc.errors()]
        raise ConfigError("objkv settings: " + "; ".join(lines)) from exc


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/objkv``, by default ``~/.cache/objkv``: shared by the user's replicas."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "objkv"


def local_path(url: str) -> Path:
    """The path of a ``file://`` or ``sqlite://`` URL, taken literally."""
    return Path(url.partition("://")[2].removeprefix("localhost"))


def without_password(url: str) -> str:
    """The URL with its passwords, if any, replaced by ``***``."""
    scheme, separator, rest = url.partition("://")
    rest = re.sub(r"([?&][^=&]*(?:password|secret|token)[^=&]*=)[^&]*", r"\1***", rest)
    # The last "@": a password that was not percent-encoded may hold "@" and "/" itself.
    login, at, place = rest.rpartition("@")
    if not at or scheme in ("file", "sqlite"):
        return f"{scheme}{separator}{rest}"
    user, colon, _ = login.partition(":")
    return f"{scheme}{separator}{user}{colon and ':***'}@{place}"


def _check_url(name: str, url: str, known: tuple[str, ...]) -> None:
    shown = without_password(url)
    scheme, _, rest = url.partition(":")
    if scheme not in known:
        raise ValueError(f"{name} {shown!r}: use one of {', '.join(known)}")
    if scheme in ("file", "sqlite"):
        if not rest.startswith("//") or not local_path(url).is_absolute():
            raise ValueError(f"{name} {shown!r}: write {scheme}:/// and an absolute path")
    elif scheme != "memory" and not _names_host(rest):
        what = "bucket" if scheme == "s3" else "host"
        raise ValueError(f"{name} {shown!r}: names no {what}; write {scheme}://{what}")


def _names_host(rest: str) -> bool:
    try:
        return bool(urlsplit(rest).netloc.rpartition("@")[2])
    except ValueError:  # brackets that are no IPv6 address
        return False


def _refuse_unknown(values: Mapping[str, Any], where: str, *, env: bool) -> None:
    for key in values:
        if key in Config.model_fields:
            continue
        near = difflib.get_close_matches(str(key), Config.model_fields, n=1, cutoff=0.5)
        hint = f"; did you mean {_shown(near[0], env=env)!r}?" if near else ""
        raise ConfigError(f"objkv settings: unknown key {_shown(key, env=env)!r} {where}{hint}")


def _explain(
    location: tuple[int | str, ...], message: str, sources: Mapping[str, Source], given: _Given
) -> str:
    message = message.removeprefix("Value error, ")
    if not location:
        return message
    key, source = str(location[0]), sources[str(location[0])]
    where = f" {given[source][0]}" if source in given else ""
    return f"{_shown(key, env=source == 'environment')}{where}: {message}"


def _shown(key: str, *, env: bool) -> str:
    return ENV_PREFIX + key.upper() if env else key


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    ours = {n: v for n, v in environ.items() if n.startswith(ENV_PREFIX) and v}
    ours.pop(CONFIG_FILE_VARIABLE, None)
    links = {name for name in ours if _SERVICE_LINK.fullmatch(name)}
    return {n.removeprefix(ENV_PREFIX).lower(): v for n, v in ours.items() if n not in links}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"objkv settings: the file {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"objkv settings: {path}: not valid TOML: {exc}") from exc
