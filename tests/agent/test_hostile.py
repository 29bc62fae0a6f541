"""What clients and moments might do to an agent: leases that are lost, memory that is reused."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from objkv.agent import messages as m
from objkv.agent.arena_cache import NO_ORIGIN, CachedPayload
from objkv.agent.client import AgentConnection
from objkv.agent.fill import PayloadRequest
from objkv.agent.memory import arena as arena_module
from objkv.agent.memory.answers import FIELDS_MAX
from objkv.agent.memory.arena import BOARD_BYTES, CellState, Progress, ProgressBoard
from objkv.agent.messages import CommitStatus, MissReason, PrefetchOrder, Urgency
from objkv.agent.outbox import ClientOutbox, Outbox
from objkv.agent.prefetch import Prefetches
from objkv.codec.header import header_bytes_needed, read_header
from objkv.codec.payload import encode
from objkv.codec.values import Claim, LayerSpec
from objkv.errors import StoreUnavailable
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard, TokenPart
from objkv.stores.processes import _shared_memory
from tests.agent.consistency import is_consistent, paths_of
from tests.agent.test_core import settled
from tests.agent.test_server import ask_for, greeted
from tests.agent.world import PATIENCE_S, Node, Sleeper, ended, gated, opened, payloads
from tests.support.agents import AgentProcess
from tests.support.mappings import is_private
from tests.support.samples import NAMESPACE
from tests.support.steps import complete
from tests.support.waiting import wait_until


def test_prefetches_at_the_same_moment_stay_within_their_share(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, gate = node.save(list(range(700, 700 + 16 * 8))), gated(node)
    node.arena_cache.ahead_bytes_max = 4 * wanted[0].record.raw_bytes
    prefetches = Prefetches(node.core, node.index, node.store)
    halves = [[one.claim.key.prefix_hash for one in part] for part in (wanted[:4], wanted[4:])]
    reached, reserve = threading.Barrier(2), prefetches._reserve

    def both_ask(*args: Any) -> Any:
        taken = reserve(*args)
        reached.wait(PATIENCE_S)  # each has seen how much room there is
        return taken

    monkeypatch.setattr(prefetches, "_reserve", both_ask)
    start = partial(prefetches.start, NAMESPACE, order=PrefetchOrder(PATIENCE_S))
    with ThreadPoolExecutor(2) as pool:
        assert sum(one.started for one in pool.map(start, halves)) == 4
    gate.set()
    wait_until(lambda: not node.arena_cache.leased())


def test_a_prefetch_of_what_is_resident_keeps_no_client(node: Node) -> None:
    wanted = node.save()[0]
    for urgency in (Urgency.BETWEEN_STEPS, Urgency.PREFETCH):
        (one,) = node.open(wanted, urgency=urgency)
        one = settled(one)
        node.arena_cache.release(one)
    wait_until(lambda: not node.arena_cache.leased())
    assert not one.waiters


def test_what_a_reader_rejects_while_it_arrives_is_served_to_nobody_else(node: Node) -> None:
    wanted, gate, first = node.save()[0], gated(node), node.connect()
    (lease,) = opened(first, [wanted])
    wait_until(lambda: bool(node.store.gets))
    first.reject(wanted.claim)
    key = wanted.claim.key
    wait_until(lambda: node.index.find(NAMESPACE, [key.prefix_hash], (key.field,)) == [None])
    gate.set()
    assert ended(first, lease).state is CellState.READY
    assert node.arena_cache.contains_ready([wanted.claim.key.path()]) == [False]
    (again,) = opened(node.connect(), [wanted])
    assert again.cell != lease.cell
    assert is_consistent(node.arena_cache)


def test_no_memory_is_given_out_once_an_agent_ends(node: Node) -> None:
    """A client may still read what it leased when its connection is ended."""
    node.save()
    (resident,) = node.open(*node.save()[:1])
    resident = settled(resident)
    node.core.close(PATIENCE_S)
    assert node.commit_one(payloads()[1]) is CommitStatus.NO_ROOM
    node.arena_cache.release(resident)


def test_a_reader_that_comes_while_a_fill_is_given_up_is_not_late(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, gate = node.save(), gated(node)
    busy = [opened(node.connect(), [one])[0] for one in wanted[:2]]  # both threads
    assert all(lease.number for lease in busy)
    left = node.connect()
    opened(left, wanted[2:])
    left.close()
    wait_until(lambda: node.server.clients == 2)
    came: list[CachedPayload] = []
    cancel = node.arena_cache.cancel_fill

    def someone_comes(one: CachedPayload) -> bool:
        if one.key == wanted[2].claim.key.path() and not came:
            came.extend(node.open(wanted[2]))
        return cancel(one)

    monkeypatch.setattr(node.arena_cache, "cancel_fill", someone_comes)
    gate.set()
    wait_until(lambda: bool(came))
    assert settled(came[0]).state is CellState.READY
    node.arena_cache.release(came[0])


@pytest.mark.parametrize(("codec", "nbytes"), [("none", 1 << 13), ("none", 0), ("blosc", 1 << 45)])
def test_a_record_of_another_length_is_a_miss_and_takes_no_memory(
    node: Node, codec: str, nbytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    one, client = node.save(codec=codec)[0], node.connect()
    wanted = PayloadRequest(one.claim, replace(one.record, nbytes=nbytes))
    node.found(wanted)
    (lease,) = opened(client, [wanted])
    progress = ended(client, lease)
    assert progress.state is CellState.FAILED
    assert progress.reason in (MissReason.CORRUPT, MissReason.NO_ROOM)
    assert "unexpected" not in caplog.text


def test_a_save_of_a_payload_that_is_resident_with_another_claim_is_refused(node: Node) -> None:
    made = payloads()
    other = read_header(made[1]).claim.key.path()
    found = node.arena_cache.open(other, NO_ORIGIN, Sleeper())  # as if of another claim
    assert not isinstance(found, MissReason)
    assert node.arena_cache.allocate(found[0], len(made[1])) is not None
    node.arena_cache.ready(found[0], 2)
    assert node.commit_one(made[1]) is CommitStatus.REFUSED
    assert node.saves.drain(PATIENCE_S)
    assert node.store.get(other) is None
    node.arena_cache.release(found[0])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        f'{{"verb": "touch", "namespace": "{NAMESPACE}", "hashes": Infinity, "ttl_s": 1}}',
        '{"verb": "touch", "namespace": ["a"], "hashes": [], "ttl_s": 1}',
        '{"verb": "lookup", "namespace": "../..", "hashes": ["%s"]}' % ("00" * 20),
        f'{{"verb": "lookup", "namespace": "{NAMESPACE}", "hashes": ["00"]}}',
        f'{{"verb": "credit", "savings": {{"namespace": "{NAMESPACE}", "month": 7}}}}',
        '{"verb": "credit", "savings": {"namespace": "x", "month": "2026-11", "loads": "x"}}',
        '{"verb": "get", "path": 7}',
        '{"verb": ["x"]}',
        '{"verb": "explode"}',
        f'{{"verb": "prefetch", "namespace": "{NAMESPACE}", "hashes": [], '
        '"order": {"deadline_s": -1}}',
        '{"verb": "prefetch", "namespace": "../x", "hashes": [], "order": {"deadline_s": 1}}',
        "7",
    ],
)
def test_an_invalid_call_fails_and_the_conversation_goes_on(node: Node, text: str) -> None:
    sock = greeted(node)
    for _ in range(2):
        sock.send(m.pack_text(m.MessageKind.CALL, text))
        answer = sock.recv(m.MESSAGE_BYTES_MAX)
        assert m.kind_of(answer) is m.MessageKind.FAILED
        assert m.unpack_text(answer).startswith("StoreDenied")
    sock.close()


def test_a_message_without_a_byte_ends_no_lease(node: Node) -> None:
    sock = greeted(node)
    wanted = node.save()
    ask_for(sock, wanted)
    sock.send(b"")
    assert sock.recv(100) == b""
    sock.send(b"")
    sock.send(b"")
    sock.send(m.pack_release([1]))
    other = node.connect()
    opened(other, wanted[:1])
    assert node.arena_cache.leased() == 3
    sock.close()
    wait_until(lambda: node.arena_cache.leased() == 1)


def test_descriptors_that_are_sent_and_not_wanted_are_closed(node: Node) -> None:
    folder = Path("/proc/self/fd")
    greeted(node).close()
    wait_until(lambda: not node.server.clients)
    before = len(list(folder.iterdir()))

    for number in (1, 3):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(node.path))
        given = [os.open("/dev/null", os.O_RDONLY) for _ in range(number)]
        socket.send_fds(sock, [m.pack_hello(m.Hello(m.VERSION, wants_arena=False))], given)
        sock.recv(100)
        socket.send_fds(sock, [m.pack_release([])], given)
        for fd in given:
            os.close(fd)
        sock.close()
    wait_until(lambda: not node.server.clients)
    wait_until(lambda: len(list(folder.iterdir())) <= before)


@pytest.mark.parametrize("cut", ["nothing", "half a header", "header", "a frame", "all"])
def test_a_slab_that_is_reused_while_the_agent_copies_it_is_saved_right_or_not_at_all(
    node: Node, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """A worker whose commit took too long gives its slab to another payload."""
    header, theirs = read_header(payloads()[0]), payloads()[1]
    pages = [bytes([7 + n]) * layer.nbytes for n, layer in enumerate(header.frames.layers)]
    layers, provenance = header.frames.layers, header.provenance
    ours = bytes(encode(header.claim, layers, pages, codec="none", provenance=provenance))
    assert len(ours) == len(theirs)
    first, second, *_ = header.frames.starts
    cuts = {"nothing": 0, "half a header": first // 2, "header": first, "a frame": second}
    count = cuts.get(cut, len(ours))

    def interrupted(outbox: ClientOutbox, place: memoryview, offset: int) -> None:
        place[:] = (ours[:count] + theirs[count:])[: len(place)]

    monkeypatch.setattr(ClientOutbox, "read_into", interrupted)
    status = node.commit_one(ours)
    assert node.saves.drain(PATIENCE_S)
    stored = {entry.key: node.store.get(entry.key) for entry in node.store.scan("")}
    if cut == "all":
        assert status is CommitStatus.ACCEPTED
        assert stored == {read_header(ours).claim.key.path(): ours}
    else:
        assert status is CommitStatus.REFUSED
        assert not stored
    assert node.arena_cache.leased() == 0


def test_an_outbox_costs_the_agent_nothing_that_its_client_has_not_written(node: Node) -> None:
    layer = LayerSpec("l.0", "BF16", (2, 2, 8, 1 << 9))
    found = read_header(payloads()[0])
    payload = encode(
        found.claim, [layer], [bytes(layer.nbytes)], codec="none", provenance=found.provenance
    )
    box = Outbox(1 << 45)
    os.pwrite(box.fd, payload[: header_bytes_needed(payload[:8])], 0)
    client = node.connect(wants_arena=False, outbox=box.fd)
    written = os.fstat(box.fd).st_blocks
    for _ in range(3):
        client.commit([m.Commit(0, len(payload))])
    assert os.fstat(box.fd).st_blocks == written
    assert "objkv-outbox" not in Path("/proc/self/maps").read_text()
    box.close()


def test_memory_of_kv_is_in_no_core_dump_and_no_child(node: Node) -> None:
    reader, asker = node.connect(), node.connect(wants_arena=False)
    assert is_private(node.arena.view)
    assert is_private(reader.arena.view)
    for board in (node.lookups.board, asker._board):
        assert board is not None
        assert is_private(board._view)
    fd, lanes = _shared_memory(1 << 16)
    os.close(fd)
    assert is_private(lanes)


@pytest.mark.parametrize("count", [1, FIELDS_MAX])
def test_lookups_of_many_fields_are_answered(node: Node, count: int) -> None:
    fields = tuple(f"{n}.L0-99_H0-99" for n in range(count))
    record = ShardRecord(10**17, 10**17, False, False, "f" * 32, 10**17)
    hashes = [bytes([n] * 20) for n in range(40)]
    shards = {fields[0]: record, fields[-1]: record}
    for number, one in enumerate(hashes[:-1]):
        entry = ChunkEntry(NAMESPACE, one, bytes(20), 0, 16)
        whole = dict.fromkeys(fields, record) if number == 7 else shards
        node.index.publish(entry, whole, ttl_s=3600)
    client = node.connect(wants_arena=False)
    found = complete(client.find(NAMESPACE, hashes, fields))
    assert [one and len(one) for one in found] == [
        one and len(one) for one in node.index.find(NAMESPACE, hashes, fields)
    ]
    with pytest.raises(StoreUnavailable, match="fields"):
        complete(client.find(NAMESPACE, hashes, tuple(map(str, range(FIELDS_MAX + 1)))))
    assert client.is_open


def test_a_question_that_is_too_large_ends_no_conversation(node: Node) -> None:
    sock = greeted(node)
    for fields in (("0.L0-1_H0-1",), tuple(map(str, range(9000)))):
        sock.send(m.pack_find(NAMESPACE, [bytes(20)] * 700, fields))
        assert m.kind_of(sock.recv(m.MESSAGE_BYTES_MAX)) is m.MessageKind.FAILED
    sock.close()


def test_the_most_payloads_of_the_longest_names_fit() -> None:
    shard = Shard(100, 200, 1000, 2000, TokenPart(15, 16, 128))
    wanted = [
        Claim(ChunkKey(NAMESPACE, bytes([n] * 20), 99, shard), bytes(20), n, n + 1)
        for n in range(m.OPEN_MAX)
    ]
    opening = m.OpenRequest(Urgency.IN_STEP, 1, m.Claims.of(wanted))
    assert m.unpack_open_request(m.pack_open_request(opening)) == opening


def test_a_commit_is_of_a_bounded_number_of_payloads_and_its_parts_are_whole() -> None:
    most = [m.Commit(1, 2)] * m.COMMITS_MAX
    assert m.unpack_commits(m.pack_commits(most)) == most
    lacks_flag = bytearray(m.pack_commits(most[:1]))
    lacks_flag[-1] = 1
    for message in (m.pack_commits([*most, most[0]]), m.pack_commits([]), bytes(lacks_flag)):
        with pytest.raises(m.ProtocolError):
            m.unpack_commits(message)


def test_a_client_that_sends_nonsense_does_not_fill_the_log(tmp_path: Path) -> None:
    where = {"bulk_url": f"file://{tmp_path}/chunks", "index_url": f"sqlite://{tmp_path}/index"}
    with AgentProcess(where | {"agent_memory_bytes": str(1 << 20)}) as agent:
        box = Outbox(4096)
        client = AgentConnection(agent.path, outbox=box.fd, call_s=PATIENCE_S)
        for _ in range(100):
            assert client.commit([m.Commit(0, 100)]) == [CommitStatus.REFUSED]
        client.close()
        box.close()
        assert agent.log_file.read_text().count("payload of a client refused") == 20


@pytest.mark.parametrize("codec", ["none", "blosc"])
@pytest.mark.parametrize("pages", [1, 512])
def test_payloads_that_do_not_exist_evict_nothing_that_no_store_has(pages: int, codec: str) -> None:
    node = Node(memory=1 << 20, holds_back=True)
    made = payloads(list(range(16 * 130)))
    for payload in made:
        node.commit_one(payload)
    before = paths_of(node.arena_cache.held_back)
    assert len(before) > 100
    one = node.save(list(range(7000, 7016)), codec=codec)[0]
    key = one.claim.key
    for number in range(20):
        ghost = replace(one.claim, key=replace(key, prefix_hash=bytes([number] * 20)))
        record = replace(one.record, nbytes=pages * 2048, raw_bytes=pages * 2048)
        (found,) = node.open(PayloadRequest(ghost, record))
        settled(found)
        assert found.reason in (MissReason.MISSING, MissReason.NO_ROOM)
        node.arena_cache.release(found)
    assert paths_of(node.arena_cache.held_back) == before
    (found,) = node.open(one)
    assert settled(found).state is CellState.READY
    node.arena_cache.release(found)
    node.close()
    assert is_consistent(node.arena_cache)


def test_a_cell_that_is_half_written_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another core may see words of a cell in any order."""
    memory = memoryview(bytearray(BOARD_BYTES))
    board, old = ProgressBoard(memory), Progress(CellState.FILLING, 1, 4096, 512, 0)
    new = Progress(CellState.READY, 9, 8192, 1024, 0)
    board.write(7, old)
    before = bytes(memory)
    board.write(7, new)
    after = bytes(memory)
    monkeypatch.setattr(arena_module, "_READS_MAX", 3)
    for mask in range(1, 15):
        for word in range(4):
            at = 7 * 32 + 8 * word
            memory[at : at + 8] = (after if mask >> word & 1 else before)[at : at + 8]
        assert board.read(7) == Progress(CellState.FILLING, 0, 0, 0, 0)
    memory[:] = after
    assert board.read(7) == new
