"""Estimates what a fleet stores and transfers, of a model that is built in or read from its
``config.json``. ``docs/operations/capacity.md`` has the formulas."""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Final, cast

from objkv.cache.match import needed_from, stored_blocks
from objkv.config.prices import RANGE_BYTES, Prices
from objkv.errors import ConfigError
from objkv.keys.chunk import effective_chunk_tokens
from objkv.keys.identity import GroupIdentity, GroupKind
from objkv.keys.topology import Topology
from objkv.ops.models.layers import KV_DTYPES, CacheLayer, read_layers

RECORD_BYTES: Final = 300
"""Redis memory per chunk of one group. Measured with Valkey 9.1 and 20,000 chunks, after a touch:
285 bytes, plus some for the keys of leases."""
GROUP_BYTES: Final = 50
"""Redis memory per further group. Measured in the same way: 45 bytes."""
MONTH_S: Final = 30 * 86_400
_SAVE_COMMANDS = 2
"""Redis commands per saved payload: lease, publish."""
_NAME = "model.layers.{}.self_attn.attn"
_EVEN = 1.5
"""Kinds of layers become one group each if their layer counts differ by less than this factor."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a model's KV cache."""

    name: str
    layers: tuple[CacheLayer, ...]
    """In forward order; each ``divisible``."""
    kv_dtype: str
    """One of ``KV_DTYPES``."""
    source: str

    def groups(self, block_size: int) -> tuple[GroupIdentity, ...]:
        """Return the KV cache groups that vLLM makes of the layers.

        Identical layers are one group. Otherwise, each kind is split into groups of as many layers
        as the rarest kind has; if the layer counts of all kinds are within a factor of 1.5, each
        kind is one group. Source: vLLM 0.31-0.33, ``_get_kv_cache_groups_uniform_page_size`` in
        ``v1/core/kv_cache_utils.py``, since 0.33 ``kv_cache_planning.py``.
        """
        alike: dict[CacheLayer, list[int]] = {}
        for number, layer in enumerate(self.layers):
            alike.setdefault(layer, []).append(number)
        least, most = min(map(len, alike.values())), max(map(len, alike.values()))
        each = most if most < least * _EVEN else least
        groups = []
        for layer, numbers in alike.items():
            parts = -(-len(numbers) // each)
            for part in range(parts):
                names = tuple(_NAME.format(number) for number in numbers[part::parts])
                kind, shape = cast("GroupKind", layer.kind), (layer.heads, layer.content)
                groups.append(GroupIdentity(kind, layer.window, names, *shape, block_size))
        return tuple(groups)


def read_model(folder: Path, kv_dtype: str | None = None) -> ModelShape:
    """Read the model in ``folder``, a directory or a ``config.json``. Raises ``ConfigError`` if the
    file lacks a value, or the model has caches that are not divided by token."""
    file = folder if folder.is_file() else folder / "config.json"
    model = read_layers(folder)
    if other := next((layer.kind for layer in model.layers if not layer.divisible), None):
        raise ConfigError(
            f"{file}: has {other} layers, whose caches are not divided by token: let a replica "
            "save some and use objkv ls"
        )
    dtype = kv_dtype or model.dtype
    if dtype not in KV_DTYPES:
        raise ConfigError(f"{file}: no dtype that a KV cache can have; give it with --kv-dtype")
    return ModelShape(file.parent.name or str(file), model.layers, dtype, str(file))


@dataclass(frozen=True, slots=True)
class Preset:
    """One published model."""

    layers: int
    kv_heads: int
    """1 for MLA."""
    size: int
    """Elements of a head; for MLA, of the latent including its rotary part."""
    source: str
    """The repository of the ``config.json``."""
    window: int | None = None
    """Window of the sliding window layers."""
    pattern: str = "f"
    """Repeating kinds of layers: (f)ull, (s)liding window, (m)la."""

    def shape(self, name: str, kv_dtype: str) -> ModelShape:
        """Return the same shape as ``read_model`` would."""
        kinds = {
            "f": CacheLayer("full", self.kv_heads, 2 * self.size),
            "s": CacheLayer("sliding_window", self.kv_heads, 2 * self.size, self.window),
            "m": CacheLayer("mla", 1, self.size),
        }
        whole = (self.pattern * self.layers)[: self.layers]
        layers = tuple(kinds[kind] for kind in whole)
        return ModelShape(name, layers, kv_dtype, f"config.json of {self.source}")


PRESETS: Final = {
    name: Preset(**numbers)
    for name, numbers in json.loads(files(__package__).joinpath("models.json").read_text()).items()
}


def preset(name: str, kv_dtype: str | None) -> ModelShape:
    """Return the built-in model ``name``, ignoring case. Raises ``ConfigError`` if not listed."""
    of_source = (one for one in PRESETS.values() if one.source.lower() == name.lower())
    found = PRESETS.get(name.lower()) or next(of_source, None)
    if found is None:
        beginning = [known for known in PRESETS if known.startswith(name.lower())]
        near = (beginning or get_close_matches(name.lower(), PRESETS, cutoff=0.4))[:3]
        hint = f"did you mean {' or '.join(near)}?" if near else "objkv size --list shows all names"
        raise ConfigError(f"{name} is neither a directory nor a built-in model name; {hint}")
    return found.shape(name.lower(), kv_dtype or "bfloat16")


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """How replicas divide and store the KV of the model."""

    chunk_tokens: int
    """The setting; the effective length is rounded up to whole blocks."""
    block_size: int
    tp_size: int
    codec_ratio: float = 1.0
    """Raw bytes divided by stored bytes."""
    hot_save_bytes_max: int = 0
    """Payloads up to this size are also stored in Redis; 0 without Redis."""


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of the fleet."""

    prompts_per_s: float
    prompt_tokens: int
    stored_share: float
    """Share of a prompt's tokens that is already stored and loaded."""
    ttl_s: int
    used_s: float = 0.0
    """Average time from a chunk's save to its last hit."""
    sweep_every_s: float = 3_600.0
    """Time between sweeps. An expired chunk stays for half of it on average."""
    grace_s: float = 0.0
    """Younger payloads are not swept, expired or not."""

    @property
    def kept_s(self) -> float:
        """How long a chunk's bytes are stored on average."""
        return max(self.ttl_s + self.used_s, self.grace_s) + self.sweep_every_s / 2


@dataclass(frozen=True, slots=True)
class ChunkSizing:
    """One chunk of the model, over all groups and ranks."""

    tokens: int
    groups: int
    payloads: int
    raw_bytes: int
    nbytes: int
    """Stored bytes, without the headers, which have a few KiB."""
    largest_payload_bytes: int
    token_bytes: float
    record_bytes: int
    """Bytes of its record in Redis."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """The resources that the fleet needs."""

    model: str
    source: str
    kv_dtype: str
    chunk: ChunkSizing
    prompt_chunks: int
    """Whole chunks of a prompt. Tokens after the last whole chunk are not stored."""
    loaded_chunks: int
    saved_chunks_per_s: float
    chunks: float
    """Chunks stored at the same time, in the long run."""
    records: float
    bulk_bytes: float
    index_bytes: float
    hot_bytes: float
    puts_per_s: float
    gets_per_s: float
    redis_commands_per_s: float
    save_bytes_per_s: float
    load_bytes_per_s: float
    storage_month: float
    """In US dollars, as ``requests_month``, which includes prices of transferred bytes."""
    requests_month: float

    @property
    def month(self) -> float:
        """Monthly cost of the bucket in US dollars."""
        return self.storage_month + self.requests_month


@dataclass(frozen=True, slots=True)
class _Payload:
    group: GroupIdentity
    raw_bytes: int
    nbytes: int
    """Stored bytes, without the header of a few KiB."""

    def loaded_with(self, chunks: int, chunk_tokens: int) -> int:
        """Return how many of these a match of ``chunks`` loads: of a window, those at its end."""
        end = chunks * chunk_tokens
        return chunks - needed_from(self.group, end) // chunk_tokens if chunks else 0


def size_fleet(model: ModelShape, layout: ReplicaLayout, load: Load, prices: Prices) -> Sizing:
    """Return the estimate. Raises ``ConfigError`` for a model that ``layout`` cannot divide."""
    groups = model.groups(layout.block_size)
    tokens = effective_chunk_tokens(layout.chunk_tokens, tuple(g.block_size for g in groups))
    payloads = _payloads(model, groups, layout, tokens)
    stored = [payload.nbytes for payload in payloads]
    chunk = ChunkSizing(
        tokens=tokens,
        groups=len(groups),
        payloads=len(payloads),
        raw_bytes=sum(payload.raw_bytes for payload in payloads),
        nbytes=sum(stored),
        largest_payload_bytes=max(stored),
        token_bytes=sum(stored) / tokens,
        record_bytes=RECORD_BYTES + GROUP_BYTES * (len(payloads) - 1),
    )
    per_prompt = load.prompt_tokens // chunk.tokens
    loaded = min(per_prompt, int(load.prompt_tokens * load.stored_share) // chunk.tokens)
    loads = [(p, p.loaded_with(loaded, chunk.tokens)) for p in payloads]
    rate, life_s = load.prompts_per_s, load.ttl_s + load.used_s
    saved_per_s = rate * (per_prompt - loaded)
    puts = saved_per_s * chunk.payloads
    # With its header a payload ends in one more range.
    gets = rate * sum(count * (payload.nbytes // RANGE_BYTES + 1) for payload, count in loads)
    chunks = saved_per_s * load.kept_s
    bulk_bytes = chunks * chunk.nbytes
    hot = sum(p.nbytes for p in payloads if p.nbytes <= layout.hot_save_bytes_max)
    commands = rate * (per_prompt + loaded) + saved_per_s * chunk.payloads * _SAVE_COMMANDS
    requests = puts * prices.per_1000_puts + gets * prices.per_1000_gets
    requests += saved_per_s * chunk.nbytes / 1e6 * prices.put_gb
    return Sizing(
        model=model.name,
        source=model.source,
        kv_dtype=model.kv_dtype,
        chunk=chunk,
        prompt_chunks=per_prompt,
        loaded_chunks=loaded,
        saved_chunks_per_s=saved_per_s,
        chunks=chunks,
        records=saved_per_s * life_s,
        bulk_bytes=bulk_bytes,
        index_bytes=saved_per_s * life_s * chunk.record_bytes,
        hot_bytes=saved_per_s * life_s * hot,
        puts_per_s=puts,
        gets_per_s=gets,
        redis_commands_per_s=commands,
        save_bytes_per_s=saved_per_s * chunk.nbytes,
        load_bytes_per_s=rate * sum(count * payload.nbytes for payload, count in loads),
        storage_month=bulk_bytes / 1e9 * prices.gb_month,
        requests_month=requests / 1000 * MONTH_S,
    )


def _payloads(
    model: ModelShape, groups: tuple[GroupIdentity, ...], layout: ReplicaLayout, tokens: int
) -> list[_Payload]:
    """Return the payloads of one chunk: one for each group, whatever the number of ranks."""
    found = []
    for group in groups:
        blocks = stored_blocks(group, tokens)
        if not blocks:
            continue
        try:
            Topology(layout.tp_size, group.heads, (len(group.layers),))
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        cells = len(group.layers) * group.heads * group.content * group.block_size * blocks
        nbytes = cells * KV_DTYPES[model.kv_dtype]
        found.append(_Payload(group, nbytes, int(nbytes / layout.codec_ratio)))
    if not found:
        raise ConfigError(f"{model.name} has nothing to share in chunks of {tokens} tokens")
    return found
