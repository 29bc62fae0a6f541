"""A replica's side of the agent's socket: leases of payloads in the arena, lookups, and calls.

A fault raises ``TransferError`` and leaves the connection unusable. No call waits longer than its
time-out. A connection that failed still holds its leases until ``close``: whatever reads the arena
must have finished by then, because the agent reuses the memory.

Lookups have a message of their own, and a board of answers that all replicas read. All other calls
on the index and the documents are rare, and are JSON: a verb and its arguments, with hashes as hex
and records as an index writes them. ``answering`` is the agent's side.
"""

import base64
import hashlib
import json
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, repeat
from pathlib import Path
from threading import Event, Lock
from time import monotonic
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from objkv import errors
from objkv.agent import messages
from objkv.agent.memory.answers import FIELDS_MAX, AnswerBoard, LookupScope
from objkv.agent.memory.arena import ALL_FRAMES, BOARD_BYTES, Arena, CellState, Progress
from objkv.agent.messages import VERSION, Claims, MessageKind, MissReason, ProtocolError, Urgency
from objkv.agent.peers import connect_to
from objkv.background import Alarm, ClosedError, Question, Steps, wait_for
from objkv.codec.values import Claim
from objkv.errors import ObjkvError, StoreError, StoreUnavailable, TransferError
from objkv.index.base import Record, Savings, ShardRecords
from objkv.index.fields import decode_shard, encode_shard
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.stores.base import Buffer
from objkv.telemetry import FailureLog

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
FoundBlock = tuple[ShardRecords | None, ...]
CALL_S = 2.0
"""How long an answer may take, which takes microseconds unless the machine is very busy."""
KNOWN_MAX = 256
"""Decoded blocks that a client remembers: about 3 MB."""
_REACH_S, REACH_MAX_S = 0.1, 5.0
"""Pauses between attempts to reach an agent."""
WINDOW, _WINDOW_BYTES = 64, 512 << 20
"""Payloads open at once, so that one long prompt does not lease the whole arena."""
_IN_STEP_SHARE = 4
"""Divisor: loads within a step may open so much more. Otherwise slow loads between steps could take
all room, and the forward pass waited for them, for what is in the arena already."""
_BATCH_BYTES = 128 << 20
"""Payloads opened at once. Their pages are copied before the thread looks for more urgent loads.
Counts those of other ranks too: if a rank of TP 8 opened as many of its own, loads of all ranks
took 1.25 times as long, although 5 % less processor time (2 cores, 2026-11)."""


class AgentRefused(TransferError):
    """The agent does not serve this client, such as one of another version."""


class Connect(Protocol):
    """Connects to the agent: ``AgentLink.connect``."""

    def __call__(self, *, wants_arena: bool = False, outbox: int = -1) -> "AgentConnection":
        """Return a new connection, see there. Raises ``ObjkvError``."""


class ArenaLease(NamedTuple):
    """A payload that the client may read, now or soon."""

    number: int
    """0 if there is no lease: the payload is a miss."""
    cell: int
    progress: Progress


def lease_of(one: messages.OpenAnswer, arena: Arena) -> ArenaLease:
    """Return what was opened, with the progress so far."""
    if one.state == CellState.FILLING:
        return ArenaLease(one.lease, one.cell, arena.board.read(one.cell))
    frames = ALL_FRAMES if one.state == CellState.READY else 0
    place = one.offset, one.nbytes, one.reason, one.layout
    return ArenaLease(one.lease, one.cell, Progress(CellState(one.state), frames, *place))


