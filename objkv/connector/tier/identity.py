"""What a secondary tier stores, and who may share it: the options of a tier, and its identity.

A tier knows less than a connector: keys are vLLM's own block hashes, so its namespaces are never
those of ``ObjKVConnector``, and the engine's configuration it has to look for; where that cannot be
seen the operator has to name everything in ``settings``. Read against vLLM 0.32-0.33.
"""

import hashlib
import platform
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version

from objkv.config import Config, load_config
from objkv.connector.model.identity import further_settings, names_media, read_weights
from objkv.connector.model.media import kv_dtype_name
from objkv.connector.model.weights import local_folder, model_digest
from objkv.connector.tier.rows import RowForm
from objkv.errors import ConfigError
from objkv.keys.identity import FORMAT, NAMESPACE_HEX, canonical_json, sealed_extra

if TYPE_CHECKING:
    from types import FrameType

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import OffloadingConfig


_DEPTH_MAX = 100
"""Callers looked at; vLLM 0.32 has it in the sixth."""


@dataclass(frozen=True, slots=True)
class TierEngine:
    """What a tier's callers had."""

    config: VllmConfig
    connector: "weakref.ref[KVConnectorBase_V1] | None" = None
    """vLLM's, if it was seen; it holds the tier, not the tier it."""

    def manager(self) -> "KVCacheManager | None":
        """vLLM's, once the connector was bound to it."""
        connector = None if self.connector is None else self.connector()
        return getattr(connector, "_kv_cache_manager", None)


def find_engine(spec: "OffloadingSpec") -> TierEngine | None:
    """The engine whose connector is being made with ``spec`` further up this thread's stack, also
    one of several connectors; None if there is none, and the tier does not start
    (``engine_unseen``).

    vLLM gives a tier what concerns the rows, not what else changes the KV in them: overrides of the
    model's configuration, quantization, adapters. No name that an operator has to remember would
    keep two replicas reliably apart. But a tier is made while vLLM's connector is, so the
    configuration is a local variable of a caller, and it is recognised by the very object that both
    were given as ``kv_connector_extra_config``. Source: vLLM 0.32-0.33,
    ``OffloadingConnectorScheduler.__init__`` in
    ``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``,
    ``build_offloading_config``.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    extra = spec.config.extra_config
    config: VllmConfig | None = None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH_MAX):
        if frame is None:
            break
        there = frame.f_locals
        found = there.get("vllm_config")
        if _is_of(found, extra):
            config = config or found
            if isinstance(maker := there.get("self"), KVConnectorBase_V1):
                return TierEngine(config, weakref.ref(maker))
        elif config is not None:
            break  # above the caller that was given it
        frame = frame.f_back
    return None if config is None else TierEngine(config)


def engine_settings(engine: TierEngine) -> tuple[tuple[str, str], ...]:
    """Settings of the engine that change KV and that a tier is not given, as sorted text."""
    found = dict(further_settings(engine.config))
    found["quantization"] = str(engine.config.model_config.quantization)
    return tuple(sorted(found.items()))


def refuse_unshareable(engine: TierEngine, named: frozenset[str]) -> None:
    """Raises ``ConfigError``, with what to do, for engines whose keys do not say all that a chunk
    depends on. ``named``: what the operator answers for, by names in ``settings``."""
    config = engine.config
    parallel, speculative = config.parallel_config, config.speculative_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            "objkv's secondary tier does not support external_launcher with several ranks, each of "
            "which would schedule, save and load by itself: use the executor 'mp' or 'ray'"
        )
    if not names_media(config):
        raise ConfigError(
            "objkv's secondary tier cannot tell one image from another, because vLLM only numbers "
            "them here: turn prefix caching on, or set --mm-processor-cache-gb above 0"
        )
    if config.lora_config is not None and "adapters" not in named:
        raise ConfigError(
            "vLLM names LoRA adapters to objkv's secondary tier by name and path, not by what they "
            "hold: name the release of all of them as 'adapters' in the tier's 'settings', and "
            "change it whenever one of them changes, or run without LoRA"
        )
    drafts = speculative is not None and speculative.method not in ("ngram", "suffix")
    if drafts and "speculative" not in named:
        raise ConfigError(
            "objkv's secondary tier does not know which draft model computed KV: name it as "
            f"'speculative' in the tier's 'settings', or use 'ngram', not {speculative.method!r}"
        )


def _is_of(found: Any, extra: Any) -> bool:
    if not isinstance(found, VllmConfig) or found.kv_transfer_config is None:
        return False
    return found.kv_transfer_config.kv_connector_extra_config is extra


class TierAdapters:
    """Whether a LoRA adapter's name may have come to stand for other weights than it did. The
    scheduler's thread only.

    vLLM's keys hold an adapter's name and path, not what its files hold, and a tier does not know
    which adapter a request uses. So a name that comes back is taken for other weights. Adapters
    that requests bring along, and files that change beneath them, are not noticed: hence the
    operator's word, see ``docs/tier.md``. Source: vLLM 0.32, ``_gen_lora_extra_hash_keys`` in
    ``v1/core/kv_cache_utils.py``.
    """

    def __init__(self, changed: Callable[[], object]) -> None:
        self._changed = changed
        self._numbers: dict[str, int | None] = {}
        """Of each name that was loaded; None when it was put away. Never forgotten: names of
        adapters are few."""
        self._unknown = False
        """Whether one was put away whose name is not known."""

    def loaded(self, lora_request: Any) -> None:
        """vLLM is about to read an adapter's files."""
        name, number = lora_request.lora_name, lora_request.lora_int_id
        is_new = name not in self._numbers and not self._unknown
        is_same = self._numbers.get(name) == number  # which vLLM does not read again
        self._numbers[name] = number
        if getattr(lora_request, "load_inplace", False) or not (is_new or is_same):
            self._changed()

    def unloaded(self, number: int) -> None:
        """vLLM has put the adapter of that ``lora_int_id`` away."""
        names = [name for name, of in self._numbers.items() if of == number]
        self._unknown = self._unknown or not names
        for name in names:
            self._numbers[name] = None


