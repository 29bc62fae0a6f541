"""How much a fleet will store and move, before it does: plain arithmetic on what objkv really does.

Chunks, shards, ranks, which part of a window is kept and the bytes of a header are asked of the
code that saves. Rates and prices are the caller's. ``docs/operations/capacity.md`` lists the formulas.
"""

from dataclasses import dataclass
from typing import Final

from objkv.cache.match import needed_from, stored_blocks
from objkv.codec import header as header_codec
from objkv.codec.values import Claim, Frame, LayerSpec, Provenance
from objkv.errors import ConfigError
from objkv.keys.chunk import ChunkKey, effective_chunk_tokens
from objkv.keys.identity import GroupIdentity
from objkv.keys.topology import Topology
from objkv.ops.audit.report import Prices
from objkv.ops.size.model import DTYPES, ModelShape

RECORD_BYTES: Final = 600
"""Of Redis's memory for a chunk of one shard: measured, Valkey 9.1, 20,000 of them, after a touch:
573, and some for the keys of leases."""
SHARD_BYTES: Final = 110
"""For each further shard of it: an estimate from the field's text."""
MONTH_S: Final = 30 * 86_400
_SAVE_COMMANDS = 3
"""For each payload: lease, publish, release."""
_WRITER = "w" * 40


@dataclass(frozen=True, slots=True)
class Layout:
    """How replicas cut the model."""

    chunk_tokens: int
    """A wish, as the setting."""
    block_size: int
    tp_size: int
    codec_ratio: float = 1.0
    """Raw bytes by stored bytes."""
    multipart_bytes: int = 64 << 20
    range_bytes: int = 8 << 20
    hot_save_bytes_max: int = 0
    """Payloads up to this lie in Redis as well; 0 where there is no Redis."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the fleet is asked."""

    prompts_per_s: float
    prompt_tokens: int
    stored_share: float
    """Of a prompt's tokens, those that are stored already and loaded."""
    ttl_s: int
    used_s: float = 0.0
    """From a chunk's save to its last hit, in the mean."""
    sweep_every_s: float = 86_400.0
    """How often what expired is removed; half of it expired things wait in the mean."""