class AgentConnection:
    """A way to the agent's payloads and answers. Thread-safe: calls take turns. What is done in
    steps is for one thread, and a connection of its own."""

    def __init__(
        self,
        path: Path,
        *,
        wants_arena: bool = False,
        outbox: int = -1,
        replica: str = "",
        seals: Sequence[str] = (),
        call_s: float = CALL_S,
    ) -> None:
        """``outbox``: a memfd to send; the caller still owns it. ``replica``: its name, if its
        ranks join payloads. ``seals``: how payloads are sealed; an agent that seals otherwise
        refuses. Raises ``TransferError`` if no agent serves ``path``, or it refuses."""
        self._path = path
        self._lock = Lock()
        self._is_lost = self._leaves = False
        self._unanswered = 0
        self._arena: Arena | None = None
        self._board: AnswerBoard | None = None
        self._known: dict[bytes, tuple[int, FoundBlock]] = {}
        self.alarm: Alarm | None = None
        """Rings when a payload that is being filled makes progress."""
        sock = self._sock = open_socket(call_s)
        try:
            connect_to(sock, path)
            name = hashlib.sha256(replica.encode()).digest()[:16] if replica else bytes(16)
            hello = messages.Hello(
                VERSION, wants_arena, outbox >= 0, name, messages.seals_mask(seals)
            )
            socket.send_fds(sock, [messages.pack_hello(hello)], [outbox] if outbox >= 0 else [])
            message, descriptors, _, _ = socket.recv_fds(sock, messages.MESSAGE_BYTES_MAX, 2)
            self._greeted(message, descriptors, wants_arena)
        except OSError as exc:
            sock.close()
            raise TransferError(f"no agent at {path}: {_reason(exc)}") from exc
        except TransferError:
            sock.close()
            raise

    def _greeted(self, message: bytes, descriptors: list[int], wants_arena: bool) -> None:
        try:
            if message and messages.kind_of(message) is MessageKind.REFUSED:
                raise AgentRefused(
                    f"the agent at {self._path} refused: {messages.unpack_text(message)}"
                )
            if not message or messages.kind_of(message) is not MessageKind.WELCOME:
                raise ProtocolError(f"the process at {self._path} is not an agent")
            if len(descriptors) != 1 + wants_arena:
                raise ProtocolError(f"{len(descriptors)} descriptors from the agent")
            if wants_arena:
                self._arena = Arena.join(descriptors.pop(0))
                self.alarm = Alarm(descriptors.pop())
            else:
                self._board = AnswerBoard.join(descriptors.pop())
        finally:
            for fd in descriptors:
                os.close(fd)

    @property
    def arena(self) -> Arena:
        """The agent's memory. Valid until ``close``."""
        assert self._arena is not None
        return self._arena

    @property
    def is_open(self) -> bool:
        """Whether the connection has not failed."""
        return not self._is_lost

    def has_ended(self) -> bool:
        """Whether it has failed, or the agent has ended it. Costs a system call."""
        if not self._is_lost:
            poll = select.poll()
            poll.register(self._sock, select.POLLRDHUP)
            self._is_lost = bool(poll.poll(0))
        return self._is_lost

    def open(self, wanted: Claims, *, deadline_s: float, urgency: Urgency) -> list[ArenaLease]:
        """Open 1 to ``OPEN_MAX`` payloads, in order. Each lease must be released."""
        deadline_ms = int(min(max(1.0, 1000 * deadline_s), messages.DEADLINE_MS_MAX))
        answer = self._call(
            messages.pack_open_request(messages.OpenRequest(urgency, deadline_ms, wanted))
        )
        opened = self._read(messages.unpack_opened, answer, len(wanted))
        return list(map(lease_of, opened, repeat(self.arena)))

    def release(self, leases: Sequence[int]) -> None:
        """End leases, at most ``RELEASE_MAX``. The memory may change from now on."""
        if leases:
            self._send(messages.pack_release(leases))

    def reject(self, claim: Claim) -> None:
        """Report that a payload is not what its key promises. It is served no more."""
        wanted = messages.OpenRequest(Urgency.IN_STEP, 0, Claims.of((claim,)))
        self._send(messages.pack_open_request(wanted, MessageKind.REJECT))

    def commit(self, commits: Sequence[messages.Commit]) -> list[messages.CommitStatus]:
        """Hand over at most ``COMMITS_MAX`` payloads, or parts. The outbox may change then."""
        answer = self._call(messages.pack_commits(commits))
        return self._read(messages.unpack_committed, answer, len(commits))

    def drop(self, drop: messages.Drop) -> None:
        """Report that this rank will not hand over its part of a payload."""
        self._send(messages.pack_drop(drop))

    def find(
        self, namespace: str, hashes: Sequence[bytes], fields: tuple[str, ...]
    ) -> Steps[list[ShardRecords | None]]:
        """Look up chunks, see ``ReadIndex.find``: in the answers first, and in steps what they
        lack. Raises ``StoreUnavailable`` if the agent, or its index, has no answer."""
        if len(fields) > FIELDS_MAX:
            raise StoreUnavailable(f"a lookup of {len(fields)} fields, allowed are {FIELDS_MAX}")
        scope = LookupScope(namespace, fields)
        parts = scope.blocks(b"".join(hashes))
        now = time.time()
        blocks = [self._kept(scope.key(part), part, fields, now) for part in parts]
        unknown = [number for number, block in enumerate(blocks) if block is None]
        at_once = messages.find_max(len(fields)) // scope.chunks
        for first in range(0, len(unknown), at_once):
            numbers = unknown[first : first + at_once]
            some = [parts[number] for number in numbers]
            answer = yield Question(self, messages.pack_find(namespace, some, fields))
            for number, block in zip(numbers, self._found(answer, some, fields), strict=True):
                blocks[number] = block
        return list(chain.from_iterable(block for block in blocks if block is not None))

    def _kept(
        self, key: bytes, part: bytes, fields: tuple[str, ...], now: float
    ) -> FoundBlock | None:
        """Return a block of an answer if it is in shared memory."""
        if self._board is None or self._is_lost:
            return None
        found = self._board.find(key, now)
        if found is None:
            return None
        known = self._known.get(key)
        if known is not None and known[0] == found[0]:
            return known[1]
        text = self._board.read(key, found)
        if text is None:
            return None
        block = self._read(messages.read_block, text, len(part) // PREFIX_HASH_BYTES, fields)
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[key] = found[0], block
        return block

    def _found(
        self, answer: bytes, parts: Sequence[bytes], fields: tuple[str, ...]
    ) -> list[FoundBlock]:
        """Read what the agent answers about some blocks of prefix hashes."""
        if self._read(messages.kind_of, answer) is MessageKind.FAILED:
            raise StoreUnavailable(f"lookup by the agent: {messages.unpack_text(answer)}")
        texts = self._read(messages.unpack_found, answer, len(parts))
        return [
            self._read(messages.read_block, text, len(part) // PREFIX_HASH_BYTES, fields)
            for text, part in zip(texts, parts, strict=True)
        ]

    def call(self, message: bytes) -> Steps[bytes]:
        """Send a CALL and return the answer."""
        answer = yield Question(self, message)
        if self._read(messages.kind_of, answer) not in (MessageKind.RESULT, MessageKind.FAILED):
            self._is_lost = True
            raise ProtocolError(f"{messages.kind_of(answer).name} instead of a result")
        return answer

    def fileno(self) -> int:
        """See ``Line``."""
        return self._sock.fileno()

    def send(self, message: bytes) -> bool:
        """See ``Line``. Not for a connection that is used in another way, too."""
        try:
            self._push(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        self._unanswered += 1
        return True

    def receive(self) -> bytes | None:
        """See ``Line``."""
        try:
            answer = self._pull(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        self._unanswered -= 1
        if self._leaves:
            self.close_when_answered()
        return answer

    def close_when_answered(self) -> None:
        """Close the connection once all questions are answered: one that the agent has ended."""
        self._leaves = True
        if not self._unanswered:
            self.close()

    def wait(self, seconds: float, also: Alarm | None = None) -> bool:
        """Wait for progress of a fill, or for ``also``. Returns False if the agent has gone."""
        alarms = [one for one in (self.alarm, also) if one is not None]
        if not wait_for(alarms, seconds, until_hangup=self._sock.fileno()):
            self._is_lost = True
        return not self._is_lost

    def close(self) -> None:
        """End the connection and all its leases, and unmap the arena. Idempotent."""
        self._is_lost = True
        self._sock.close()
        if self.alarm is not None:
            self.alarm.close()
        if self._arena is not None:
            self._arena.close()
        if self._board is not None:
            self._board.close()

    def _call(self, message: bytes) -> bytes:
        with self._lock:
            self._push(message)
            return self._pull()

    def _send(self, message: bytes) -> None:
        with self._lock:
            self._push(message)

    def _push(self, message: bytes, flags: int = 0) -> None:
        """Raises ``BlockingIOError`` only with ``MSG_DONTWAIT``, as does ``_pull``."""
        if self._is_lost:
            raise TransferError(f"the connection to the agent at {self._path} is lost")
        try:
            self._sock.send(message, flags)
        except OSError as exc:
            if flags and isinstance(exc, BlockingIOError):
                raise
            raise self._lost("no connection to", exc) from exc

    def _pull(self, flags: int = 0) -> bytes:
        try:
            answer = self._sock.recv(messages.MESSAGE_BYTES_MAX + 1, flags)
        except OSError as exc:
            if flags and isinstance(exc, BlockingIOError):
                raise
            raise self._lost("no answer from", exc) from exc
        if not answer:
            raise self._lost("no answer from", "it ended the connection")
        return answer

    def _lost(self, what: str, reason: OSError | str) -> TransferError:
        self._is_lost = True
        text = _reason(reason) if isinstance(reason, OSError) else reason
        return TransferError(f"{what} the agent at {self._path}: {text}")

    def _read(self, parse: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Parse an answer. A connection that sends nonsense is lost."""
        try:
            return parse(*args, **named)
        except ProtocolError:
            self._is_lost = True
            raise


class ArenaLeases:
    """One thread's leases of payloads in the agent's arena, on a connection that is made again when
    it is lost. Belongs to that thread, except for ``is_open``."""

    def __init__(self, connect: Callable[[], AgentConnection], what: str, *, share: int) -> None:
        """``connect``: returns a new connection with an arena, or raises ``ObjkvError``. ``what``:
        what there is not without an agent, in the plural, for the log. ``share``: divisor: of a
        small arena, these leases take at most this fraction."""
        self._connect, self._share = connect, share
        self.failure_log = FailureLog(logger, what)
        self.agent: AgentConnection | None = None
        self.is_moving = False
        """Whether the agent opens no more, because it is replaced."""
        self.leased = 0
        """Payloads that are open, also those that are a miss."""
        self._leased_bytes = self._share_bytes = 0
        self._retry_at, self._retry_s = 0.0, _REACH_S

    @property
    def is_open(self) -> bool:
        """Whether payloads may be asked for: there is an agent, and it is not known to be lost."""
        agent = self.agent
        return agent is not None and agent.is_open

    @property
    def present(self) -> AgentConnection:
        """The present connection, where there is one."""
        assert self.agent is not None
        return self.agent

    def connect(self) -> bool:
        """Make a new connection, which replaces the present one. Returns whether there is one."""
        if monotonic() < self._retry_at:
            return False
        self._retry_at = monotonic() + self._retry_s  # whatever fails now
        self._retry_s = min(2 * self._retry_s, REACH_MAX_S)
        try:
            before, self.agent = self.agent, self._connect()
        except ObjkvError as exc:
            self.failure_log.failed(exc)
            return False
        if before is not None:
            self._close(before)
        self._opened(self.agent)
        self._share_bytes = (self.agent.arena.nbytes - BOARD_BYTES) // self._share
        self.failure_log.worked()
        self._retry_at, self._retry_s, self.is_moving = 0.0, _REACH_S, False
        return True

    def await_retry(self, alarm: Alarm) -> None:
        """Wait until an agent may be reached again, or for ``alarm``."""
        wait_for([alarm], self._retry_at - monotonic())

    def room(self, *, in_step: bool = False) -> tuple[int, int]:
        """Return how many payloads, and how many bytes, may be opened now. If none is open, one of
        any size may. ``in_step``: whether a step waits for them."""
        if self.is_moving:
            return 0, 0
        count, nbytes = WINDOW, min(_WINDOW_BYTES, self._share_bytes)
        if in_step:
            count, nbytes = count + -(-count // _IN_STEP_SHARE), nbytes + nbytes // _IN_STEP_SHARE
        left = nbytes - self._leased_bytes
        return count - self.leased, min(_BATCH_BYTES, left if self.leased else max(1, left))

    def open(
        self, claims: Claims, nbytes: int, *, deadline_s: float, urgency: Urgency
    ) -> list[ArenaLease] | None:
        """Open payloads. None if the agent is replaced. Raises ``TransferError``."""
        opened = self.present.open(claims, deadline_s=deadline_s, urgency=urgency)
        # An agent may also close after it has granted a lease: then the payload is a miss.
        if not opened[0].number and opened[0].progress.reason == MissReason.CLOSED:
            self.is_moving = True
            return None
        self.leased += len(claims)
        self._leased_bytes += nbytes
        return opened

    def release(self, numbers: Sequence[int], nbytes: int) -> None:
        """End leases of payloads of about ``nbytes``. Raises ``TransferError``."""
        self.leased -= len(numbers)
        self._leased_bytes -= nbytes
        self.present.release([number for number in numbers if number])

    def wait(self, seconds: float, alarm: Alarm) -> bool:
        """Wait for progress, or for ``alarm``, for at most ``seconds``. Returns False if the agent
        has gone, or is replaced. Raises ``TransferError`` if leases were lost with it."""
        if self.is_moving and not self.leased:
            return False
        if not (goes_on := self.present.wait(seconds, alarm)) and self.leased:
            raise TransferError("the agent ended the connection")
        return goes_on

    def disconnect(self) -> None:
        """Close the connection, whose arena nothing reads, and all leases with it."""
        agent, self.agent = self.agent, None
        self.leased = self._leased_bytes = 0
        if agent is not None:
            self._close(agent)

    def _opened(self, agent: AgentConnection) -> None:
        """Prepare to read the arena of a new connection."""

    def _close(self, agent: AgentConnection) -> None:
        """Close a connection whose arena nothing reads."""
        agent.close()


def is_listening(path: Path) -> bool:
    """Whether an agent that this process trusts accepts connections."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(1.0)
            connect_to(sock, path)
    except OSError:
        return False
    return True


def open_socket(call_s: float) -> socket.socket:
    """Return a socket whose calls wait ``call_s`` at most. Raises ``TransferError``."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as exc:  # no descriptor is free
        raise TransferError(f"no socket for the agent: {exc}") from exc
    # Python's own time-outs poll before each call, which is a tenth of a lookup.
    micros = max(1, int(1e6 * call_s))  # 0 would wait for ever
    bound = struct.pack("ll", *divmod(micros, 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
    return sock


def _reason(error: OSError) -> OSError | str:
    """A time-out of the socket itself is reported as ``EAGAIN``."""
    return "timed out" if isinstance(error, BlockingIOError) else error.strerror or error


DOCUMENT_BYTES_MAX: Final = 32_768
"""Of a document, in an answer."""
_CHUNKS_MAX = 1024
"""In a call, so that they fit into a message."""
RETRY_S = 1.0
_FAILURES = ("StoreUnavailable", "StoreDenied", "StoreBusy", "StoreFull", "LeftAlone")
Arguments = Mapping[str, Any]


class AgentCalls:
    """The parts of a ``WriteIndex`` and a ``WriteStore`` that replicas use, in steps of one thread.
    Lookups have a connection of their own, so none waits for another call."""

    def __init__(
        self, connect: Callable[[], AgentConnection], *, clock: Callable[[], float] = monotonic
    ) -> None:
        """``connect``: returns a new connection, or raises ``ObjkvError``."""
        self._connect, self._clock = connect, clock
        self._agents: dict[Callable[..., object], AgentConnection] = {}
        self._retry_at = -1.0
        self._closed = Event()
        self._failure_log = FailureLog(logger, "lookups and records by the agent")

    def run(self, verb: str, **arguments: Any) -> Steps[Any]:
        """Run a call in the agent. Raises ``StoreError`` as the agent's store or index does."""
        try:
            message = messages.pack_text(MessageKind.CALL, json.dumps({"verb": verb} | arguments))
        except ProtocolError as exc:
            raise StoreError(f"{verb}: {exc}") from exc
        answer = yield from self._use(AgentConnection.call, message)
        if messages.kind_of(answer) is MessageKind.FAILED:
            name, _, text = messages.unpack_text(answer).partition("\n")
            kind = getattr(errors, name) if name in _FAILURES else StoreError
            raise kind(text)
        try:
            return json.loads(messages.unpack_text(answer))
        except ValueError as exc:
            raise StoreUnavailable("the agent's answer is not JSON") from exc

    def prefetch(
        self, namespace: str, hashes: Sequence[bytes], order: messages.PrefetchOrder
    ) -> Steps[int]:
        """Have a prompt's payloads fetched. Returns how many started. Raises ``StoreError``."""
        started, left = 0, order.bytes_max
        for first in range(0, len(hashes), _CHUNKS_MAX):
            part = hashes[first : first + _CHUNKS_MAX]
            found = yield from self.run(
                "prefetch",
                namespace=namespace,
                hashes=_hex(part),
                order=asdict(replace(order, bytes_max=left)),
            )
            started += found["started"]
            if found["refused"] or found["stored"] < found["chunks"]:
                break
            if left is not None:
                left = left - found["started_bytes"]
        return started

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> Steps[list[ShardRecords | None]]:
        """See ``ReadIndex``."""
        if not prefix_hashes or not fields:
            return [None] * len(prefix_hashes)
        find = AgentConnection.find
        return (yield from self._use(find, namespace, prefix_hashes, tuple(fields)))

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> Steps[list[Record | None]]:
        """See ``ReadIndex``."""
        found = yield from self.run("lookup", namespace=namespace, hashes=_hex(prefix_hashes))
        return [None if one is None else _read_record(one) for one in found]

    def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> Steps[None]:
        """See ``WriteIndex``."""
        for first in range(0, len(prefix_hashes), _CHUNKS_MAX):
            hashes = _hex(prefix_hashes[first : first + _CHUNKS_MAX])
            yield from self.run("touch", namespace=namespace, hashes=hashes, ttl_s=ttl_s)

    def credit(self, savings: Savings) -> Steps[None]:
        """See ``WriteIndex``."""
        yield from self.run("credit", savings=asdict(savings))

    def get(self, key: str, start: int, end: int) -> Steps[bytes | None]:
        """See ``ReadStore``. A long document is read in parts, which may be of two versions."""
        document = b""
        while start + len(document) < end:
            at = start + len(document)
            found = yield from self.run("get", path=key, start=at)
            if found is None:
                return None
            part = base64.b64decode(found)
            document += part
            if len(part) < DOCUMENT_BYTES_MAX:
                break
        return document[: end - start]

    def put_if_absent(self, key: str, value: Buffer) -> Steps[bool]:
        """See ``WriteStore``."""
        document = base64.b64encode(value).decode()
        return bool((yield from self.run("put", path=key, document=document)))

    def close(self) -> None:
        """Close all connections. Idempotent. The thread must have ended."""
        self._closed.set()
        while self._agents:
            self._agents.popitem()[1].close()

    def _use(
        self,
        work: Callable[Concatenate[AgentConnection, P], Steps[T]],
        *args: P.args,
        **named: P.kwargs,
    ) -> Steps[T]:
        try:
            found = yield from work(self._reach(work), *args, **named)
        except (TransferError, TimeoutError) as exc:
            if not self._closed.is_set() and not isinstance(exc, ClosedError):
                self._failure_log.failed(exc)
            raise StoreUnavailable(str(exc)) from exc
        self._failure_log.worked()
        return found

    def _reach(self, work: Callable[..., object]) -> AgentConnection:
        """Return the connection for questions of a kind."""
        agent = self._agents.get(work)
        if agent is not None and not agent.has_ended():
            return agent
        if self._closed.is_set() or self._clock() < self._retry_at:
            raise TransferError("no agent")
        if agent is not None:
            del self._agents[work]
            agent.close_when_answered()
        try:
            agent = self._agents[work] = self._connect()
        except ObjkvError:
            self._retry_at = self._clock() + RETRY_S
            raise
        if self._closed.is_set():  # while it was made
            agent.close()
        return agent


def _hex(hashes: Sequence[bytes]) -> list[str]:
    return [one.hex() for one in hashes]


def read_hashes(call: Arguments) -> list[bytes]:
    """Return the hashes of a call. Raises one of its errors for invalid ones, as the others do."""
    hashes = [bytes.fromhex(text) for text in call["hashes"]]
    if any(len(one) != PREFIX_HASH_BYTES for one in hashes):
        raise ValueError("a hash of another length")
    return hashes


def record_text(record: Record) -> dict[str, Any]:
    """Return a record as a result has it."""
    return {
        "hashes": _hex((record.prefix_hash, record.parent_hash)),
        "tokens": [record.token_start, record.token_end],
        "shards": {name: encode_shard(one).decode() for name, one in record.shards.items()},
        "counts": [record.hits, record.touched_s, record.pinned_until_s],
    }


def _read_record(text: Arguments) -> Record:
    prefix_hash, parent_hash = read_hashes(text)
    (start, end), (hits, touched_s, pinned_until_s) = text["tokens"], text["counts"]
    found = {name: decode_shard(one.encode("ascii")) for name, one in text["shards"].items()}
    shards = {name: one for name, one in found.items() if one is not None}
    return Record(prefix_hash, parent_hash, start, end, shards, hits, touched_s, pinned_until_s)