HASH_SCHEME = "vllm-block-hash-1"
"""Chunks are named by vLLM's block hashes, hashed once more to the length of a prefix hash."""


class TierOptions(BaseModel):
    """Settings of a tier, besides everything in ``Config``."""

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
    """Part of KV events, and requests may choose tiers by it."""
    enable_kv_events: bool = False
    """Whether chunks that were saved, or found gone, become KV events, if vLLM has them on."""


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
        own = TierOptions.model_validate(ours)
    except ValidationError as exc:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors()]
        raise ConfigError("objkv's secondary tier: " + "; ".join(lines)) from exc
    return own, load_config(plain)


@dataclass(frozen=True, slots=True)
class TierGroup:
    """One KV cache group, as a tier gets it."""

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
    """Sorted (name, value) pairs: other settings of vLLM; empty where they were not seen."""
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

    def row_form(self) -> RowForm:
        """What rows look like. Raises ``ConfigError`` if one is larger than a payload's frame."""
        tokens = max(group.tokens_per_block for group in self.groups)
        return RowForm.of(self.row_bytes, self.kv_dtype, tokens * self.blocks_per_chunk)

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
    cannot be shared with, or is not seen although ``engine_unseen`` is not set."""
    given: OffloadingConfig = spec.config
    if engine is not None:
        refuse_unshareable(engine, frozenset(options.settings))
    elif not options.engine_unseen:
        raise ConfigError(
            "objkv's secondary tier cannot see vLLM's configuration in this version of vLLM: "
            "name all that changes KV in the tier's 'settings' (quantization, hf_overrides, dtype, "
            "adapters, ...) and set 'engine_unseen' to true, or use ObjKVConnector"
        )
    name = given.model.name
    return TierIdentity(
        model=config.model_id or (Path(name).name if Path(name).is_dir() else name),
        weights=_weights(name, engine, config, options),
        kv_dtype=kv_dtype_name(given.model.dtype),
        groups=tuple(
            TierGroup(group.group_id, group.tokens_per_block, tuple(group.layer_names))
            for group in given.groups
        ),
        tokens_per_hash=given.cache.tokens_per_hash,
        blocks_per_chunk=given.cache.blocks_per_chunk,
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
    given = spec.config
    names = [str(given.kv_cache_layout)]
    if given.canonical_layout:
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
