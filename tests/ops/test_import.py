"""Imports into a cache that replicas use at the same time."""

import os
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from itertools import cycle

import pytest

from objkv.codec.payload import Claim, Header, LayerSpec, Provenance, encode, read_header
from objkv.errors import ConfigError, PayloadError, StoreUnavailable
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.index.memory import MemoryIndex
from objkv.index.shapes import SHAPES_HASH
from objkv.keys.chunk import ChunkKey
from objkv.keys.encoder import EncoderIdentity
from objkv.keys.identity import FIRST_DRAFT_GROUP, GroupIdentity, Identity, identity_path
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.keys.topology import Shard, TokenPart
from objkv.ops.backends_view import (
    HANDOFF_LAYOUT,
    NamespacePart,
    read_namespace,
    stored_parts,
)
from objkv.ops.export.export import Export
from objkv.ops.export.import_ import Import, arrivals, check_fits, check_told, new_bytes
from objkv.ops.export.manifest import ManifestLine
from objkv.ops.runs import Counters
from objkv.ops.verify_payload import Budget
from objkv.stores.base import Buffer
from objkv.stores.memory import MemoryStore
from tests.support.samples import (
    CHUNK,
    IDENTITY,
    LEFT,
    NAMESPACE,
    TOKENS,
    WHOLE,
    save,
    save_identity,
    view_of,
)


@pytest.fixture
def source() -> tuple[MemoryStore, list[ManifestLine]]:
    """Return an export of three chunks."""
    bulk, index, out = MemoryStore(), MemoryIndex(), MemoryStore()
    save_identity(bulk)
    save(bulk, index, codec="zstd")
    lines: list[ManifestLine] = []
    work = Export(view_of(bulk, index), out, lines.append, budget=Budget(1 << 20), with_tokens=True)
    work.documents([NAMESPACE])
    parts: list[NamespacePart] = stored_parts(bulk, [NAMESPACE])
    counters = Counters()
    for unit in work.parts(parts, {NAMESPACE: read_namespace(bulk, NAMESPACE)}):
        unit.work(counters, lambda: None)
    assert counters.counts["exported"] == 3
    return out, sorted(lines, key=lambda line: line.token_start)


def bring(
    source: tuple[MemoryStore, list[ManifestLine]], bulk: MemoryStore, index: MemoryIndex
) -> Counters:
    out, lines = source
    view, counters = view_of(bulk, index), Counters()
    found = arrivals(view, out, [NAMESPACE])
    work = Import(view, out, found, budget=Budget(1 << 20), codec="none")
    work.documents()
    for unit in (*work.lines(lines), *work.shapes()):
        unit.work(counters, lambda: None)
    return counters


