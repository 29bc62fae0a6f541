"""The schema: every setting with its unit, default and meaning."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from objkv.config.units import parse_duration, parse_size
from objkv.config.urls import (
    cache_folder,
    default_quota_bytes,
    is_this_machine,
    parse_address,
    parse_url,
    refuse_clear,
)
from objkv.redact import without_secrets

_WITH_UNIT: Final = re.compile(r"[0-9][0-9.]{0,15} ?[A-Za-z]{1,3}")
_CLEAR: Final[tuple[str, ...]] = ("agent", "bulk", "endpoints", "index")
_SEALS: Final = {"signed": "signing", "encrypted": "encryption"}
"""The values of ``seals``, and the kind of key that each needs."""
_CREDENTIAL: Final = r"^[\x21-\x7e]*$"
_ONE_LINE: Final = r"^[^\x00-\x1f\x7f]*$"
LoadMode = Literal["async", "layerwise", "auto"]
Role = Literal["reader", "writer", "sweeper"]
SECRET_SETTINGS = (
    "s3_access_key_id",
    "s3_secret_access_key",
    "redis_password",
    "sentinel_password",
    "agent_token",
)
URL_SETTINGS: Final = ("bulk_url", "index_url", "s3_endpoint_url", "agent_disk_url")


class Config(BaseModel):
    """All settings. Frozen. Unknown keys are refused. Names contain the unit."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        str_strip_whitespace=True,
        hide_input_in_errors=True,  # an error that is logged must not contain a password
        use_attribute_docstrings=True,  # docs/configuration.md is generated from them
    )

    bulk_url: str = Field(default_factory=lambda: f"file://{cache_folder() / 'chunks'}")
    """Bulk store of payloads: ``file:///path`` or ``s3://bucket/prefix``.
    A ``file`` path must be absolute and is taken as it is: ``~``, ``%20``, ``?`` and ``#`` have no
    meaning."""
    index_url: str = Field(default_factory=lambda: f"sqlite://{cache_folder() / 'index.sqlite'}")
    """Index: ``redis[s]://``, ``redis[s]+cluster://``, ``sqlite:///path``, ``bulk:`` (the folder of
    ``bulk_url`` is its own index; the default if you set ``bulk_url`` to a folder), or
    ``redis[s]+sentinel://h1:26379,h2:26379/0?service=name``."""

    s3_endpoint_url: str | None = None
    """Endpoint of an S3-compatible store. Unset: ``AWS_ENDPOINT_URL_S3`` and the other AWS
    variables."""
    s3_region: str | None = None
    """Region of the bucket. Unset: ``AWS_REGION``, ``AWS_DEFAULT_REGION``, the AWS profile, then
    us-east-1, with any endpoint."""
    s3_ca_bundle: Path | None = None
    """PEM file with the CA of the endpoint's certificate. Unset: ``AWS_CA_BUNDLE``, then
    certifi."""
    s3_addressing: Literal["auto", "path", "virtual"] = "auto"
    """Whether the bucket is in the path or in the host name. Many servers other than AWS need
    ``path``."""
    s3_access_key_id: str | None = Field(default=None, repr=False, pattern=_CREDENTIAL)
    """Access key. Prefer to leave it unset: the AWS client finds roles, profiles and variables."""
    s3_secret_access_key: str | None = Field(default=None, repr=False, pattern=_CREDENTIAL)
    """Secret of ``s3_access_key_id``."""
    s3_sse: Literal["AES256", "aws:kms"] | None = None
    """Server-side encryption to request with each put. Unset: the bucket's default."""
    s3_sse_kms_key_id: str | None = None
    """KMS key for ``s3_sse`` ``aws:kms``. Unset: the account's default key."""
    s3_acl: Literal["bucket-owner-full-control"] | None = None
    """ACL to request with each put, for a bucket of another account that demands one."""
    s3_checksum: Literal["crc32", "sha256"] | None = None
    """Checksum to send with each put, for a bucket that demands one. Payloads have their own.
    ``sha256`` costs about 1 ms of CPU per MiB, ``crc32`` a third of that."""
    s3_signed_payloads: bool = False
    """Sign the bodies of requests, for a bucket whose policy denies ``UNSIGNED-PAYLOAD``. Costs
    about 1 ms of CPU per MiB."""

    redis_ca_file: Path | None = None
    """PEM file with the CA of the server's certificate. Unset: the system's CAs."""
    redis_cert_file: Path | None = None
    """PEM client certificate, if the server requires one."""
    redis_key_file: Path | None = None
    """PEM private key of ``redis_cert_file``."""
    redis_username: str | None = Field(default=None, pattern=_ONE_LINE)
    """User name in Redis. Overrides the one in ``index_url``."""
    redis_password: str | None = Field(default=None, repr=False, pattern=_ONE_LINE)
    """Password in Redis. Overrides the one in ``index_url``, so that the URL contains no secret."""
    redis_credentials: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """``module:factory`` of credentials that expire, such as IAM tokens: the factory returns a
    redis-py ``CredentialProvider``. Replaces ``redis_username`` and ``redis_password``."""
    redis_login_s: int = Field(default=600, ge=1)
    """With ``redis_credentials``: how long a connection keeps its login before it logs in again. At
    most the life of a token."""
    sentinel_username: str | None = Field(default=None, pattern=_ONE_LINE)
    """User name in the Sentinels, which have users of their own."""
    sentinel_password: str | None = Field(default=None, repr=False, pattern=_ONE_LINE)
    """Password in the Sentinels. They never receive ``redis_password``."""
    redis_prefix: str = Field(default="objkv", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Prefix of every key in Redis, followed by a colon. To isolate tenants from each other, give
    each its own prefix and Redis rights to that prefix only."""

    chunk_tokens: int = Field(default=256, ge=1)
    """Requested tokens per chunk, rounded up to a common multiple of all block sizes."""
    codec: Literal["auto", "none", "lz4", "blosc", "blosclz4"] = "auto"
    """Compression of payloads. ``none`` suits fast links, ``blosc`` and ``blosclz4`` slow ones.
    ``auto`` measures and chooses per chunk, and compresses nothing for a local store."""
    load_mode: LoadMode = "async"
    """When KV is loaded. ``async``: between steps, while other requests compute. ``layerwise``:
    within the step, layer by layer; not available with vLLM's async scheduling. ``auto``: depends
    on how much is left to compute."""
    save_decode: bool = False
    """Whether to save chunks that end in generated tokens, in addition to prompt chunks."""
    hot_save_bytes_max: int = Field(default=256 << 10, ge=0)
    """Payloads up to this size are also saved in Redis, and are read from there. 0: none is. No
    effect without Redis."""
    tenant: str = Field(default="default", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Tenant name, a part of the identity. Tenants never share KV."""
    role: Role = "writer"
    """Access to store and index. ``reader`` only loads, and records no hits. ``writer`` loads and
    saves. ``sweeper`` is for operators' commands; a replica refuses to start with it."""
    allow_plaintext: str = ""
    """What may be reached on other machines without TLS, comma-separated: ``bulk``, ``index``,
    ``agent`` (by clients of ``agent_listen``), ``endpoints`` (with the key of ``objkv warm``).
    Credentials, keys and payloads then cross the network unencrypted. Connections to this machine
    are always allowed."""
    model_id: str | None = None
    """Model name in the identity. Set it if replicas load the same model under different paths."""
    weights_epoch: int = Field(default=0, ge=0)
    """Increase it to start with an empty cache after the weights changed in place."""
    vllm_patches: bool = True
    """Whether objkv wraps the vLLM methods that change weights or adapters, or put an engine to
    sleep. If false, call ``reset_prefix_cache(reset_connector=True)`` after each such change."""
    weights_digest: Literal["sampled", "full"] = "sampled"
    """How weights are identified. ``sampled``: headers and some pages of each safetensors tensor,
    all bytes of other files. ``full``: all bytes, at 1 to 2 GB/s per core at each start. Use the
    same value on all replicas: the two never share KV."""
    ttl_s: int = Field(default=14_400, ge=1)
    """How long an index record lives after its last save or hit. The default suits the
    prices of S3 Standard. Without a price for storage, use a day or a week."""
    quota_bytes: int = Field(default=0, ge=0)
    """Payload bytes per tenant, over all its namespaces. Saves stop at 95 %, and ``objkv sweep``
    evicts the least used chunks down to 85 %. 0: no quota. If ``bulk_url`` is also
    unset, the default is 50 GiB or a fifth of the disk, whichever is smaller."""
    sweep_grace_s: int = Field(default=14_400, ge=0)
    """Objects younger than this are never swept. Must exceed the longest save, because writers
    publish last. A value above ``ttl_s`` keeps expired payloads longer."""
    pinned_bytes_max: int = Field(default=0, ge=0)
    """Pinned (page-locked) memory per worker, in which it hands saves over to its agent. Further
    saves are dropped. 0: enough for two full steps and 64 chunks, and at most an eighth of the
    host's memory for all workers."""

    agent: str = Field(default="auto", pattern=r"^(auto|private|unix:///[^\x00]{1,100})$")
    """The agent that loads and saves for a replica. ``auto``: one for all replicas of this user on
    this machine with the same settings of stores and agent; the first replica starts it, and it
    ends ten minutes after the last. ``private``: the replica's own, which ends half a minute after
    it. ``unix:///path``: the socket of an agent that you run. Without an agent a replica computes,
    and caches nothing until one answers."""
    agent_memory_bytes: int = Field(default=0, ge=0)
    """Memory of an agent for payloads, its arena. 0: an eighth of the memory of the machine or
    container. It is taken as payloads fill it, and up to 1 GiB ahead of them."""
    agent_verify: Literal["agent", "reader"] = "agent"
    """Who verifies checksums. ``agent``: the agent, once for all replicas. ``reader``: this replica
    too, in the arena, before each copy."""
    agent_listen: str = ""
    """Address, ``HOST:PORT`` or ``[IPV6]:PORT``, at which an agent answers routers and Prometheus,
    besides its Unix socket. Needs ``agent_token`` and, unless it is a loopback address, ``agent``
    in ``allow_plaintext``. Empty: none."""
    agent_token: str | None = Field(default=None, repr=False, pattern=r"^[\x21-\x7e]{16,}$")
    """Bearer token that clients of ``agent_listen`` must send: at least 16 printable ASCII
    characters."""
    agent_tokenizers: Path | None = None
    """Folder with the tokenizers of prompts that an agent gets as text: ``MODEL/tokenizer.json``,
    or one ``tokenizer.json``. Unset: it takes tokens and hashes only."""
    agent_disk_url: str | None = None
    """Folder on a local disk, ``file:///path``, in which an agent also keeps payloads, to load them
    from there after their eviction from memory or after a restart. Each agent needs a folder of its
    own. Sealed payloads are sealed there too. All are kept there if ``save_to_bucket`` may hold
    payloads back, otherwise those that a replica loaded. Unset: none."""
    agent_disk_bytes: int = Field(default=0, ge=0)
    """Maximum size of these files. 0: half of the space that is free when the agent starts, its own
    files included."""
    save_to_bucket: Literal["auto", "all", "reused"] = "auto"
    """Which payloads an agent puts to the bulk store. ``all``: each at once. ``reused``: a payload
    stays in the agent's memory until it is read or computed again, here or on another node, or a
    request says ``objkv_put``; it is lost if it is evicted before that or the agent ends. ``auto``:
    ``all`` if that pays once a quarter of the chunks is read again, ``reused`` otherwise, and with
    ``agent_disk_url`` in any bucket that has a price."""
    price_gb_month: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of 10^9 bytes in the bucket for a month, in US dollars. Unset: the list price of the
    provider, that of S3 Standard for other endpoints, and 0 for folders and private addresses.
    ``audit`` and ``size`` price a folder as S3 Standard."""
    price_puts: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of 1,000 PUT requests, in US dollars. Unset: like ``price_gb_month``."""
    price_gpu_hour: float = Field(default=3.0, ge=0, allow_inf_nan=False)
    """Price of one GPU for an hour, in US dollars. Prices decide ``save_to_bucket`` ``auto``."""

    lookup_deadline_ms: int = Field(default=500, ge=1)
    """A lookup that takes longer is a miss. An encoder output, which is fetched when it is looked
    up, has twice that: then the replica encodes the image itself."""
    load_deadline_ms: int = Field(default=30_000, ge=1)
    """A load that takes longer is a miss: the model computes the rest."""
    step_load_deadline_ms: int = Field(default=5_000, ge=1)
    """Deadline of a load within a step, which blocks every request of the replica."""
    save_deadline_ms: int = Field(default=60_000, ge=1)
    """A save that takes longer is dropped."""
    drain_deadline_ms: int = Field(default=10_000, ge=0)
    """How long a shutdown waits for in-flight saves."""
    load_threads: int = Field(default=8, ge=1, le=256)
    """Threads of an agent that fetch and decode payloads. Twice as many save them, to a bucket
    eight times as many."""

    admission: Literal["auto", "always", "never"] = "auto"
    """Which matches are loaded. ``auto``: only those that load faster than they can be recomputed,
    by measurement. ``always``: all. ``never``: none, the replica only saves.
    ``objkv admission`` changes it in running replicas."""
    at_start: Literal["degraded", "strict"] = "degraded"
    """If a store is unreachable or no agent answers at start: ``degraded`` serves without it until
    it recovers, ``strict`` refuses to start."""
    store_tokens: bool = False
    """Whether payloads contain their token ids, for audits. Token ids are the prompt in
    plaintext."""

    seals: str = ""
    """How payloads are sealed: ``signed``, ``encrypted`` or ``signed,encrypted``. Replicas without
    keys need it if their agent has keys. Empty: by the keys that are set."""
    signing_keys_file: Path | None = None
    """File of signing keys, one per line with three fields: the key id; a tenant or ``*``; the key,
    32 bytes as hex or base64. Unsigned payloads are then not loaded. Only the file's owner may have
    access to it."""
    signing_keys_command: str | None = Field(default=None, repr=False)
    """Command that prints the content of a ``signing_keys_file``. Run once at start, without a
    shell."""
    encryption_keys_file: Path | None = None
    """File of encryption keys, in the format of ``signing_keys_file``. Unencrypted payloads are
    then not loaded."""
    encryption_keys_command: str | None = Field(default=None, repr=False)
    """Command that prints the content of an ``encryption_keys_file``. Run once at start, without a
    shell."""

    @field_validator("*", mode="before")
    @classmethod
    def _units_are_accepted(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept ``7d`` and ``10GiB`` in text. Bare numbers keep the unit of the name."""
        name = info.field_name or ""
        if not (isinstance(value, str) and _WITH_UNIT.fullmatch(value.strip())):
            return value
        if name.endswith(("_s", "_ms")):
            number = parse_duration(value) * (1000 if name.endswith("_ms") else 1)
            if number != int(number):
                raise ValueError(f"{value!r} is not a whole number of {name.rpartition('_')[2]}")
            return int(number)
        return parse_size(value) if "_bytes" in name else value

    @field_validator("allow_plaintext", "seals")
    @classmethod
    def _names_are_known(cls, value: str, info: ValidationInfo) -> str:
        names = {name.strip() for name in value.split(",") if name.strip()}
        if info.field_name == "seals":
            known, what, end = tuple(_SEALS), "how payloads are sealed", ", or both"
        else:
            known, what, end = _CLEAR, "what may be reached without TLS", ""
        if not names <= set(known):
            raise ValueError(f"name {what}: {', '.join(known)}{end}")
        return ",".join(name for name in known if name in names)

    def may_be_clear(self, what: str) -> bool:
        """Whether ``allow_plaintext`` names ``what``."""
        return what in self.allow_plaintext.split(",")

    @model_validator(mode="before")
    @classmethod
    def _folders_have_other_defaults(cls, values: Any) -> Any:
        """A folder is its own index: it may be a shared mount, and an index on this machine would
        hide its chunks from the other machines. The user's own does not fill the disk."""
        if not isinstance(values, dict):
            return values
        if str(values.get("bulk_url")).strip().startswith("file:"):
            values = {"index_url": "bulk:"} | values
        if not values.keys() & {"bulk_url", "quota_bytes"}:
            values = values | {"quota_bytes": default_quota_bytes()}
        return values

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.s3_sse_kms_key_id and self.s3_sse != "aws:kms":
            raise ValueError("s3_sse_kms_key_id is set: set s3_sse to aws:kms too")
        if self.redis_credentials and (self.redis_username or self.redis_password):
            raise ValueError(
                "redis_credentials is set: remove redis_username and redis_password, which it "
                "replaces"
            )
        for kind in ("signing", "encryption"):
            names = f"{kind}_keys_file", f"{kind}_keys_command"
            if all(getattr(self, name) for name in names):
                raise ValueError(f"{names[0]} and {names[1]} are both set: set only one of them")
        if self.seals and (keys := self._seals_by_keys()) and self.seals != ",".join(keys):
            raise ValueError(
                f"seals is {self.seals}, but the keys that are set are for {','.join(keys)}: "
                "remove seals, or set the keys for it or none"
            )
        if self.store_tokens and "encrypted" in self.seal_kinds:
            raise ValueError(
                "store_tokens is set, but token ids are never encrypted and they are the prompt: "
                "set store_tokens to false, or do not encrypt"
            )
        return self

    @model_validator(mode="after")
    def _an_agent_listens_safely(self) -> Self:
        if not self.agent_listen:
            return self
        try:
            host, _ = parse_address(self.agent_listen)
        except ValueError as exc:
            raise ValueError(f"agent_listen: {exc}") from exc
        if self.agent_token is None:
            raise ValueError("agent_listen is set: set agent_token too")
        if not self.may_be_clear("agent") and not is_this_machine(host):
            raise ValueError(
                "agent_listen: token and prompts would cross the network unencrypted; use "
                "127.0.0.1 behind a proxy with TLS, or set allow_plaintext to agent on a trusted "
                "network"
            )
        return self

    @model_validator(mode="after")
    def _urls_are_known(self) -> Self:
        urls = {
            name: parse_url(name, value)
            for name in URL_SETTINGS
            if (value := getattr(self, name)) is not None
        }
        bulk, endpoint = urls["bulk_url"], urls.get("s3_endpoint_url")
        if self.index_url == "bulk:" and bulk.scheme != "file":
            raise ValueError(
                "index_url 'bulk:': only a folder can be its own index, so bulk_url must begin "
                "with file:///"
            )
        if bulk.scheme == "s3" and endpoint is not None and endpoint.path == bulk.host:
            raise ValueError(
                "s3_endpoint_url ends with the bucket of bulk_url, which objkv adds: remove it"
            )
        if not self.may_be_clear("index"):
            refuse_clear("index_url", urls["index_url"])
        if bulk.scheme == "s3" and endpoint is not None and not self.may_be_clear("bulk"):
            refuse_clear("s3_endpoint_url", endpoint)
        return self

    @property
    def seal_kinds(self) -> tuple[str, ...]:
        """How payloads are sealed: ``signed``, ``encrypted``, both or neither."""
        return tuple(self.seals.split(",")) if self.seals else self._seals_by_keys()

    def _seals_by_keys(self) -> tuple[str, ...]:
        return tuple(
            name
            for name, kind in _SEALS.items()
            if getattr(self, f"{kind}_keys_file") or getattr(self, f"{kind}_keys_command")
        )

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Return the pairs of ``public``, for reprs and logs."""
        yield from self.public().items()

    def public(self) -> dict[str, Any]:
        """Return all settings as plain values with secrets masked, for ``doctor`` and logs."""
        out = self.model_dump(mode="json")
        for name in SECRET_SETTINGS:
            if out[name] is not None:
                out[name] = "***"
        for name in ("signing_keys_command", "encryption_keys_command"):
            if out[name]:  # an argument of the command may be a password
                out[name] = out[name].split()[0]
        for name in URL_SETTINGS:
            if out[name] is not None:
                out[name] = parse_url(name, out[name]).shown
        # A secret may have been pasted into another setting.
        return {n: without_secrets(v) if isinstance(v, str) else v for n, v in out.items()}
