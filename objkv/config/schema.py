"""The schema: every setting, its unit, its default and what it means."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from objkv.config.urls import (
    BULK_SCHEMES,
    INDEX_SCHEMES,
    cache_folder,
    check_url,
    default_quota_bytes,
    refuse_clear,
    without_password,
)
from objkv.redact import without_secrets

LoadMode = Literal["async", "layerwise", "auto"]
CodecName = Literal["auto", "none", "lz4", "zstd", "blosc", "blosclz4"]
AdmissionMode = Literal["auto", "always", "never"]
Role = Literal["reader", "writer", "sweeper"]
SECRET_SETTINGS = ("s3_access_key_id", "s3_secret_access_key", "redis_password")


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
    ``redis+sentinel://h1:26379,h2:26379/0?service=name``, ``memory:``, or ``bulk:``: the folder of
    ``bulk_url`` is its own index. That is the default where ``bulk_url`` is set to a folder."""

    s3_endpoint_url: str | None = None
    """For S3-compatible stores other than AWS; unset: ``AWS_ENDPOINT_URL_S3`` and the like."""
    s3_region: str | None = None
    """Unset: ``AWS_REGION``, then the profile's."""
    s3_ca_bundle: Path | None = None
    """PEM file that signs the endpoint's certificate; unset: ``AWS_CA_BUNDLE``, then certifi."""
    s3_addressing: Literal["auto", "path", "virtual"] = "auto"
    """Bucket in the path or in the host name; many servers other than AWS need ``path``."""
    s3_access_key_id: str | None = Field(default=None, repr=False)
    """Better left unset: the AWS client finds roles, profiles and variables."""
    s3_secret_access_key: str | None = Field(default=None, repr=False)
    """Belongs to ``s3_access_key_id``."""
    s3_multipart_bytes: int = Field(default=64 << 20, ge=5 << 20)
    """Payloads above this size are uploaded in parts of this size."""
    s3_range_bytes: int = Field(default=8 << 20, ge=1 << 20)
    """Payloads above this size are read by several ranged requests at once."""
    s3_ranges_max: int = Field(default=56, ge=0, le=256)
    """Concurrent ranged requests besides the first of each payload, per process. 0: one request
    reads a whole payload."""
    s3_hedge_percent_max: int = Field(default=5, ge=0, le=100)
    """Hedge requests slower than p95, for at most this percentage of requests. 0: never."""
    bulk_calls_max: int = Field(default=64, ge=1)
    """Concurrent calls to the bulk store, per process."""

    redis_ca_file: Path | None = None
    """PEM file that signs the server's certificate; unset: the system's authorities."""
    redis_cert_file: Path | None = None
    """PEM certificate of this client, where the server requires one."""
    redis_key_file: Path | None = None
    """PEM private key of ``redis_cert_file``."""
    redis_username: str | None = None
    """Overrides the URL's, so that secrets can stay out of URLs."""
    redis_password: str | None = Field(default=None, repr=False)
    """Overrides the URL's, so that secrets can stay out of URLs."""
    redis_prefix: str = Field(default="objkv", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Every key in Redis begins with it and a colon: tenants that must not read each other's data
    have one prefix each, and rights to no other."""
    redis_calls_max: int = Field(default=16, ge=1)
    """Connections to Redis, per process: this many for the index, and as many for payloads."""

    chunk_tokens: int = Field(default=256, ge=1)
    """Requested chunk size: the effective one is the smallest multiple of all block sizes that
    reaches it."""
    codec: CodecName = "auto"
    """How payloads are compressed: ``none`` suits fast links, ``blosc`` and ``blosclz4`` pay off on
    slow ones; ``auto`` chooses for each chunk by measurements, and compresses nothing for a
    directory or a server on this machine."""
    load_mode: LoadMode = "async"
    """``async``: between steps, hidden by other requests' compute; ``layerwise``: within the step,
    layer by layer (not with asynchronous scheduling); ``auto``: by how much is left to compute."""
    save_decode: bool = False
    """Whether chunks that end in generated tokens are saved too, not only prompts."""
    hot_payload_bytes_max: int = Field(default=1 << 20, ge=0)
    """Larger payloads never go to Redis. 0: none does. Has no effect without Redis."""
    hot_save_bytes_max: int = Field(default=256 << 10, ge=0)
    """Payloads up to this size are kept in Redis as soon as they are saved; larger ones when they
    are loaded often."""
    hot_promote_loads: int = Field(default=3, ge=1)
    """A payload that a worker loaded this many times from the bulk store is copied to Redis."""
    hot_promote_bytes_max: int = Field(default=256 << 20, ge=0)
    """Bytes of such copies per worker and hour. 0: none."""
    tenant: str = Field(default="default", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Part of the identity: tenants never share."""
    role: Role = "writer"
    """What this process may do in store and index: ``reader`` loads and writes nothing, not even
    hits; ``sweeper`` is for operators' commands, and no replica starts with it."""
    allow_plaintext: bool = False
    """Whether stores on other machines may be reached without TLS: credentials, keys and payloads
    then cross the network in clear. Those on this machine always may."""
    model_id: str | None = None
    """Overrides the model's name in the identity, e.g. when mount paths differ."""
    weights_epoch: int = Field(default=0, ge=0)
    """Raise it to start with an empty cache after weights changed in place."""
    vllm_patches: bool = True
    """Whether objkv wraps methods of vLLM that inform no connector when weights change in place,
    adapters come and go, or an engine sleeps. Without it call
    ``reset_prefix_cache(reset_connector=True)`` after each such change."""
    weights_digest: Literal["sampled", "full"] = "sampled"
    """How weights are identified: ``sampled``, by headers and some pages of every tensor
    (files other than safetensors by all bytes); ``full``, by all bytes, a minute for 100 GB at the
    first start. The two never share: all replicas must use the same."""
    ttl_s: int = Field(default=86_400, ge=1)
    """Life of an index record after its last save or hit."""
    quota_bytes: int = Field(default=0, ge=0)
    """Bytes of payloads per tenant, all namespaces together. Above ``quota_high_percent`` of it
    saves stop, and ``objkv sweep`` evicts the least used chunks. 0: no quota. Left unset with the
    default ``bulk_url``: 50 GiB, or a fifth of the disk if that is less."""
    quota_high_percent: int = Field(default=95, ge=1, le=100)
    """Saves stop and a sweep starts to evict when usage reaches this percentage of the quota."""
    quota_low_percent: int = Field(default=85, ge=0, le=100)
    """Sweep evicts until usage falls to this percentage of the quota."""
    sweep_grace_s: int = Field(default=21_600, ge=0)
    """Objects younger than this are never swept. Must exceed the longest save, because writers
    publish last."""
    pinned_bytes_max: int = Field(default=1 << 30, ge=1 << 20)
    """Pinned (page-locked) memory per worker, for loads and saves together. Payloads of replicas
    of larger shards take up to a quarter as much again, or twice the largest of them if that is
    more, from the first of them on."""

    lookup_deadline_ms: int = Field(default=500, ge=1)
    """A lookup that takes longer is a miss."""
    load_deadline_ms: int = Field(default=30_000, ge=1)
    """A load that takes longer is a miss: the rest is recomputed."""
    step_load_deadline_ms: int = Field(default=5_000, ge=1)
    """The same for a load within the step, which holds up every request of the replica."""
    encoder_deadline_ms: int = Field(default=1_000, ge=1)
    """A stored encoder output that takes longer is a miss: its image is encoded."""
    save_deadline_ms: int = Field(default=60_000, ge=1)
    """A save that takes longer is dropped."""
    drain_deadline_ms: int = Field(default=10_000, ge=0)
    """How long a shutdown waits for in-flight saves."""
    load_threads: int = Field(default=8, ge=1, le=256)
    """Threads that fetch and decode chunks, per worker: fewer run at once where processors are few
    and the store is near."""
    save_threads: int = Field(default=16, ge=1, le=256)
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
    """How long a record in the scheduler's memory is valid."""
    near_miss_ttl_ms: int = Field(default=500, ge=0)
    """How long the scheduler remembers that a chunk is not stored. 0: every lookup goes to the
    index."""
    lease_ms: int = Field(default=30_000, ge=1)
    """How long one replica holds the lease for saving a chunk."""
    breaker_failures: int = Field(default=5, ge=1)
    """Failures in a row that open the circuit breaker of a store's reads, or of its writes."""
    breaker_reset_ms: int = Field(default=1_000, ge=1)
    """How long at most the circuit stays open before one call tries again; doubled each time it
    fails."""
    breaker_reset_max_ms: int = Field(default=15_000, ge=1)
    """The longest such pause: a store that is back is used again after this time at the latest."""

    admission: AdmissionMode = "auto"
    """Which matches are loaded: ``auto``, those where measurements show that loading beats
    recomputing; ``always``; ``never``, which only saves."""
    at_start: Literal["degraded", "strict"] = "degraded"
    """If a store is unreachable at start: serve without it until it is back, or refuse to start."""
    load_failure: Literal["recompute", "vllm"] = "recompute"
    """``recompute`` sets vLLM's ``kv_load_failure_policy`` to it; ``vllm`` does not set it."""
    store_tokens: bool = False
    """Whether payloads carry their token ids, for audits. They are the prompt in plain sight."""

    signing_keys_file: Path | None = None
    """Keys to sign payloads with, a line each: id, tenant or ``*``, 32 bytes as hex or base64.
    Unsigned payloads are then not loaded. Only its owner may be able to read the file."""
    signing_keys_command: str | None = Field(default=None, repr=False)
    """Command that prints the content of a ``signing_keys_file``. Run once at start, without a
    shell."""
    encryption_keys_file: Path | None = None
    """Keys to encrypt payloads with, in the format of ``signing_keys_file``. Unencrypted payloads
    are then not loaded."""
    encryption_keys_command: str | None = Field(default=None, repr=False)
    """Command that prints the content of an ``encryption_keys_file``. Run once at start, without a
    shell."""
    keys_command_deadline_ms: int = Field(default=10_000, ge=1)
    """How long such a command may take."""

    @model_validator(mode="before")
    @classmethod
    def _a_folder_is_its_own_index(cls, values: Any) -> Any:
        """A shared folder, by a mount perhaps, is shared with its index: a separate index on this
        machine would hide the chunks from others who can read them."""
        if isinstance(values, dict) and "index_url" not in values:
            bulk_url = values.get("bulk_url")
            if isinstance(bulk_url, str) and bulk_url.strip().startswith("file:"):
                return values | {"index_url": "bulk:"}
        return values

    @model_validator(mode="before")
    @classmethod
    def _a_reader_copies_nothing(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("role") == "reader":
            return values | {"hot_promote_bytes_max": 0}
        return values

    @model_validator(mode="before")
    @classmethod
    def _the_users_folder_does_not_fill_the_disk(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.keys() & {"bulk_url", "quota_bytes"}:
            return values | {"quota_bytes": default_quota_bytes()}
        return values

    @model_validator(mode="after")
    def _watermarks_are_in_order(self) -> Self:
        if self.quota_low_percent > self.quota_high_percent:
            raise ValueError(
                f"quota_low_percent {self.quota_low_percent}: not above quota_high_percent "
                f"{self.quota_high_percent}"
            )
        return self

    @model_validator(mode="after")
    def _keys_are_told_once(self) -> Self:
        for kind in ("signing", "encryption"):
            names = f"{kind}_keys_file", f"{kind}_keys_command"
            if all(getattr(self, name) for name in names):
                raise ValueError(f"{names[0]} and {names[1]}: set one of them")
        if self.store_tokens and "encrypted" in self.seals:
            raise ValueError(
                "store_tokens: token ids are not encrypted, and they are the prompt; leave it off, "
                "or do not encrypt"
            )
        return self

    @model_validator(mode="after")
    def _urls_are_known(self) -> Self:
        check_url("bulk_url", self.bulk_url, BULK_SCHEMES)
        check_url("index_url", self.index_url, INDEX_SCHEMES)
        if self.index_url.startswith("bulk:") and not self.bulk_url.startswith("file:"):
            raise ValueError(
                "index_url 'bulk:': only a folder (bulk_url file:///) can be its index"
            )
        if not self.allow_plaintext:
            urls = {"index_url": self.index_url}
            if self.bulk_url.startswith("s3:"):
                urls["s3_endpoint_url"] = self.s3_endpoint_url or ""
            for name, url in urls.items():
                refuse_clear(name, url)
        return self

    @property
    def seals(self) -> tuple[str, ...]:
        """How payloads are sealed: ``signed``, ``encrypted``, both or neither."""
        kinds = {
            "signed": self.signing_keys_file or self.signing_keys_command,
            "encrypted": self.encryption_keys_file or self.encryption_keys_command,
        }
        return tuple(name for name, keys in kinds.items() if keys)

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """For reprs and logs: what ``public`` shows."""
        yield from self.public().items()

    def public(self) -> dict[str, Any]:
        """All settings as plain values, secrets masked: for ``doctor`` and logs."""
        out = self.model_dump(mode="json")
        for name in SECRET_SETTINGS:
            if out[name] is not None:
                out[name] = "***"
        for name in ("signing_keys_command", "encryption_keys_command"):
            if out[name]:  # what a command is given may be a password
                out[name] = out[name].split()[0]
        for name in ("bulk_url", "index_url", "s3_endpoint_url"):
            if out[name] is not None:
                out[name] = without_password(out[name])
        # Also those pasted into another setting.
        return {n: without_secrets(v) if isinstance(v, str) else v for n, v in out.items()}