@dataclass(frozen=True, slots=True)
class ChunkSizing:
    """One chunk of the model, over all groups and ranks."""

    tokens: int
    groups: int
    payloads: int
    raw_bytes: int
    """Of its pages."""
    header_bytes: int
    nbytes: int
    """As stored, headers included."""
    largest_payload_bytes: int
    token_bytes: float
    """Stored bytes of one token."""
    record_bytes: int
    """Of its record in Redis."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """What the fleet will need."""

    model: str
    source: str
    kv_dtype: str
    chunk: ChunkSizing
    prompt_chunks: int
    """Whole chunks of a prompt: what ends within a chunk is not stored."""
    loaded_chunks: int
    saved_chunks_per_s: float
    chunks: float
    """Alive at once, in the long run."""
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
    requests_month: float
    """US dollars, both."""

    @property
    def month(self) -> float:
        """US dollars for the bucket in a month."""
        return self.storage_month + self.requests_month


@dataclass(frozen=True, slots=True)
class _Payload:
    """One payload of a chunk."""

    group: GroupIdentity
    raw_bytes: int
    header_bytes: int
    nbytes: int
    """As stored."""
    readers: int
    """Ranks that each get it."""

    def loaded_with(self, chunks: int, chunk_tokens: int) -> int:
        """How many of these a match of so many chunks loads: of windows only those that reach to
        its end."""
        end = chunks * chunk_tokens
        return chunks - needed_from(self.group, end) // chunk_tokens if chunks else 0


def size_fleet(model: ModelShape, layout: Layout, load: Load, prices: Prices) -> Sizing:
    """Raises ``ConfigError`` for numbers that no fleet can have."""
    _check(layout, load)
    groups = model.groups(layout.block_size)
    payloads = _payloads(model, groups, layout)
    chunk = _chunk(groups, payloads, layout)
    per_prompt = load.prompt_tokens // chunk.tokens
    loaded = min(per_prompt, int(load.prompt_tokens * load.stored_share) // chunk.tokens)
    loads = [(p, p.readers * p.loaded_with(loaded, chunk.tokens)) for p in payloads]
    rate, life_s = load.prompts_per_s, load.ttl_s + load.used_s
    saved_per_s = rate * (per_prompt - loaded)
    puts = saved_per_s * sum(_puts(payload.nbytes, layout) for payload in payloads)
    gets = rate * sum(count * _gets(payload.nbytes, layout) for payload, count in loads)
    bulk_bytes = saved_per_s * (life_s + load.sweep_every_s / 2) * chunk.nbytes
    hot = sum(p.nbytes for p in payloads if p.nbytes <= layout.hot_save_bytes_max)
    commands = rate * (per_prompt + loaded) + saved_per_s * chunk.payloads * _SAVE_COMMANDS
    requests = puts * prices.per_1000_puts + gets * prices.per_1000_gets
    return Sizing(
        model=model.name,
        source=model.source,
        kv_dtype=model.kv_dtype,
        chunk=chunk,
        prompt_chunks=per_prompt,
        loaded_chunks=loaded,
        saved_chunks_per_s=saved_per_s,
        chunks=saved_per_s * (life_s + load.sweep_every_s / 2),
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


def _check(layout: Layout, load: Load) -> None:
    wrong = {
        "chunk_tokens": layout.chunk_tokens < 1,
        "block_size": layout.block_size < 1,
        "tp_size": layout.tp_size < 1,
        "codec_ratio": not 0.1 <= layout.codec_ratio <= 100,
        "prompts_per_s": not 0 <= load.prompts_per_s < 1e9,
        "prompt_tokens": load.prompt_tokens < 1,
        "stored_share": not 0 <= load.stored_share <= 1,
        "ttl_s": load.ttl_s < 1,
        "used_s": not 0 <= load.used_s < 1e10,
        "sweep_every_s": not 0 <= load.sweep_every_s < 1e10,
    }
    for name, bad in wrong.items():
        if bad:
            value = getattr(layout, name, None)
            raise ConfigError(f"{name} {getattr(load, name) if value is None else value}: no size")


def _payloads(
    model: ModelShape, groups: tuple[GroupIdentity, ...], layout: Layout
) -> list[_Payload]:
    """All payloads of one chunk, by the shards that the ranks hold."""
    tokens = _chunk_tokens(groups, layout)
    found = []
    for number, group in enumerate(groups):
        blocks = stored_blocks(group, tokens)
        if not blocks:
            continue
        try:
            topology = Topology(layout.tp_size, group.heads, (len(group.layers),), group.block_size)
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        held = [share for rank in range(topology.size) if (share := topology.held(rank))]
        for shard in dict.fromkeys(share.shard for share in held):
            heads = shard.head_end - shard.head_start
            shape = (blocks, heads, group.block_size, group.content)
            specs = [LayerSpec(name, DTYPES[model.kv_dtype], shape) for name in group.layers]
            key = ChunkKey("0" * 32, bytes(20), number, shard)
            claim = Claim(key, bytes(20), 0, tokens)
            readers = sum(share.shard == shard for share in held)
            raw = sum(spec.nbytes for spec in specs)
            header = _header_bytes(claim, specs, layout)
            nbytes = header + int(raw / layout.codec_ratio)
            found.append(_Payload(group, raw, header, nbytes, readers))
    if not found:
        raise ConfigError(f"nothing of {model.name} can be shared in chunks of {tokens} tokens")
    return found


def _header_bytes(claim: Claim, specs: list[LayerSpec], layout: Layout) -> int:
    """The header as it would be written."""
    codec = "none" if layout.codec_ratio == 1 else "blosc"
    frames, offset = [], 0
    for spec in specs:
        nbytes = int(spec.nbytes / layout.codec_ratio) or 1
        frames.append(Frame(spec, codec, offset, nbytes, "0" * 32, "0" * 32))
        offset += nbytes
    provenance = Provenance("0" * 64, _WRITER, 1_700_000_000)
    return len(header_codec.render(claim, frames, provenance))


def _chunk_tokens(groups: tuple[GroupIdentity, ...], layout: Layout) -> int:
    return effective_chunk_tokens(layout.chunk_tokens, tuple(g.block_size for g in groups))


def _chunk(
    groups: tuple[GroupIdentity, ...], payloads: list[_Payload], layout: Layout
) -> ChunkSizing:
    tokens = _chunk_tokens(groups, layout)
    stored = [payload.nbytes for payload in payloads]
    return ChunkSizing(
        tokens=tokens,
        groups=len(groups),
        payloads=len(payloads),
        raw_bytes=sum(payload.raw_bytes for payload in payloads),
        header_bytes=sum(payload.header_bytes for payload in payloads),
        nbytes=sum(stored),
        largest_payload_bytes=max(stored),
        token_bytes=sum(stored) / tokens,
        record_bytes=RECORD_BYTES + SHARD_BYTES * (len(payloads) - 1),
    )


def _puts(nbytes: int, layout: Layout) -> int:
    """Requests of one put: a payload above the bound is begun, sent in parts and completed."""
    return 1 if nbytes <= layout.multipart_bytes else 2 + -(-nbytes // layout.multipart_bytes)


def _gets(nbytes: int, layout: Layout) -> int:
    """Requests of one get: large payloads are read by ranges."""
    return -(-nbytes // layout.range_bytes)
