"""Messages: every one comes back as it was. What no bytes may do is tried in ``tests.fuzz``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.agent import messages as m
from objkv.agent.memory.arena import CELLS, CellState
from objkv.agent.messages import MissReason, Urgency
from objkv.codec.join import PartPosition
from objkv.codec.payload import Claim
from objkv.errors import StoreUnavailable
from objkv.index.base import ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import SEALS
from objkv.keys.topology import Shard, TokenPart

NAMESPACE = "0123456789abcdef" * 2
HASHES = st.binary(min_size=20, max_size=20)
RECORDS = st.builds(
    ShardRecord,
    nbytes=st.integers(0, 2**40),
    raw_bytes=st.integers(0, 2**40),
    is_plain=st.booleans(),
    hot=st.booleans(),
    header_checksum=st.text("0123456789abcdef", min_size=16, max_size=16),
    created_s=st.integers(0, 2**40),
)
SHARDS = st.sampled_from(
    [None, Shard(0, 2, 0, 2), Shard(3, 60, 0, 1), Shard(0, 1, 4, 8, TokenPart(1, 4, 16))]
)
WANTED = st.builds(
    lambda prefix, parent, shard, group, start, length: Claim(
        ChunkKey(NAMESPACE, prefix, group, shard), parent, start, start + length
    ),
    HASHES,
    HASHES,
    SHARDS,
    st.integers(0, 12),
    st.integers(0, 2**31),
    st.integers(1, 2**20),
)


@given(
    st.lists(WANTED, min_size=1, max_size=20), st.sampled_from(Urgency), st.integers(1, 2**32 - 1)
)
def test_an_opening(wanted: list[Claim], urgency: Urgency, deadline_ms: int) -> None:
    claims = m.Claims.of(wanted)
    assert list(map(claims.claim, claims)) == wanted
    opening = m.OpenRequest(urgency, deadline_ms, claims)
    assert m.unpack_open_request(m.pack_open_request(opening)) == opening
    columns = np.frombuffer(claims.rows, list(m.CLAIM_ROW))
    assert [one.tobytes() for one in columns["prefix_hash"]] == [o.key.prefix_hash for o in wanted]
    assert [one.tobytes() for one in columns["parent_hash"]] == [o.parent_hash for o in wanted]
    assert columns["token_start"].tolist() == [one.token_start for one in wanted]
    assert columns["token_end"].tolist() == [one.token_end for one in wanted]
    assert [claims.fields[n] for n in columns["field"]] == [one.key.field for one in wanted]


def test_the_most_payloads_of_the_longest_names_fit() -> None:
    shard = Shard(100, 200, 1000, 2000, TokenPart(15, 16, 128))
    wanted = [
        Claim(ChunkKey(NAMESPACE, bytes([n] * 20), 99, shard), bytes(20), n, n + 1)
        for n in range(m.OPEN_MAX)
    ]
    opening = m.OpenRequest(Urgency.IN_STEP, 1, m.Claims.of(wanted))
    assert m.unpack_open_request(m.pack_open_request(opening)) == opening


@given(
    st.lists(
        st.tuples(
            st.sampled_from(CellState),
            st.sampled_from(MissReason),
            st.integers(0, 2**16 - 1),
            st.integers(0, 2**32 - 1),
            st.integers(0, CELLS - 1),
            st.integers(0, 2**64 - 1),
            st.integers(0, 2**64 - 1),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_answers_to_an_opening(answers: list[m.OpenAnswer]) -> None:
    message = m.pack_opened(answers)
    assert list(zip(*m.unpack_opened(message, len(answers)), strict=True)) == answers
    with pytest.raises(m.ProtocolError):
        m.unpack_opened(message, len(answers) + 1)


U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PLACES = st.builds(PartPosition, U32, U32, U32, U32, U64, U64)


PARTS = st.none() | st.builds(m.SavedPart, U64, PLACES)


@given(st.lists(st.builds(m.Commit, U64, U64, st.booleans(), PARTS), min_size=1, max_size=4))
def test_commits_of_payloads_and_of_parts(commits: list[m.Commit]) -> None:
    message = m.pack_commits(commits)
    assert m.unpack_commits(message) == commits
    with pytest.raises(m.ProtocolError):
        m.unpack_commits(message[:-1])


def test_a_commit_is_of_a_bounded_number_of_payloads_and_its_parts_are_whole() -> None:
    most = [m.Commit(1, 2)] * m.COMMITS_MAX
    assert m.unpack_commits(m.pack_commits(most)) == most
    lacks_flag = bytearray(m.pack_commits(most[:1]))
    lacks_flag[-1] = 1
    for message in (m.pack_commits([*most, most[0]]), m.pack_commits([]), bytes(lacks_flag)):
        with pytest.raises(m.ProtocolError):
            m.unpack_commits(message)


@given(U64, U32, HASHES, st.integers(0, 10**10 - 1))
def test_a_drop(number: int, parts: int, prefix_hash: bytes, group: int) -> None:
    drop = m.Drop(number, parts, ChunkKey(NAMESPACE, prefix_hash, group).path())
    assert m.unpack_drop(m.pack_drop(drop)) == drop


@pytest.mark.parametrize("heads", ["1", "9" * 4000])
def test_a_drop_names_a_whole_payload_in_few_bytes(heads: str) -> None:
    path = ChunkKey(NAMESPACE, bytes(20), 0).path().replace("/0.", f"/0.L0-1_H0-{heads}.")
    with pytest.raises(m.ProtocolError, match="not whole"):
        m.unpack_drop(m.pack_drop(m.Drop(1, 2, path)))


def test_a_greeting_a_status_and_a_failure() -> None:
    for hello in (m.Hello(1, True, False), m.Hello(65_535, False, True, bytes(range(16)), 3)):
        assert m.unpack_hello(m.pack_hello(hello)) == hello
    with pytest.raises(m.ProtocolError):
        m.unpack_hello(m.pack_hello(m.Hello(m.VERSION, True))[:-1])
    assert {m.seals_mask(some) for some in ((), ("signed",), ("encrypted",), SEALS)} == {0, 1, 2, 3}
    statuses = list(m.CommitStatus)
    assert m.unpack_committed(m.pack_committed(statuses), len(statuses)) == statuses
    with pytest.raises(m.ProtocolError):
        m.unpack_committed(m.pack_committed(statuses), 1)
    text = m.unpack_text(m.pack_failure(StoreUnavailable("down " * 10_000)))
    assert text.startswith("StoreUnavailable\ndown")
    with pytest.raises(m.ProtocolError):
        m.pack_text(m.MessageKind.CALL, "x" * m.MESSAGE_BYTES_MAX)
