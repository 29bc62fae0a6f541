"""The agent's socket: one connection for each part of a replica, and what each of them holds.

A connection is one client: its leases end with it, however it ends. Each has a thread, which reads
one message, answers it, and never waits for a store except for lookups. Only processes of the same
user, or of root, are served.
"""

import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from threading import Lock, Thread

from objkv.agent import messages
from objkv.agent.answering import NodeCalls, NodeLookups
from objkv.agent.arena_cache import CachedPayload
from objkv.agent.core import Core
from objkv.agent.memory.arena import Arena, CellState
from objkv.agent.messages import VERSION, Claims, MessageKind, MissReason, ProtocolError, Urgency
from objkv.agent.outbox import ClientOutbox
from objkv.agent.peers import is_served, peer_of
from objkv.agent.saves import NodeSaves
from objkv.background import JOIN_S, Alarm, join_all
from objkv.errors import StoreError, TransferError
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.telemetry import FailureLog

logger = logging.getLogger(__name__)
_CLIENTS_MAX = 512
_LEASES_MAX = 16_384
"""Per client."""
_DEADLINE_MS_MAX = 600_000
_SEND_S = 5.0
"""How long a client may leave an answer unread. Answers fit into its socket's buffer."""
_HELLO_S = 10.0
_REFUSAL_S = 1.0
_PAUSE_S = 1.0
"""After a connection that could not be served, such as without a free descriptor."""
_LOOK_S = 0.02
_REFUSED_MAX = 8
"""Refused clients that may wait for the reason at a time. Others are only hung up on."""


class AgentSession:
    """One connection and its leases. Its methods run on its own thread, except for ``wake``."""

    def __init__(
        self, core: Core, sock: socket.socket, number: int, refusal: str | None = None
    ) -> None:
        """``refusal``: why it is not served."""
        self.sock, self.number, self.refusal = sock, number, refusal
        self.outbox: ClientOutbox | None = None
        self.replica = b""
        """Whose payloads are in the outbox."""
        self.alarm = Alarm()
        """Rings at each progress of a payload that this client waits for."""
        self.busy = Lock()
        """Held while a message is processed."""
        self._core = core
        self.leases: dict[int, CachedPayload] = {}
        self._next = 1

    def wake(self) -> None:
        """See ``Waiter``."""
        self.alarm.set()

    def lease(
        self, wanted: Claims, *, deadline_s: float, urgency: Urgency
    ) -> list[messages.OpenAnswer]:
        """Open payloads, see ``Core.open``."""
        answers: list[messages.OpenAnswer] = []
        for one in self._core.open(self, wanted, deadline_s=deadline_s, urgency=urgency):
            if isinstance(one, MissReason):
                answers.append(messages.OpenAnswer(CellState.FAILED, one))
                continue
            number = self._next
            self._next = number % 0xFFFF_FFFF + 1
            assert number not in self.leases
            self.leases[number] = one
            answer = messages.OpenAnswer(CellState.FILLING, lease=number, cell=one.cell)
            if one.state is CellState.READY:  # the rest is final
                place = one.layout, number, 0, one.offset, one.nbytes
                answer = messages.OpenAnswer(CellState.READY, MissReason.NONE, *place)
            answers.append(answer)
        return answers

    def end(self, numbers: Sequence[int]) -> None:
        """End leases. Raises ``ProtocolError`` for one that this client does not hold."""
        for number in numbers:
            resident = self.leases.pop(number, None)
            if resident is None:
                raise ProtocolError(f"lease {number} is not this client's")
            self._core.arena_cache.release(resident)

    def end_unused(self) -> None:
        """Only answer what has come from a client that has no lease."""
        if self.busy.acquire(blocking=False):
            if not self.leases:
                _shut(self.sock, socket.SHUT_RD)
            self.busy.release()

    def end_all(self) -> None:
        """End all leases, and close the connection. Idempotent."""
        for resident in self.leases.values():
            self._core.arena_cache.release(resident, self)
        self.leases.clear()
        self._core.forget_client(self)
        self.alarm.close()
        self.sock.close()
        if self.outbox is not None:
            self.outbox.close()


