"""Clients of one agent, over its socket."""

import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import pytest

from objkv.agent import client as client_module
from objkv.agent import messages as m
from objkv.agent import peers
from objkv.agent import server as server_module
from objkv.agent.client import AgentCalls, AgentConnection, AgentRefused, is_listening
from objkv.agent.fill import PayloadRequest
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import CommitStatus, MissReason, PrefetchOrder, Urgency
from objkv.cache.switch import SWITCH_PATH
from objkv.codec.payload import read_header
from objkv.errors import StoreDenied, StoreError, StoreUnavailable, TransferError
from objkv.keys.identity import identity_path
from objkv.ops.agent_api import AgentApi
from tests.agent import world
from tests.agent.world import PATIENCE_S, RIGHT, Desk, Node, denied, ended, loaded, opened, payloads
from tests.support.samples import NAMESPACE
from tests.support.steps import Completed, complete
from tests.support.waiting import wait_until


def test_leases_end_with_their_connection(node: Node) -> None:
    wanted, client = node.save(), node.connect()
    for lease in opened(client, wanted):
        ended(client, lease)
    assert node.arena_cache.leased() == 3
    client.close()
    wait_until(lambda: not node.arena_cache.leased(), bound_s=PATIENCE_S)
    assert [one.state for one in loaded(node.connect(), wanted)] == [CellState.READY] * 3
    wait_until(lambda: not node.arena_cache.leased())


def raw(node: Node) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(PATIENCE_S)
    sock.connect(str(node.path))
    return sock


def greeted(node: Node) -> socket.socket:
    sock = raw(node)
    sock.send(m.pack_hello(m.Hello(m.VERSION, wants_arena=False)))
    assert m.kind_of(sock.recv(100)) is m.MessageKind.WELCOME
    return sock


def ask_for(sock: socket.socket, wanted: Sequence[PayloadRequest]) -> None:
    """Open payloads."""
    sock.send(
        m.pack_open_request(m.OpenRequest(m.Urgency.BETWEEN_STEPS, 60_000, world.claims_of(wanted)))
    )
    m.unpack_opened(sock.recv(1000), len(wanted))


@pytest.mark.parametrize(
    "message",
    [
        b"\xff",
        m.pack_release([7]),
        m.pack_text(m.MessageKind.FOUND, ""),
        m.pack_commits([m.Commit(0, 1)]),
        b"\x04" + b"x" * 70_000,
        m.pack_find(NAMESPACE, [], ("0.L0-1_H0-1",)),
    ],
)
def test_a_client_that_lies_harms_only_itself_and_keeps_its_memory_until_it_goes(
    node: Node, message: bytes
) -> None:
    wanted, honest, liar = node.save(), node.connect(), greeted(node)
    leases = opened(honest, wanted[:1])
    ask_for(liar, wanted)
    wait_until(
        lambda: node.arena_cache.contains_ready([w.claim.key.path() for w in wanted]) == [True] * 3
    )
    liar.send(message)
    assert liar.recv(100) == b"", "the agent ends the conversation"
    assert node.arena_cache.leased() == 3, "a device of the client may still read"
    liar.close()
    wait_until(lambda: node.arena_cache.leased() == 1)
    assert world.pages_at(honest.arena.view, ended(honest, leases[0])) == RIGHT
    honest.release([leases[0].number])


@pytest.mark.parametrize(
    ("mode", "refusal"),
    [(0o700, "serves user 4242, not"), (0o777, "serves it, and others can write its folder")],
)
def test_a_stranger_is_refused_also_if_it_is_the_agent(
    node: Node, monkeypatch: pytest.MonkeyPatch, mode: int, refusal: str
) -> None:
    node.folder.chmod(mode)
    with world.serving(node):
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        monkeypatch.setattr(peers, "_ROOT", 4243)
        with pytest.raises(TransferError, match=refusal):
            node.connect()
        with pytest.raises(StoreUnavailable):
            AgentApi(node.http).namespaces()


