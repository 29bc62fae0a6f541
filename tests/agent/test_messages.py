"""Messages: every one comes back as it was, and no bytes do harm."""

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.agent import messages as m
from objkv.agent.fill import Wanted
from objkv.agent.memory.arena import CellState
from objkv.agent.residents import MissReason
from objkv.codec.payload import Claim
from objkv.errors import StoreUnavailable
from objkv.index.base import ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard, TokenPart

NAMESPACE = "0123456789abcdef" * 2
HASHES = st.binary(min_size=20, max_size=20)
RECORDS = st.builds(
    ShardRecord,
    nbytes=st.integers(0, 2**40),
    raw_bytes=st.integers(0, 2**40),
    codec=st.sampled_from(["none", "blosc", "none+aes256gcm", "mixed"]),
    hot=st.booleans(),
    header_checksum=st.text("0123456789abcdef", min_size=32, max_size=32),
    created_s=st.integers(0, 2**40),
)
SHARDS = st.sampled_from(
    [Shard(0, 2, 0, 2), Shard(3, 60, 0, 1), Shard(0, 1, 4, 8, TokenPart(1, 4, 16))]
)
WANTED = st.builds(
    lambda prefix, parent, shard, group, start, length, record: Wanted(
        Claim(ChunkKey(NAMESPACE, prefix, group, shard), parent, start, start + length), record
    ),
    HASHES,
    HASHES,
    SHARDS,
    st.integers(0, 12),
    st.integers(0, 2**31),
    st.integers(1, 2**20),
    RECORDS,
)


@given(st.lists(WANTED, min_size=1, max_size=20), st.integers(0, 2), st.integers(1, 2**32 - 1))
def test_an_opening(wanted: list[Wanted], urgency: int, deadline_ms: int) -> None:
    opening = m.Opening(urgency, deadline_ms, wanted)
    assert m.unpack_opening(m.pack_opening(opening)) == opening


def test_the_most_payloads_of_the_longest_names_fit() -> None:
    shard = Shard(100, 200, 1000, 2000, TokenPart(15, 16, 128))
    record = ShardRecord(10**12, 10**12, "none+aes256gcm", True, "f" * 32, 10**10)
    wanted = [
        Wanted(Claim(ChunkKey(NAMESPACE, bytes([n] * 20), 99, shard), bytes(20), n, n + 1), record)
        for n in range(m.OPEN_MAX)
    ]
    assert m.unpack_opening(m.pack_opening(m.Opening(0, 1, wanted))).wanted == wanted


@given(
    st.lists(
        st.builds(
            m.OpenAnswer,
            st.sampled_from(CellState),
            st.sampled_from(MissReason),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**64 - 1),
            st.integers(0, 2**64 - 1),
        ),
        max_size=20,
    )
)
def test_answers_to_an_opening(answers: list[m.OpenAnswer]) -> None:
    message = m.pack_opened(answers)
    assert m.unpack_opened(message, len(answers)) == answers
    with pytest.raises(m.ProtocolError):
        m.unpack_opened(message, len(answers) + 1)


@given(st.lists(HASHES, min_size=1, max_size=20), st.lists(SHARDS, min_size=1, max_size=3))
def test_a_lookup(hashes: list[bytes], shards: list[Shard]) -> None:
    fields = tuple(dict.fromkeys(f"0.{shard}" for shard in shards))
    assert m.unpack_find(m.pack_find(NAMESPACE, hashes, fields)) == (
        NAMESPACE,
        b"".join(hashes),
        fields,
    )


FIELDS = ("0.L0-2_H0-2", "1.L0-2_H0-2")


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=50),
    *[st.integers(0, 2**64 - 1)] * 2,
    st.booleans(),
)
def test_a_release_and_a_commit(leases: list[int], offset: int, nbytes: int, puts: bool) -> None:
    assert list(m.unpack_release(m.pack_release(leases))) == leases
    commit = (offset, nbytes, puts)
    assert m.unpack_commit(m.pack_commit(offset, nbytes, puts=puts)) == commit


def test_a_greeting_a_status_and_a_failure() -> None:
    for hello in (m.Hello(1, True, False), m.Hello(65_535, False, True)):
        assert m.unpack_hello(m.pack_hello(hello)) == hello
    for status in m.CommitStatus:
        assert m.unpack_committed(m.pack_committed(status)) is status
    text = m.unpack_text(m.pack_failure(StoreUnavailable("down " * 10_000)))
    assert text.startswith("StoreUnavailable\ndown")
    with pytest.raises(m.ProtocolError):
        m.pack_call("x" * m.MESSAGE_BYTES_MAX)


READERS: list[Callable[[bytes], object]] = [
    m.kind_of,
    m.unpack_hello,
    m.unpack_opening,
    lambda message: m.unpack_opened(message, 2),
    m.unpack_release,
    m.unpack_find,
    lambda message: m.unpack_found(message, 2),
    lambda text: m.read_block(text, 2, FIELDS),
    m.unpack_commit,
    m.unpack_committed,
    m.unpack_text,
]


@settings(max_examples=300)
@given(st.sampled_from(READERS), st.binary(max_size=300), st.integers(0, 255))
def test_any_bytes_are_read_or_refused(
    read: Callable[[bytes], object], rest: bytes, kind: int
) -> None:
    with suppress(m.ProtocolError):
        read(bytes([kind]) + rest)


@settings(max_examples=300)
@given(st.lists(WANTED, min_size=1, max_size=3), st.data())
def test_a_changed_opening_is_read_or_refused(wanted: list[Wanted], data: st.DataObject) -> None:
    message = bytearray(m.pack_opening(m.Opening(1, 1000, wanted)))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    del message[data.draw(st.integers(1, len(message))) :]
    try:
        opening = m.unpack_opening(bytes(message))
    except m.ProtocolError:
        return
    assert 0 < len(opening.wanted) <= m.OPEN_MAX
