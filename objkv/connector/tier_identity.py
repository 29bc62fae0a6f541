"""What a secondary tier stores, and who may share it: the options of a tier, and its identity.

A tier is told less than a connector: keys are vLLM's own block hashes, so its namespaces are never
those of ``ObjKVConnector``, and the engine's configuration it has to look for; where that cannot be
seen the operator has to name everything in ``settings``. Read against vLLM 0.32-0.33.
"""

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version

from objkv.config import Config, load_config
from objkv.connector.scales import kv_dtype_name
from objkv.connector.tier_engine import TierEngine, engine_settings, refuse_unshareable
from objkv.connector.translate import read_weights
from objkv.connector.weights import local_folder, model_digest
from objkv.errors import ConfigError
from objkv.keys.identity import FORMAT, NAMESPACE_HEX, canonical_json, sealed_extra

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import OffloadingConfig

HASH_SCHEME = "vllm-block-hash-1"
"""Chunks are named by vLLM's block hashes, hashed once more to the length of a prefix hash."""


class TierOptions(BaseModel):
    """What only a tier can be told, beside everything in ``Config``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    weights: str | None = None
    """Names the weights where they cannot be read from here: a digest, a release."""
    revision: str | None = None
    """As given to vLLM, where its configuration cannot be seen."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Names and values that are part of the identity: what the operator answers for, ``adapters``
    for one."""
    engine_unseen: bool = False
    """Start also where vLLM's configuration cannot be seen: ``settings`` then names whatever was
    told to vLLM that changes KV (``quantization``, ``hf_overrides``, ``dtype``)."""
    queue_max: int = Field(default=4096, ge=1)
    """Chunks that wait to be loaded, and as many to be saved; they wait in vLLM's own memory."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """Told with KV events, and what requests may choose tiers by."""
    enable_kv_events: bool = False
    """Whether chunks that were saved, or found gone, are told as KV events, if vLLM has them on."""


def read_options(options: Mapping[str, Any]) -> tuple[TierOptions, Config]:
    """A tier's settings from its entry in ``secondary_tiers``, and the rest of the sources.

    Objects that only vLLM itself can have put there, for a later interface, are left out. Raises
    ``ConfigError`` naming the key.
    """
    plain = {
        name: value
        for name, value in options.items()
        if value is None or isinstance(value, (str, int, float, list, tuple, Mapping))
    }
    ours = {name: plain.pop(name) for name in TierOptions.model_fields if name in plain}
    try:
        told = TierOptions.model_validate(ours)
    except ValidationError as exc:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors()]
        raise ConfigError("objkv's secondary tier: " + "; ".join(lines)) from exc
    return told, load_config(plain)


@dataclass(frozen=True, slots=True)
class TierGroup:
    """One KV cache group, as vLLM tells it to a tier."""

    group: int
    tokens_per_block: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """What a tier's namespace stands for. All ranks' bytes of a chunk are one row."""

    model: str
    weights: str
    kv_dtype: str
    groups: tuple[TierGroup, ...]
    tokens_per_hash: int
    blocks_per_chunk: int
    row_bytes: int
    """Of one chunk in vLLM's memory, padding included."""
    layout: str
    """How the bytes lie in a row: by vLLM's own words, and on a CPU by its instruction set too."""
    ranks: tuple[tuple[str, int], ...]
    """Sizes of all parallel groups; empty where vLLM says that a row does not depend on them."""
    vllm: str
    """Version, without its patch: the order of what is in a row is vLLM's own."""
    none_hash: str
    """Hash that all of vLLM's block hashes begin with: stands for algorithm and seed."""
    weights_epoch: int
    tenant: str
    engine: tuple[tuple[str, str], ...]
    """Sorted (name, value) pairs: what vLLM was told besides; empty where that was not seen."""
    extra: tuple[tuple[str, str], ...] = ()
    """Sorted (name, value) pairs: the operator's ``settings``, and what a reset adds."""

    def __post_init__(self) -> None:
        assert self.groups
        assert self.row_bytes > 0
        assert tuple(sorted(self.engine)) == self.engine
        assert tuple(sorted(self.extra)) == self.extra

    def document(self) -> dict[str, Any]:
        """The document as plain JSON values, format and hash scheme included."""
        return {"format": FORMAT, "hash": HASH_SCHEME, **asdict(self)}

    def canonical(self) -> bytes:
        """The document's one encoding, as for ``Identity``."""
        return canonical_json(self.document())

    def namespace(self) -> str:
        """As of an ``Identity``, whose documents name another hash scheme."""
        return hashlib.sha256(self.canonical()).hexdigest()[:NAMESPACE_HEX]