def test_strangers_take_no_places_of_clients(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_CLIENTS_MAX", 2)
    monkeypatch.setattr(server_module, "_REFUSAL_S", PATIENCE_S)
    with monkeypatch.context() as strange:
        strange.setattr(server_module, "is_served", lambda _: False)
        strangers = [raw(node) for _ in range(2 * server_module._REFUSED_MAX)]
        for sock in strangers[server_module._REFUSED_MAX :]:
            assert sock.recv(100) == b"", "only so many wait for the reason"
    assert node.server.clients == 0
    node.connect()
    for sock in strangers:
        sock.close()


def test_a_client_that_does_not_greet_is_dropped_in_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it does not close its side."""
    monkeypatch.setattr(server_module, "_HELLO_S", 0.05)
    monkeypatch.setattr(server_module, "_REFUSAL_S", 0.05)
    silent, strange, friend = raw(node), raw(node), greeted(node)
    strange.send(m.pack_hello(m.Hello(m.VERSION + 1, wants_arena=True))[:-1])
    assert "speaks version" in m.unpack_text(strange.recv(1000))
    assert silent.recv(100) == b""
    wait_until(lambda: node.server.clients == 1)
    friend.send(m.pack_find(NAMESPACE, [bytes(20)], ("0.L0-1_H0-1",)))
    assert m.kind_of(friend.recv(1000)) is m.MessageKind.FOUND, "once greeted, it may be silent"
    for sock in (silent, strange, friend):
        sock.close()


@pytest.mark.parametrize(
    ("agents", "clients", "refusal"),
    [
        (("signed",), (), "payloads are signed: set seals=signed for its replicas"),
        (("signed", "encrypted"), ("signed",), "set seals=signed,encrypted for its replicas"),
        (("encrypted",), ("signed",), "set seals=encrypted for its replicas"),
        ((), ("signed",), "this agent has no keys, but the client's payloads are sealed"),
        ((), (), None),
        (("signed", "encrypted"), ("signed", "encrypted"), None),
    ],
)
def test_a_client_is_refused_unless_its_payloads_are_sealed_as_the_agents(
    agents: tuple[str, ...], clients: tuple[str, ...], refusal: str | None
) -> None:
    node = Node(seals=agents).listen()
    if refusal is None:
        AgentConnection(node.path, seals=clients, call_s=PATIENCE_S).close()
    else:
        with pytest.raises(AgentRefused, match=refusal):
            AgentConnection(node.path, seals=clients, call_s=PATIENCE_S)
    node.close()


def test_there_is_a_limit_of_clients_leases_and_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_CLIENTS_MAX", 2)
    monkeypatch.setattr(server_module, "_LEASES_MAX", 2)
    node = Node().listen()
    first = node.connect()
    node.connect()
    with pytest.raises(TransferError, match="has 2 clients already"):
        node.connect()
    wanted = node.save()
    leases = opened(first, wanted[:2])
    (over,) = opened(first, wanted[2:])
    assert (over.number, over.progress.state) == (0, CellState.FAILED)
    first.release([lease.number for lease in leases])
    held = first.open(world.claims_of(wanted[:1]), deadline_s=1e9, urgency=Urgency.IN_STEP)
    (resident,) = node.arena_cache.peek([wanted[0].claim.key.path()])
    assert resident is not None
    assert resident.deadline <= monotonic() + 600
    first.release([held[0].number])
    node.close()


@pytest.mark.parametrize("clients_max", [0, 1])
@pytest.mark.parametrize(
    ("place", "name", "error"),
    [
        (threading.Thread, "start", RuntimeError()),
        (server_module, "Alarm", OSError(errno.EMFILE, "too many open files")),
        (server_module, "peer_of", MemoryError()),
    ],
)
def test_clients_are_accepted_again_whatever_went_wrong_with_one(
    monkeypatch: pytest.MonkeyPatch,
    place: object,
    name: str,
    error: Exception,
    clients_max: int,
) -> None:
    """A client is served, or refused, once there are threads, descriptors and memory again."""

    monkeypatch.setattr(server_module, "_PAUSE_S", 0.01)
    monkeypatch.setattr(server_module, "_CLIENTS_MAX", clients_max)
    node = Node().listen()
    with monkeypatch.context() as patch:
        patch.setattr(place, name, world.raising(error))
        with pytest.raises(TransferError):
            node.connect()
    assert node.server.is_accepting
    assert not node.server.clients
    if clients_max:
        assert node.connect().is_open
    else:
        with pytest.raises(AgentRefused, match="has 0 clients already"):
            node.connect()
    node.close()


def test_those_beyond_the_limit_get_few_threads_and_one_line_of_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_REFUSAL_S", PATIENCE_S)
    monkeypatch.setattr(server_module, "_CLIENTS_MAX", 0)
    node = Node().listen()
    before = threading.active_count()
    silent = [raw(node) for _ in range(30)]
    assert silent[-1].recv(100) == b"", "who cannot be told why is hung up on"
    assert threading.active_count() <= before + server_module._REFUSED_MAX
    for sock in silent:
        sock.close()

    def is_told_why() -> bool:
        with pytest.raises(TransferError) as caught:  # those before may not be seen to have left
            node.connect()
        return caught.type is AgentRefused

    wait_until(is_told_why)
    assert len(caplog.messages) == 1
    node.close()


def test_without_a_free_descriptor_there_is_no_agent(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = AgentCalls(lambda: AgentConnection(node.path))
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", world.raising(OSError(24, "Too many open files")))
        with pytest.raises(StoreUnavailable, match="Too many open files"):
            Completed(calls).run("get", path=SWITCH_PATH)
        assert not is_listening(node.path)
    calls.close()


def test_an_agent_that_never_answers_is_lost_in_time(node: Node) -> None:
    client = AgentConnection(node.path, call_s=1.0)
    find = world.Paused(node.index, "find")
    assert client.send(m.pack_find(NAMESPACE, [bytes(20)], ("0.L0-2_H0-2",)))
    assert client.receive() is None
    with pytest.raises(TransferError, match="no answer"):
        client.commit([m.Commit(0, 1)])
    assert not find.is_over
    assert not client.is_open
    with pytest.raises(TransferError, match="lost"):
        complete(client.find(NAMESPACE, [bytes(20)], ("0.L0-2_H0-2",)))
    find.go.set()
    client.close()


@pytest.fixture
def calls(node: Node) -> Any:
    made = AgentCalls(lambda: node.connect(wants_arena=False))
    yield Completed(made)
    made.close()


def test_lookups_are_answered_from_one_board(node: Node, calls: Completed) -> None:
    wanted = node.save()
    key = wanted[0].claim.key
    hashes = [one.claim.key.prefix_hash for one in wanted]
    found = calls.find(NAMESPACE, [*hashes, bytes(20)], [key.field])
    assert [None if one is None else dict(one) for one in found] == [
        *({key.field: one.record} for one in wanted),
        None,
    ]
    assert None not in calls.find(NAMESPACE, hashes, [key.field])
    node.index.forget(NAMESPACE, key.prefix_hash, key.field, wanted[0].record)
    assert calls.find(NAMESPACE, hashes, [key.field])[0] is not None, "for a while"
    assert calls.lookup(NAMESPACE, hashes)[0] is None
    assert calls.lookup(NAMESPACE, hashes)[1] == node.index.lookup(NAMESPACE, hashes)[1]
    assert calls.find(NAMESPACE, [], [key.field]) == []


def test_a_client_remembers_a_bounded_number_of_blocks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "KNOWN_MAX", 2)
    wanted = node.save()
    field, client = wanted[0].claim.key.field, node.connect(wants_arena=False)
    for count in (1, 2, 3, 1, 2, 3):
        hashes = [one.claim.key.prefix_hash for one in wanted[:count]]
        assert None not in complete(client.find(NAMESPACE, hashes, (field,)))
        assert None not in complete(client.find(NAMESPACE, hashes, (field,)))
        assert len(client._known) <= 2


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_payload_that_was_missed_is_not_found_again(
    node: Node, calls: Completed, is_missing: bool
) -> None:
    wanted = node.save()
    key = wanted[0].claim.key
    hashes = [one.claim.key.prefix_hash for one in wanted]
    assert None not in calls.find(NAMESPACE, hashes, [key.field])
    if is_missing:
        node.store.delete(key.path())
    else:
        node.store.put(key.path(), bytes(wanted[0].record.nbytes))
    (missed,) = loaded(node.connect(), wanted[:1])
    assert missed.reason == (MissReason.MISSING if is_missing else MissReason.CORRUPT)
    assert calls.find(NAMESPACE, hashes, [key.field])[0] is None


def test_all_records_of_a_long_prompt_are_touched_and_live_as_the_agent_says(
    node: Node, calls: Completed
) -> None:
    """A replica that has only the socket has no time to live of its own."""
    touched, lives = list[bytes](), set[int]()

    def touch(_: str, hashes: Sequence[bytes], *, ttl_s: int) -> None:
        touched.extend(hashes)
        lives.add(ttl_s)

    node.index.touch = touch  # type: ignore[method-assign]
    hashes = [n.to_bytes(20, "big") for n in range(4000)]
    calls.touch(NAMESPACE, hashes, ttl_s=1)
    assert (touched, lives) == (hashes, {3600})


def test_identities_can_be_made_and_read_the_switch_read_and_nothing_else(
    node: Node, calls: Completed
) -> None:
    path = identity_path(NAMESPACE)
    assert calls.get(path, 0, 100) is None
    assert calls.put_if_absent(path, b"document")
    assert not calls.put_if_absent(path, b"other")
    assert calls.get(path, 2, 100) == b"cument"
    node.store.put(SWITCH_PATH, b"{}")
    assert calls.get(SWITCH_PATH, 0, 100) == b"{}"
    many = bytes(range(256)) * 500
    node.store.put(SWITCH_PATH, many)
    assert calls.get(SWITCH_PATH, 0, 1 << 20) == many
    assert calls.get(SWITCH_PATH, 7, 40_000) == many[7:40_000]
    node.store.put(SWITCH_PATH, many[: client_module.DOCUMENT_BYTES_MAX])
    assert calls.get(SWITCH_PATH, 0, 1 << 20) == many[: client_module.DOCUMENT_BYTES_MAX]
    with pytest.raises(StoreDenied, match="no access"):
        calls.put_if_absent(SWITCH_PATH, b"of a client")
    payload = node.save()[0].claim.key.path()
    for wrong in (payload, "../x", f"{path}/x"):
        with pytest.raises(StoreDenied, match="no access"):
            calls.get(wrong, 0, 10)
        with pytest.raises(StoreDenied, match="no access"):
            calls.put_if_absent(wrong, b"x")
    with pytest.raises(StoreError, match="bytes"):
        calls.put_if_absent(path, bytes(m.MESSAGE_BYTES_MAX))


def test_a_replica_prefetches_in_calls_of_bounded_length(
    node: Node, calls: Completed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_CHUNKS_MAX", 2)
    wanted = node.save(range(1000, 1000 + 16 * 7))
    hashes = [one.claim.key.prefix_hash for one in wanted]
    nbytes = wanted[0].record.raw_bytes
    assert calls.prefetch(NAMESPACE, hashes, PrefetchOrder(60.0, 0, 3 * nbytes)) == 3
    wait_until(lambda: not node.arena_cache.leased())
    hashes.insert(5, bytes(20))
    assert calls.prefetch(NAMESPACE, hashes, PrefetchOrder(60)) == 2
    wait_until(lambda: not node.arena_cache.leased())
    found = node.arena_cache.contains_ready([one.claim.key.path() for one in wanted])
    assert found == [True] * 5 + [False] * 2


def test_the_stores_errors_arrive_as_what_they_are(node: Node, calls: Completed) -> None:
    node.index.find = denied  # type: ignore[method-assign]
    node.index.touch = denied  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="no rights"):
        calls.find(NAMESPACE, [bytes(20)], ["0.L0-2_H0-2"])
    with pytest.raises(StoreDenied, match="no rights"):
        calls.touch(NAMESPACE, [bytes(20)], ttl_s=1)


def test_a_lost_connection_is_replaced(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    calls = AgentCalls(lambda: node.connect(wants_arena=False), clock=lambda: now[0])
    assert Completed(calls).run("get", path=SWITCH_PATH) is None
    node.clients[-1]._is_lost = True
    assert Completed(calls).run("get", path=SWITCH_PATH) is None
    assert len(node.clients) == 2
    node.server.close()
    with pytest.raises(StoreUnavailable):
        Completed(calls).run("get", path=SWITCH_PATH)
    tries = len(node.clients)
    with pytest.raises(StoreUnavailable):
        Completed(calls).run("get", path=SWITCH_PATH)
    assert len(node.clients) == tries, "not before a pause has passed"
    assert caplog.text.count("by the agent failing") == 1
    calls.close()


@pytest.fixture
def desk(node: Node) -> Any:
    made = Desk(node)
    yield made
    made.close()


def test_what_was_handed_over_is_saved_and_resident(node: Node, desk: Desk) -> None:
    made = payloads()
    assert [desk.hand_over(payload) for payload in made] == [CommitStatus.ACCEPTED] * 3
    assert node.saves.drain(PATIENCE_S)
    keys = [claim.key for claim in world.claims_in(made)]
    assert [node.store.get(key.path()) for key in keys] == made
    client = node.connect()
    leases = opened(client, node.wanted(keys))
    assert [lease.progress.state for lease in leases] == [CellState.READY] * 3
    for lease in leases:
        assert world.pages_at(client.arena.view, lease.progress) == RIGHT
    client.release([lease.number for lease in leases])
    assert not node.store.gets
    assert desk.hand_over(made[0]) is CommitStatus.REPEATED
    assert desk.accepted == keys


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p[:-1],
        lambda p: p + b"x",
        lambda p: p[:4100] + bytes([p[4100] ^ 1]) + p[4101:],
        lambda p: p[:50] + bytes([p[50] ^ 1]) + p[51:],
        lambda p: b"x" * 9,
    ],
)
def test_no_wrong_payload_is_saved(node: Node, desk: Desk, spoil: Callable[[bytes], bytes]) -> None:
    good = payloads()[0]
    assert desk.hand_over(spoil(good), read_header(good)) is CommitStatus.REFUSED
    assert node.saves.drain(PATIENCE_S)
    assert not list(node.store.scan(""))
    assert desk.hand_over(good) is CommitStatus.ACCEPTED, "it can be saved later"


def test_an_overloaded_or_full_store_is_reported(node: Node, desk: Desk) -> None:
    first, second, third = payloads()
    put, node.store.put_if_absent = node.store.put_if_absent, world.busy  # type: ignore[assignment, method-assign]
    desk.hand_over(first)
    wait_until(lambda: node.saves.is_shedding)
    assert desk.hand_over(second) is CommitStatus.SHED
    node.store.put_if_absent = put  # type: ignore[method-assign]
    wait_until(lambda: not node.saves.is_shedding)
    node.cache.has_room = lambda: False  # type: ignore[method-assign]
    assert desk.saves.has_room()
    assert desk.hand_over(second) is CommitStatus.OVER_QUOTA
    assert not desk.saves.has_room()
    desk.now = 100.0
    assert desk.saves.has_room()
    node.cache.has_room = lambda: True  # type: ignore[method-assign]
    assert desk.hand_over(third) is CommitStatus.ACCEPTED


def test_an_outbox_that_could_shrink_is_refused(node: Node) -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    with pytest.raises(TransferError, match="not an agent"):
        node.connect(outbox=fd)
    os.close(fd)