def test_a_record_is_published_only_when_its_payload_can_be_read(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    bulk = MemoryStore()
    seen: list[bool] = []

    class Watching(MemoryIndex):
        def publish(
            self, chunk: ChunkEntry, shards: Mapping[str, ShardRecord], *, ttl_s: int
        ) -> None:
            if chunk.prefix_hash.hex() in {line.key.split("/")[2] for line in source[1]}:
                [path] = [k.key for k in bulk.scan(NAMESPACE) if chunk.prefix_hash.hex() in k.key]
                seen.append(bulk.get(path) is not None)
            super().publish(chunk, shards, ttl_s=ttl_s)

    assert bring(source, bulk, Watching()).counts["added"] == 3
    assert seen == [True] * 3


def test_a_payload_that_cannot_be_stored_is_not_announced(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    class Full(MemoryStore):
        def put_if_absent(self, key: str, value: Buffer) -> bool:
            if key.endswith(".safetensors"):
                raise StoreUnavailable("no room")
            return super().put_if_absent(key, value)

    index = MemoryIndex()
    with pytest.raises(StoreUnavailable, match="no room"):
        bring(source, Full(), index)
    assert list(index.scan(NAMESPACE)) == []
    assert index.lease(source[1][0].key, "a replica", ttl_ms=1_000), "the lease was given back"


def test_what_a_replica_is_saving_is_left_to_it(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    index.lease(source[1][1].key, "a replica", ttl_ms=60_000)
    counts = bring(source, bulk, index).counts
    assert (counts["added"], counts["busy"]) == (2, 1)
    assert bulk.get(source[1][1].key) is None


def test_half_a_payload_that_lies_there_is_replaced(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    path = source[1][0].key
    bulk.put(path, (source[0].get(path) or b"")[:-1])
    assert bring(source, bulk, index).counts["added"] == 3
    assert bulk.get(path) == source[0].get(path)


def test_a_payload_of_another_codec_that_is_right_stays_and_is_announced(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    [*keys] = save(bulk, None, codec="zstd")
    before = {key.path(): bulk.get(key.path()) for key in keys}
    assert bring(source, bulk, index).counts["indexed"] == 3
    assert {path: bulk.get(path) for path in before} == before
    records = [r for r in index.scan(NAMESPACE) if r.nbytes]
    assert {shard.codec for record in records for shard in record.shards.values()} == {"zstd"}


def test_the_identity_is_written_before_any_payload(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    bulk = MemoryStore()
    out, _ = source
    found = arrivals(view_of(bulk, MemoryIndex()), out, [NAMESPACE])
    assert [one.document for one in found] == [IDENTITY.canonical()]
    assert list(bulk.scan("")) == []
    work = Import(view_of(bulk, MemoryIndex()), out, found, budget=Budget(1 << 20), codec="none")
    assert work.documents() == 1
    assert [entry.key for entry in bulk.scan("")] == [identity_path(NAMESPACE)]


def test_a_document_of_another_namespace_is_none(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    out, _ = source
    with pytest.raises(ConfigError, match="a foreign namespace"):
        arrivals(view_of(MemoryStore(), MemoryIndex()), out, ["0" * 32])


def document_of(identity: Identity | EncoderIdentity) -> MemoryStore:
    """Return an export that contains only this document."""
    out = MemoryStore()
    out.put(identity_path(identity.namespace()), identity.canonical())
    return out


@pytest.mark.parametrize(
    ("identity", "why"),
    [
        (replace(IDENTITY, page_layout=HANDOFF_LAYOUT), "hand-offs"),
        (EncoderIdentity("m", "w", "p", None, "bfloat16", 0, "default"), "for encoder outputs"),
    ],
    ids=["hand-offs", "encoder outputs"],
)
def test_what_is_no_kv_of_chunks_is_refused_with_a_sentence(
    identity: Identity | EncoderIdentity, why: str
) -> None:
    view = view_of(MemoryStore(), MemoryIndex())
    with pytest.raises(ConfigError, match=why):
        arrivals(view, document_of(identity), [identity.namespace()])


def test_bytes_that_have_a_record_already_take_no_room(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    out, lines = source
    bulk, index = MemoryStore(), MemoryIndex()
    view = view_of(bulk, index)
    found = arrivals(view, out, [NAMESPACE])
    every = sum(line.nbytes for line in lines)
    assert new_bytes(index, lines, found) == {"default": every}
    assert bring(source, bulk, index).counts["added"] == 3
    assert new_bytes(index, lines, found) == {"default": 0}
    index.drop(NAMESPACE, bytes.fromhex(lines[1].key.split("/")[2]))
    assert new_bytes(index, lines, found) == {"default": lines[1].nbytes}


class Measured(Budget):
    """Records the most memory taken at once."""

    def __init__(self) -> None:
        super().__init__(1 << 40)
        self.taken = 0

    @contextmanager
    def taking(self, nbytes: int) -> Iterator[None]:
        self.taken = max(self.taken, nbytes)
        with super().taking(nbytes):
            yield


def test_the_memory_that_is_taken_is_the_memory_that_is_needed() -> None:
    [group] = IDENTITY.groups
    identity = replace(IDENTITY, groups=(replace(group, content=1 << 16),))
    name, out = identity.namespace(), Copying()
    out.put(identity_path(name), identity.canonical())
    key = ChunkKey(name, prefix_hashes(name, TOKENS, CHUNK)[0], 0, WHOLE)
    layers = [LayerSpec(layer, "BF16", (2, 2, 8, 1 << 16)) for layer in ("l.0", "l.1")]
    made = encode(
        Claim(key, root_hash(name), 0, CHUNK),
        layers,
        [os.urandom(layer.nbytes) for layer in layers],
        codec="none",
        provenance=Provenance(token_digest(TOKENS[:CHUNK]), "w", 1),
    )
    out.put(key.path(), made)
    digest = sha256(made).hexdigest()
    line = ManifestLine(key.path(), 0, CHUNK, root_hash(name).hex(), len(made), digest)
    del made
    view, budget = view_of(Forgetful(), MemoryIndex()), Measured()
    found = arrivals(view, out, [name])
    work = Import(view, out, found, budget=budget, codec="zstd")
    [unit] = work.lines([line])
    counters = Counters()
    tracemalloc.start()
    try:
        unit.work(counters, lambda: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert counters.counts["added"] == 1
    assert peak < budget.taken + (1 << 20)


class Copying(MemoryStore):
    """Returns copies of its values, as a disk does."""

    def get(self, key: str) -> bytes | None:
        value = super().get(key)
        return None if value is None else bytes(bytearray(value))


class Forgetful(MemoryStore):
    """Accepts payloads and discards them."""

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        return True


def test_a_shard_of_which_nothing_was_brought_in_is_not_announced(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    out, lines = source
    strange = lines[0].key.replace("L0-2", "L0-64")
    out.put(strange, b"nothing")
    index = MemoryIndex()
    spoilt = [*lines, replace(lines[0], key=strange, nbytes=7)]
    assert bring((out, spoilt), MemoryStore(), index).counts["refused"] == 1
    [shapes] = index.lookup(NAMESPACE, [SHAPES_HASH])
    assert shapes is not None
    assert list(shapes.shards) == ["0.L0-2_H0-2"]


FULL = IDENTITY.groups[0]
SCALES = "0.5 0.25"


def payload(
    identity: Identity,
    shape: tuple[int, int, int, int],
    *,
    dtype: str = "BF16",
    shard: Shard = WHOLE,
    names: tuple[str, ...] = ("l.0", "l.1"),
    start: int = 0,
    parent: bytes | None = None,
    scales: str = "",
    group: int = 0,
    further: tuple[tuple[int, int, int, int], ...] = (),
) -> Header:
    """Return the header of a payload of the first chunk, or of the second if ``start`` is not 0."""
    name = identity.namespace()
    digest = prefix_hashes(name, TOKENS, CHUNK)[0]
    claim = Claim(
        ChunkKey(name, digest, group, shard), parent or root_hash(name), start, start + CHUNK
    )
    shapes = cycle((shape, *further))
    layers = [LayerSpec(layer, dtype, next(shapes), scales) for layer in names]
    pages = [bytes(layer.nbytes) for layer in layers]
    told = Provenance(token_digest(TOKENS[:CHUNK]), "w", 1)
    return read_header(encode(claim, layers, pages, codec="none", provenance=told))


Pages = tuple[tuple[int, int, int, int], ...]


def split_payload(identity: Identity, parts: Pages) -> Header:
    """Return the header of a payload of half a state, of so many parts for each layer."""
    names = tuple(f"l.{layer}#{part}" for layer in range(2) for part in range(len(parts)))
    shard = Shard(0, 2, 0, 8)
    return payload(identity, parts[0], dtype="I8", shard=shard, names=names, further=parts[1:])


def test_a_right_payload_fits() -> None:
    check_fits(payload(IDENTITY, (2, 2, 8, 8)), IDENTITY)
    check_fits(payload(IDENTITY, (2, 1, 8, 8), shard=LEFT), IDENTITY)
    one_layer = payload(IDENTITY, (2, 2, 8, 8), shard=Shard(1, 2, 0, 2), names=("l.1",))
    check_fits(one_layer, IDENTITY)
    later = payload(IDENTITY, (2, 2, 8, 8), start=CHUNK, parent=bytes(20))
    check_fits(later, IDENTITY)


@pytest.mark.parametrize(
    "header",
    [
        payload(IDENTITY, (2, 2, 8, 8), dtype="F16"),
        payload(IDENTITY, (2, 2, 8, 8), dtype="F32"),
        payload(IDENTITY, (2, 1, 8, 8)),
        payload(IDENTITY, (2, 2, 8, 4)),
        payload(IDENTITY, (1, 2, 8, 8)),
        payload(IDENTITY, (1, 2, 16, 8)),
        payload(IDENTITY, (2, 2, 8, 8), shard=Shard(0, 64, 0, 2)),
        payload(IDENTITY, (2, 4, 8, 8), shard=Shard(0, 2, 0, 4)),
        payload(IDENTITY, (2, 2, 8, 8), names=("l.1", "l.0")),
        payload(IDENTITY, (2, 2, 8, 8), group=1),
        payload(IDENTITY, (2, 2, 8, 8), start=8, parent=bytes(20)),
        payload(IDENTITY, (2, 2, 8, 8), start=CHUNK),
        payload(IDENTITY, (2, 2, 8, 8), parent=bytes(20)),
    ],
    ids=[
        "of float16",
        "of float32",
        "half of the heads",
        "another content",
        "one block",
        "blocks that cannot be split",
        "missing layers",
        "missing heads",
        "layers in another order",
        "another group",
        "no whole chunk",
        "a later chunk without one before it",
        "a first chunk with one before it",
    ],
)
def test_what_no_replica_would_accept_is_refused(header: Header) -> None:
    with pytest.raises(PayloadError):
        check_fits(header, IDENTITY)


def one_group(group: GroupIdentity, kv_dtype: str = "bfloat16") -> Identity:
    return replace(IDENTITY, groups=(group,), kv_dtype=kv_dtype)


def test_pages_of_any_block_size_fit_where_replicas_deal_tokens_anew() -> None:
    identity = one_group(replace(FULL, block_size=1))
    for size in (1, 4, 16):
        check_fits(payload(identity, (CHUNK // size, 2, size, 8)), identity)
    with pytest.raises(PayloadError):
        check_fits(payload(identity, (1, 2, 8, 8)), identity)
    opaque = replace(identity, page_layout="opaque:x86")
    with pytest.raises(PayloadError):
        check_fits(payload(opaque, (2, 2, 8, 8)), opaque)


def test_with_dcp_a_payload_has_its_share_of_the_tokens() -> None:
    identity = one_group(replace(FULL, block_size=1))
    half = replace(WHOLE, tokens=TokenPart(1, 2))
    check_fits(payload(identity, (1, 2, 8, 8), shard=half), identity)
    with pytest.raises(PayloadError, match="not BF16 1x2x8x8"):
        check_fits(payload(identity, (2, 2, 8, 8), shard=half), identity)


def test_a_window_has_only_the_blocks_that_some_end_needs() -> None:
    identity = one_group(replace(FULL, kind="sliding_window", window=5))
    check_fits(payload(identity, (1, 2, 8, 8)), identity)
    with pytest.raises(PayloadError):
        check_fits(payload(identity, (2, 2, 8, 8)), identity)


def test_a_group_without_payloads_has_none() -> None:
    identity = one_group(replace(FULL, kind="chunked_local", window=CHUNK))
    with pytest.raises(PayloadError, match="has no payloads"):
        check_fits(payload(identity, (2, 2, 8, 8)), identity)


def test_a_draft_is_checked_by_the_replicas_that_have_it() -> None:
    check_fits(payload(IDENTITY, (2, 2, 8, 8), group=FIRST_DRAFT_GROUP + 5), IDENTITY)
    elsewhere = payload(IDENTITY, (2, 2, 8, 8), group=FIRST_DRAFT_GROUP, start=8)
    with pytest.raises(PayloadError, match="whole chunk"):
        check_fits(elsewhere, IDENTITY)


def test_how_a_page_of_states_is_divided_is_not_known() -> None:
    identity = one_group(replace(FULL, kind="mla", heads=1, content=64, page=64))
    check_fits(payload(identity, (2, 1, 2, 16), dtype="U8", shard=LEFT), identity)
    with pytest.raises(PayloadError, match="not U8 2x1x2x16"):
        check_fits(payload(identity, (1, 1, 2, 16), dtype="U8", shard=LEFT), identity)


def test_a_state_is_one_block_of_bytes() -> None:
    group = replace(FULL, kind="mamba", state="gdn bfloat16[3,4]", block_size=CHUNK, content=24)
    identity = one_group(group)
    check_fits(payload(identity, (1, 1, 1, 24), dtype="I8", shard=LEFT), identity)
    with pytest.raises(PayloadError):
        check_fits(payload(identity, (1, 1, 1, 24), dtype="BF16", shard=LEFT), identity)


def test_a_state_that_is_split_has_a_frame_for_each_part() -> None:
    state = "mamba2 split bfloat16:3x16+2* float32:1x32"
    group = replace(FULL, kind="mamba", state=state, block_size=CHUNK, heads=16, content=26)
    identity = one_group(group)
    fitting = split_payload(identity, ((1, 8, 3, 2), (1, 8, 3, 4), (1, 8, 1, 8)))
    check_fits(fitting, identity)
    for pages in (
        ((1, 8, 3, 2), (1, 8, 3, 2), (1, 8, 1, 8)),
        ((1, 8, 3, 2), (1, 8, 3, 4)),
        ((1, 8, 3, 2), (1, 8, 3, 4), (1, 8, 1, 8), (1, 8, 1, 8)),
    ):
        with pytest.raises(PayloadError):
            check_fits(split_payload(identity, pages), identity)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    [
        ("fp8", "F8_E4M3"),
        ("fp8_e4m3", "F8_E4M3"),
        ("fp8_e5m2", "F8_E5M2"),
        ("fp8_fnuz", "F8_E4M3FNUZ"),
        ("fp8_e5m2_fnuz", "F8_E5M2FNUZ"),
        ("fp8_ds_mla", "U8"),
    ],
)
def test_a_quantised_cache_is_of_its_own_kind_and_has_any_scales(kv_dtype: str, dtype: str) -> None:
    identity = one_group(FULL, kv_dtype=kv_dtype)
    check_fits(payload(identity, (2, 2, 8, 8), dtype=dtype, scales=SCALES), identity)
    check_fits(payload(identity, (2, 2, 8, 8), dtype=dtype), identity)
    for other in {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F16"} - {dtype}:
        with pytest.raises(PayloadError):
            check_fits(payload(identity, (2, 2, 8, 8), dtype=other), identity)


def test_layers_that_a_quantised_cache_leaves_as_they_are_have_no_scales() -> None:
    identity = replace(one_group(FULL, kv_dtype="fp8"), extra=(("dtype", "bfloat16"),))
    check_fits(payload(identity, (2, 2, 8, 8)), identity)
    with pytest.raises(PayloadError):
        check_fits(payload(identity, (2, 2, 8, 8), scales=SCALES), identity)


def test_a_quantised_checkpoint_may_decide_the_dtype_itself() -> None:
    identity = replace(IDENTITY, quantization="compressed-tensors")
    check_fits(payload(identity, (2, 2, 8, 8), dtype="F8_E4M3", scales=SCALES), identity)
    check_fits(payload(identity, (2, 2, 8, 8)), identity)
    with pytest.raises(PayloadError):
        check_fits(payload(identity, (2, 2, 8, 8), dtype="F32"), identity)


def test_what_the_manifest_says_of_a_payload_is_what_it_claims() -> None:
    header = payload(IDENTITY, (2, 2, 8, 8))
    claim = header.claim
    line = ManifestLine(
        claim.key.path(), 0, CHUNK, claim.parent_hash.hex(), header.nbytes, "0" * 64
    )
    check_told(header, line)
    for wrong in (
        replace(line, token_start=1),
        replace(line, token_end=2 * CHUNK),
        replace(line, parent="0" * 40),
        replace(line, key=line.key.replace("H0-2", "H0-1")),
    ):
        with pytest.raises(PayloadError):
            check_told(header, wrong)


def test_a_document_that_is_deleted_meanwhile_comes_from_the_export() -> None:
    class Losing(MemoryStore):
        reads = 0

        def get_range(self, key: str, start: int, end: int) -> bytes | None:
            self.reads += key == identity_path(NAMESPACE)
            if self.reads > 1:
                self.delete(identity_path(NAMESPACE))
            return super().get_range(key, start, end)

    bulk, source = Losing(), MemoryStore()
    save_identity(bulk)
    save_identity(source)
    [found] = arrivals(view_of(bulk, MemoryIndex()), source, [NAMESPACE])
    assert (found.document, found.identity) == (IDENTITY.canonical(), IDENTITY)
    bulk = Losing()
    save_identity(bulk)
    with pytest.raises(ConfigError, match="its payloads cannot be checked"):
        arrivals(view_of(bulk, MemoryIndex()), MemoryStore(), [NAMESPACE])
