from hypothesis import example, given
from hypothesis import strategies as st

from objkv.index.base import ShardRecord
from objkv.index.fields import SHARD_BYTES_MAX, WrittenShards, are_hot, decode_shard, encode_shard
from tests.contracts.index_contract import shard

COUNT = st.integers(0, 10**18 - 1)
SHARDS = st.builds(
    ShardRecord,
    nbytes=COUNT,
    raw_bytes=COUNT,
    is_plain=st.booleans(),
    hot=st.booleans(),
    header_checksum=st.from_regex(r"[0-9a-z:]{0,32}", fullmatch=True),
    created_s=COUNT,
)


@given(SHARDS)
def test_what_is_written_is_read(record: ShardRecord) -> None:
    value = encode_shard(record)
    assert decode_shard(value) == record
    assert len(value) <= SHARD_BYTES_MAX


@given(st.lists(st.none() | SHARDS, min_size=1, max_size=4).filter(any))
def test_encoded_shards_are_the_mapping_of_their_records(shards: list[ShardRecord | None]) -> None:
    fields = tuple(f"0.L0-1_H{i}-{i + 1}" for i in range(len(shards)))
    written = WrittenShards(fields, [b"" if one is None else encode_shard(one) for one in shards])
    known = {field: one for field, one in zip(fields, shards, strict=True) if one is not None}
    assert are_hot(written) == are_hot(known) == all(one.hot for one in known.values())
    assert written == known
    assert list(written.items()) == list(known.items())
    assert (list(written), list(written.values())) == (list(known), list(known.values()))


@given(st.binary() | st.text().map(str.encode))
@example(encode_shard(shard()) + b" ")
def test_nothing_else_raises(value: bytes) -> None:
    record = decode_shard(value)
    assert record is None or encode_shard(record) == value