class AgentServer:
    """Serves clients on a listening socket until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        core: Core,
        saves: NodeSaves,
        arena: Arena,
        lookups: NodeLookups,
        calls: NodeCalls,
        *,
        seals: Sequence[str],
    ) -> None:
        """Closes ``listener``. ``seals``: how the agent's payloads are sealed."""
        self._listener, self._core, self._saves = listener, core, saves
        self._arena, self._lookups, self._calls = arena, lookups, calls
        self.seals = tuple(seals)
        self._lock = Lock()
        self._clients: dict[AgentSession, Thread] = {}
        self._numbers = 0
        self._failure_log = FailureLog(logger, "connections of new clients")
        self._closed = self._draining = False
        self._answers: dict[MessageKind, Callable[[AgentSession, bytes], bytes | None]] = {
            MessageKind.OPEN: self._open,
            MessageKind.RELEASE: self._release,
            MessageKind.FIND: self._find,
            MessageKind.REJECT: self._reject,
            MessageKind.COMMIT: self._commit,
            MessageKind.CALL: self._call,
            MessageKind.DROP: self._drop,
        }
        self._thread = Thread(target=self._accept, name="objkv-agent-accept", daemon=True)
        self._thread.start()

    @property
    def clients(self) -> int:
        """Number of connections, without those that are refused."""
        return sum(client.refusal is None for client in list(self._clients))

    @property
    def is_accepting(self) -> bool:
        """Whether new clients are served."""
        return self._thread.is_alive()

    def listen_at(self, listener: socket.socket) -> None:
        """Accept connections at another socket, which this object closes as it does the old one."""
        with self._lock:
            before, self._listener = self._listener, listener
        _shut(before)  # wakes the thread that accepts
        before.close()

    def stop_accepting(self) -> None:
        """The caller closes the listening socket from now on, since another agent takes over."""
        self._draining = True

    def drain(self, seconds: float) -> bool:
        """End the connections of clients without a lease, and of others when their last lease
        ends. Returns whether all have ended within ``seconds``. The core must be draining."""
        end = time.monotonic() + seconds
        while clients := list(self._clients):
            for client in clients:
                client.end_unused()
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_S)
        return True

    def close(self) -> None:
        """End all connections. The core must be closed: it would reuse memory. Idempotent."""
        with self._lock:
            self._closed = True
            clients = dict(self._clients)
        if self._listener.fileno() >= 0:
            _shut(self._listener)
            self._listener.close()
        for client in clients:
            _shut(client.sock)
        join_all([self._thread, *clients.values()], JOIN_S)

    def _accept(self) -> None:
        while not self._closed:
            listener = self._listener
            try:
                sock, _ = listener.accept()
                self._admit(sock)
            except Exception as exc:  # a dead thread would keep every later client waiting
                if self._closed or self._draining or self._listener.fileno() < 0:
                    return
                if listener is self._listener:
                    self._failure_log.failed(exc)
                    time.sleep(_PAUSE_S)  # such as no descriptor: it may be some time

    def _admit(self, sock: socket.socket) -> None:
        """Serve a connection. If this raises, it is closed."""
        with ExitStack() as undo:
            undo.callback(sock.close)
            if (reason := self._refusal(sock)) is not None:
                self._failure_log.failed(TransferError(reason))
                if len(self._clients) - self.clients >= _REFUSED_MAX:
                    return
            self._numbers += 1
            client = AgentSession(self._core, sock, self._numbers, reason)
            undo.callback(self._end, client)
            name = f"objkv-client-{client.number}"
            thread = Thread(target=self._serve, args=(client,), name=name, daemon=True)
            with self._lock:
                if self._closed:
                    return
                thread.start()
                self._clients[client] = thread
            undo.pop_all()
            if reason is None:
                self._failure_log.worked()

    def _refusal(self, sock: socket.socket) -> str | None:
        _, uid = peer_of(sock)
        if not is_served(uid):
            return f"this agent serves user {os.geteuid()}, not user {uid}"
        if self.clients >= _CLIENTS_MAX:
            return f"this agent has {_CLIENTS_MAX} clients already"
        return None

    def _serve(self, client: AgentSession) -> None:
        is_greeted = False
        try:
            client.sock.settimeout(_HELLO_S if client.refusal is None else _REFUSAL_S)
            is_greeted = self._greet(client)
            if is_greeted:
                client.sock.settimeout(None)
                client.sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_SEND_S), 0)
                )
                while message := client.sock.recv(messages.MESSAGE_BYTES_MAX + 1):
                    with client.busy:
                        answer = self._answer(client, message)
                    if answer is not None:
                        client.sock.send(answer)
        except TransferError as exc:
            logger.warning("client dropped number=%d reason=%s", client.number, exc)
        except OSError as exc:
            logger.debug("client gone number=%d reason=%s", client.number, exc)
        except Exception:
            logger.exception("client dropped number=%d", client.number)
        finally:
            # Only who was greeted may have mapped the arena.
            _await_end(client.sock, None if is_greeted else _REFUSAL_S)
            self._end(client)

    def _greet(self, client: AgentSession) -> bool:
        message, given, _, _ = socket.recv_fds(client.sock, messages.MESSAGE_BYTES_MAX + 1, 1)
        try:
            if not message or messages.kind_of(message) is not MessageKind.HELLO:
                return False
            hello = messages.unpack_hello(message)
            refusal = client.refusal
            if hello.version != VERSION:
                refusal = (
                    f"this agent speaks version {VERSION} of the protocol, not {hello.version}"
                )
            elif hello.seals != messages.seals_mask(self.seals):
                refusal = refusal or _sealed_otherwise(self.seals)
            if refusal is not None:
                client.sock.send(messages.pack_text(MessageKind.REFUSED, refusal))
                return False
            if hello.has_outbox and given:
                client.outbox = ClientOutbox(given.pop())
                client.replica = hello.replica
                self._saves.joins.client_connected(client.replica)
        finally:
            for fd in given:
                os.close(fd)
        arena, board = self._arena.fd, self._lookups.board.fd
        descriptors = [arena, client.alarm.fileno()] if hello.wants_arena else [board]
        socket.send_fds(client.sock, [bytes((MessageKind.WELCOME,))], descriptors)
        return True

    def _answer(self, client: AgentSession, message: bytes) -> bytes | None:
        if len(message) > messages.MESSAGE_BYTES_MAX:
            raise ProtocolError(f"a message of more than {messages.MESSAGE_BYTES_MAX} bytes")
        answer = self._answers.get(messages.kind_of(message))
        if answer is None:
            raise ProtocolError(f"{messages.kind_of(message).name} from a client")
        try:
            return answer(client, message)
        except StoreError as exc:
            return messages.pack_failure(exc)

    def _open(self, client: AgentSession, message: bytes) -> bytes:
        urgency, deadline_ms, wanted = messages.unpack_open_request(message)
        if len(client.leases) + len(wanted) > _LEASES_MAX:
            return messages.pack_opened(
                [messages.OpenAnswer(CellState.FAILED, MissReason.NO_ROOM)] * len(wanted)
            )
        deadline_s = min(deadline_ms, _DEADLINE_MS_MAX) / 1000
        return messages.pack_opened(client.lease(wanted, deadline_s=deadline_s, urgency=urgency))

    def _release(self, client: AgentSession, message: bytes) -> None:
        client.end(messages.unpack_release(message))

    def _reject(self, client: AgentSession, message: bytes) -> None:
        wanted = messages.unpack_open_request(message).wanted
        for row in wanted:
            self._core.reject(wanted.claim(row))

    def _commit(self, client: AgentSession, message: bytes) -> bytes:
        outbox, commits = client.outbox, messages.unpack_commits(message)
        if outbox is None or max(one.offset + one.nbytes for one in commits) > outbox.nbytes:
            raise ProtocolError("a commit of bytes outside of the outbox")
        save = self._saves.commit
        return messages.pack_committed([save(outbox, one, client.replica) for one in commits])

    def _drop(self, client: AgentSession, message: bytes) -> None:
        if client.outbox is None:
            raise ProtocolError("a drop without an outbox")
        self._saves.joins.drop(client.replica, messages.unpack_drop(message))

    def _call(self, client: AgentSession, message: bytes) -> bytes:
        try:
            return messages.pack_text(
                MessageKind.RESULT, self._calls.run(messages.unpack_text(message))
            )
        except ProtocolError as exc:
            raise StoreError(f"the result is too long: {exc}") from exc

    def _find(self, client: AgentSession, message: bytes) -> bytes:
        namespace, hashes, fields = messages.unpack_find(message)
        if not hashes:
            raise ProtocolError("a lookup of nothing")
        if len(hashes) > PREFIX_HASH_BYTES * messages.find_max(len(fields)):
            raise StoreError(f"a lookup of {len(hashes)} bytes of hashes in {len(fields)} fields")
        return messages.pack_found(self._lookups.find(namespace, hashes, fields))

    def _end(self, client: AgentSession) -> None:
        if client.outbox is not None:
            self._saves.joins.client_left(client.replica)
        client.end_all()
        with self._lock:
            self._clients.pop(client, None)


def _sealed_otherwise(seals: Sequence[str]) -> str:
    """Return why an agent whose payloads have ``seals`` does not serve a client with others: they
    would have a namespace in common with clients of other agents that do not open its payloads."""
    if seals:
        return (
            f"this agent's payloads are {' and '.join(seals)}: set seals={','.join(seals)} for its "
            "replicas, and no keys for other seals"
        )
    return (
        "this agent has no keys, but the client's payloads are sealed: set the keys for the agent, "
        "or remove them and seals from the client's settings"
    )


def _await_end(sock: socket.socket, seconds: float | None) -> None:
    """End the conversation, and wait until the client has closed its side: a device of the client
    may read leased memory until then. ``seconds``: at most; None: for ever."""
    _shut(sock, socket.SHUT_WR)
    # Not by recv: an empty message looks like an end.
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll(None if seconds is None else 1000 * seconds)


def _shut(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End what comes, goes or both. Wakes the threads that wait for that."""
    with suppress(OSError):  # the other side has gone
        sock.shutdown(how)
