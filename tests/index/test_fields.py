import json
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.index.base import ShardRecord
from objkv.index.fields import WrittenShards, decode_shard, encode_shard
from tests.contracts.index_contract import shard

COUNT = st.integers(0, 10**18 - 1)
NAME = st.from_regex(r"[A-Za-z0-9._:+-]{0,128}", fullmatch=True)
SHARDS = st.builds(
    ShardRecord,
    nbytes=COUNT,
    raw_bytes=COUNT,
    codec=NAME,
    hot=st.booleans(),
    header_checksum=NAME,
    created_s=COUNT,
)


@given(SHARDS)
def test_what_is_written_is_read_and_is_json(record: ShardRecord) -> None:
    value = encode_shard(record)
    assert decode_shard(value) == record
    assert tuple(json.loads(value)) == astuple(record)


@given(st.lists(st.none() | SHARDS, min_size=1, max_size=4).filter(any))
def test_encoded_shards_are_the_mapping_of_their_records(shards: list[ShardRecord | None]) -> None:
    fields = tuple(f"0.L0-1_H{i}-{i + 1}" for i in range(len(shards)))
    written = WrittenShards(fields, [b"" if one is None else encode_shard(one) for one in shards])
    known = {field: one for field, one in zip(fields, shards, strict=True) if one is not None}
    assert written == known
    assert list(written.items()) == list(known.items())
    assert (list(written), list(written.values())) == (list(known), list(known.values()))


@given(st.binary() | st.text().map(str.encode))
def test_nothing_else_raises(value: bytes) -> None:
    record = decode_shard(value)
    assert record is None or encode_shard(record) == value


@given(st.data())
def test_no_two_values_are_read_alike(data: st.DataObject) -> None:
    value = bytearray(encode_shard(shard()))
    place = data.draw(st.integers(0, len(value) - 1))
    value[place] = data.draw(st.integers(0, 255))
    record = decode_shard(bytes(value))
    assert record is None or encode_shard(record) == bytes(value)


@pytest.mark.parametrize("codec", ['quo"te', "sp ace", "ümlaut", "new\nline"])
def test_names_that_json_would_escape_are_a_bug(codec: str) -> None:
    with pytest.raises((AssertionError, UnicodeEncodeError)):
        encode_shard(ShardRecord(1, 1, codec, False, "", 1))
