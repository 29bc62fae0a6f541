"""The identity of a secondary tier. Its keys are vLLM's own block hashes, so its namespaces differ
from those of ``ObjKVConnector``. Read against vLLM 0.32-0.33."""

import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version

from objkv.config import Config
from objkv.connector.model.drafts import WITHOUT_KV
from objkv.connector.model.identity import (
    further_settings,
    kv_dtype_name,
    names_media,
    refuse_external_launcher,
)
from objkv.connector.model.weights import read_weights
from objkv.errors import ConfigError
from objkv.keys.identity import NamespaceIdentity, name_model, sealed_extra

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import OffloadingConfig


_DEPTH_MAX = 200
"""Number of callers to search. vLLM 0.32 has its connector in the fifth."""


def find_connector(spec: "OffloadingSpec") -> "KVConnectorBase_V1":
    """Return vLLM's connector, alone or one of several, that is being made with ``spec`` by a
    caller of this function. Raises ``ConfigError`` if there is none. vLLM gives a tier the form of
    the rows, but not the other settings that change their KV: overrides of the model's
    configuration, quantization, adapters. But it makes a tier while it makes its connector, which
    has them, and whose ``kv_connector_extra_config`` is the object in ``spec``. Source: vLLM
    0.32-0.33, ``build_offloading_config``, ``OffloadingConnector.__init__``."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    for frame, _ in islice(walk_stack(sys._getframe(1)), _DEPTH_MAX):
        maker = frame.f_locals.get("self")
        if isinstance(maker, KVConnectorBase_V1):
            transfer = maker._vllm_config.kv_transfer_config
            if transfer.kv_connector_extra_config is spec.config.extra_config:
                return maker
    raise ConfigError(
        "objkv's secondary tier cannot find vLLM's configuration in this version of vLLM: use "
        "ObjKVConnector"
    )


def engine_settings(
    vllm_config: "VllmConfig", config: Config, named: frozenset[str]
) -> tuple[tuple[str, str], ...]:
    """Return settings that change KV and that vLLM does not give to a tier, as sorted text. A
    draft's KV is in the rows, so they include its method, tokens and weights, unless the operator
    has named it. Raises ``ConfigError`` if its weights cannot be identified."""
    found = dict(further_settings(vllm_config))
    found["quantization"] = str(vllm_config.model_config.quantization)
    draft = vllm_config.speculative_config
    if draft is not None and draft.method not in WITHOUT_KV and "speculative" not in named:
        found["draft_method"] = draft.method
        found["draft_tokens"] = str(draft.num_speculative_tokens)
        found["draft_weights"] = read_weights(vllm_config, config, draft=True)
    return tuple(sorted(found.items()))


def refuse_unshareable(vllm_config: "VllmConfig", named: frozenset[str]) -> None:
    """Raise ``ConfigError`` if vLLM's keys omit something that determines KV. ``named``: names in
    ``settings``, for which the operator is responsible."""
    refuse_external_launcher(vllm_config)
    if not names_media(vllm_config):
        raise ConfigError(
            "objkv's secondary tier cannot identify images here: turn prefix caching on or set "
            "--mm-processor-cache-gb above 0, and unset --mm-encoder-attn-dtype"
        )
    if vllm_config.lora_config is not None and "adapters" not in named:
        raise ConfigError(
            "objkv's secondary tier cannot identify LoRA adapters, because vLLM gives it their "
            "names and paths but not their content: set 'adapters' in the tier's 'settings' to a "
            "release name and change it whenever an adapter changes, or run without LoRA"
        )


class TierAdapters:
    """Detects that the name of a LoRA adapter may now mean other weights. For the scheduler's
    thread only. vLLM's keys contain an adapter's name and path but not its content, and a tier
    cannot see which adapter a request uses. A name that is loaded again therefore counts as other
    weights. The operator is responsible for adapters that come with requests, and for changed
    files, see ``docs/models.md``. Source: vLLM 0.32, ``_gen_lora_extra_hash_keys``."""

    def __init__(self, changed: Callable[[], object]) -> None:
        self._changed = changed
        self._numbers: dict[str, int] = {}
        """Number by loaded name, -1 after unloading. There are few names, so none is forgotten."""

    def loaded(self, lora_request: Any) -> None:
        """Record that vLLM is about to read an adapter's files."""
        name, number = lora_request.lora_name, lora_request.lora_int_id
        before = self._numbers.get(name, number)  # vLLM does not read the same number again
        self._numbers[name] = number
        if before != number or getattr(lora_request, "load_inplace", False):
            self._changed()

    def unloaded(self, number: int) -> None:
        """Record that vLLM has unloaded the adapter with that ``lora_int_id``."""
        names = [name for name, of in self._numbers.items() if of == number]
        self._numbers |= dict.fromkeys(names, -1)


