"""How pinned memory is divided into slabs."""

from objkv.codec.payload import payload_bytes_max
from objkv.config import Config
from objkv.connector.kv.worker import plan_pools
from tests.support.paged_cache import GROUP, paged_group

CHUNK = 4096


def test_a_slab_holds_what_a_replica_that_keeps_tokens_has_saved() -> None:
    """To be refused for its length it would have to be corrupt, and would be replaced."""
    paged, _ = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=1)
    pools = [plan_pools(Config(store_tokens=keep), {0: paged}, CHUNK) for keep in (False, True)]
    longest = payload_bytes_max(paged.layers, tokens=CHUNK)
    assert min(pool.slab_bytes for pool in pools) >= longest