def read_tier_identity(
    spec: "OffloadingSpec",
    engine: TierEngine | None,
    row_bytes: int,
    config: Config,
    options: TierOptions,
) -> TierIdentity:
    """All but ``none_hash``, which vLLM chooses after it made its tiers. Reads the model's files,
    which takes up to seconds. Raises ``ConfigError`` where the weights have no name, or an engine
    cannot be shared with, or is not seen and nobody said that it may be."""
    told: OffloadingConfig = spec.config
    if engine is not None:
        refuse_unshareable(engine, frozenset(options.settings))
    elif not options.engine_unseen:
        raise ConfigError(
            "objkv's secondary tier cannot see vLLM's configuration in this version of vLLM: "
            "name all that changes KV in the tier's 'settings' (quantization, hf_overrides, dtype, "
            "adapters, ...) and set 'engine_unseen' to true, or use ObjKVConnector"
        )
    name = told.model.name
    return TierIdentity(
        model=config.model_id or (Path(name).name if Path(name).is_dir() else name),
        weights=_weights(name, engine, config, options),
        kv_dtype=kv_dtype_name(told.model.dtype),
        groups=tuple(
            TierGroup(group.group_id, group.tokens_per_block, tuple(group.layer_names))
            for group in told.groups
        ),
        tokens_per_hash=told.cache.tokens_per_hash,
        blocks_per_chunk=told.cache.blocks_per_chunk,
        row_bytes=row_bytes,
        layout=_layout(spec),
        ranks=_ranks(spec),
        vllm=".".join(vllm_version.split(".")[:2]),
        none_hash="",
        weights_epoch=config.weights_epoch,
        tenant=config.tenant,
        engine=() if engine is None else engine_settings(engine),
        extra=sealed_extra(tuple(sorted(options.settings.items())), config.seals),
    )


def none_hash() -> str | None:
    """vLLM's first hash in this process, as hex; None before the engine has chosen it.

    It is ``H(seed)``: another algorithm, another ``PYTHONHASHSEED``, or the random seed that vLLM
    takes for algorithms that are not cryptographic, give another one.
    """
    from vllm.v1.core import kv_cache_utils

    chosen = getattr(kv_cache_utils, "NONE_HASH", None)
    return chosen.hex() if isinstance(chosen, bytes) else None


def _weights(name: str, engine: TierEngine | None, config: Config, options: TierOptions) -> str:
    if engine is not None:
        model = engine.config.model_config
        if options.revision not in (None, model.revision):
            raise ConfigError(
                f"the tier's 'revision' is {options.revision!r}, but vLLM's is {model.revision!r}: "
                "leave it out of the tier's options"
            )
        if options.weights is None:
            return read_weights(engine.config, config, local_folder(model.model, model.revision))
    if options.weights is not None:
        return options.weights
    folder = local_folder(name, options.revision)
    if folder is not None and (digest := model_digest(folder, config)) is not None:
        return digest
    if options.revision is not None:
        return f"revision:{options.revision}"
    raise ConfigError(
        f"the weights of {name!r} cannot be read from here, so objkv cannot tell them from other "
        "weights: serve from a local folder, or set 'weights' or 'revision' in the tier's options"
    )


def _replicated(spec: "OffloadingSpec") -> bool:
    return bool(getattr(spec, "replicated_layout", False))


def _layout(spec: "OffloadingSpec") -> str:
    told = spec.config
    names = [str(told.kv_cache_layout)]
    if told.canonical_layout:
        names.append("canonical")
    if _replicated(spec):
        names.append("replicated")
    if current_platform.is_cpu():
        isa = f"opaque-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}".lower()
        names.append(isa)
    return ",".join(names)


def _ranks(spec: "OffloadingSpec") -> tuple[tuple[str, int], ...]:
    """Empty only where vLLM certifies the bytes (``canonical_layout``): of its direct layout it
    says so too, but there each rank's layers lie together, whatever the heads."""
    parallel = spec.config.parallel
    if spec.config.canonical_layout and parallel.is_parallelism_agnostic:
        return ()
    sizes = sorted(field.name for field in fields(parallel) if field.name.endswith("_size"))
    return tuple((name, getattr(parallel, name)) for name in sizes if name not in _NOT_SHARDS)


_NOT_SHARDS = ("data_parallel_size",)
"""Replicas of one another."""
