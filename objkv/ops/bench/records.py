"""Records in an index to look up: of one prompt, all chunks stored."""

from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.keys.prefix import prefix_hashes, root_hash
from objkv.ops.bench.sample import NAMESPACE

CHUNK_TOKENS = 256
FIELD = "0.L0-32_H0-8"
RECORD = ShardRecord(
    nbytes=(32 << 20) + 12_288,
    raw_bytes=32 << 20,
    codec="none",
    hot=False,
    header_checksum="0" * 32,
    created_s=1,
)


def make_tokens(count: int) -> list[int]:
    """The ids of a prompt."""
    return [(number * 7919) % 128_000 for number in range(count)]


def chunk_hashes(chunks: int) -> list[bytes]:
    """The prefix hashes of the prompt's first ``chunks`` chunks."""
    return prefix_hashes(NAMESPACE, make_tokens(chunks * CHUNK_TOKENS), CHUNK_TOKENS)


def publish(
    index: WriteIndex, hashes: list[bytes], *, ttl_s: int = 3_600, namespace: str = NAMESPACE
) -> None:
    """A record for each of ``hashes``."""
    parent = root_hash(namespace)
    for number, prefix_hash in enumerate(hashes):
        start = number * CHUNK_TOKENS
        entry = ChunkEntry(namespace, prefix_hash, parent, start, start + CHUNK_TOKENS)
        index.publish(entry, {FIELD: RECORD}, ttl_s=ttl_s)
        parent = prefix_hash