@dataclass(frozen=True, slots=True)
class TierGroup:
    """One KV cache group, as vLLM describes it to a tier."""

    group: int
    tokens_per_block: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TierIdentity(NamespaceIdentity):
    """The identity of a tier's namespace. One row has all ranks' bytes of a chunk. Chunks are named
    by vLLM's block hashes, hashed again to the length of a prefix hash."""

    scheme: ClassVar[str] = "vllm-block-hash-1"
    kv_dtype: str
    groups: tuple[TierGroup, ...]
    tokens_per_hash: int
    blocks_per_chunk: int
    row_bytes: int
    """Bytes of one chunk in vLLM's memory, including padding."""
    layout: str
    """Order of the bytes in a row, as vLLM names it, and on a CPU its instruction set."""
    ranks: tuple[tuple[str, int], ...]
    """Sizes of all parallel groups. Empty if vLLM declares rows independent of them."""
    vllm: str
    """Version without the patch number, because vLLM defines the order in a row."""
    none_hash: str
    """First hash of vLLM's chain of block hashes. It depends on algorithm and seed."""
    engine: tuple[tuple[str, str], ...]
    """Other settings of vLLM, sorted. ``extra`` is the operator's ``settings``."""

    def __post_init__(self) -> None:
        NamespaceIdentity.__post_init__(self)
        assert self.groups
        assert self.row_bytes > 0
        assert tuple(sorted(self.engine)) == self.engine

    def chunk_tokens(self) -> int:
        """Return the number of tokens of a chunk."""
        return self.blocks_per_chunk * max(group.tokens_per_block for group in self.groups)


def read_tier_identity(
    spec: "OffloadingSpec",
    vllm_config: "VllmConfig",
    row_bytes: int,
    config: Config,
    settings: Mapping[str, str],
) -> TierIdentity:
    """Return the identity without ``none_hash``, which vLLM chooses after it has made its tiers.
    ``settings``: the operator's. Reads the model's files, which may take seconds. Raises
    ``ConfigError`` if the weights cannot be identified, or if the engine is not supported."""
    given: OffloadingConfig = spec.config
    named = frozenset(settings)
    refuse_unshareable(vllm_config, named)
    return TierIdentity(
        model=name_model(given.model.name, config.model_id),
        weights=read_weights(vllm_config, config),
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
        engine=engine_settings(vllm_config, config, named),
        extra=sealed_extra(tuple(sorted(settings.items())), config.seal_kinds),
    )


def none_hash() -> str | None:
    """Return vLLM's first hash in this process as hex, or None before the engine has chosen it. It
    depends on the algorithm and on ``PYTHONHASHSEED`` or another seed."""
    from vllm.v1.core import kv_cache_utils

    chosen = getattr(kv_cache_utils, "NONE_HASH", None)
    return chosen.hex() if isinstance(chosen, bytes) else None


def _layout(spec: "OffloadingSpec") -> str:
    given = spec.config
    names = [str(given.kv_cache_layout)]
    if given.canonical_layout:
        names.append("canonical")
    if getattr(spec, "replicated_layout", False):
        names.append("replicated")
    if current_platform.is_cpu():
        isa = torch.backends.cpu.get_cpu_capability()
        names.append(f"opaque-{platform.machine()}-{isa}".lower())
    return ",".join(names)


def _ranks(spec: "OffloadingSpec") -> tuple[tuple[str, int], ...]:
    """Return the sizes of parallel groups, none only with vLLM's ``canonical_layout``: its direct
    layout has each rank's layers together, although it is declared independent of ranks."""
    parallel = spec.config.parallel
    if spec.config.canonical_layout and parallel.is_parallelism_agnostic:
        return ()
    sizes = sorted(field.name for field in fields(parallel) if field.name.endswith("_size"))
    # Data-parallel ranks are replicas of each other.
    return tuple((name, getattr(parallel, name)) for name in sizes if name != "data_parallel_size")
