"""A replica's side of the agent's socket: leases of payloads in the arena, and lookups.

Everything that fails raises ``TransferError`` and leaves the connection unusable. No call waits
longer than its time-out. A connection that failed still holds its leases until ``close``: whatever
reads the arena must have finished by then, because the agent reuses the memory.
"""

import hashlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol, TypeVar

from objkv.agent.memory.answers import FIELDS_MAX, AnswerBoard, Scope
from objkv.agent.memory.arena import (
    ALL_FRAMES,
    Arena,
    Board,
    CellState,
    Progress,
)
from objkv.agent.messages import (
    DEADLINE_MS_MAX,
    MESSAGE_BYTES_MAX,
    VERSION,
    Claims,
    Commit,
    CommitStatus,
    Drop,
    Hello,
    MessageKind,
    Opened,
    Opening,
    ProtocolError,
    Urgency,
    find_max,
    kind_of,
    pack_commits,
    pack_drop,
    pack_find,
    pack_hello,
    pack_opening,
    pack_rejection,
    pack_release,
    read_block,
    unpack_committed,
    unpack_found,
    unpack_opened,
    unpack_text,
)
from objkv.agent.peers import connect_to
from objkv.background import Alarm, Question, Steps, wait_for
from objkv.codec.payload import Claim
from objkv.errors import StoreUnavailable, TransferError
from objkv.index.base import Shards
from objkv.keys.prefix import PREFIX_HASH_BYTES

T = TypeVar("T")
FoundBlock = tuple[Shards | None, ...]
"""The records of a block of chunks."""
CALL_S = 2.0
"""How long an answer may take. The agent answers within microseconds, unless it is stopped or the
machine is very busy."""
KNOWN_MAX = 256
"""Decoded blocks that a client remembers: about 3 MB."""


class AgentRefused(TransferError):
    """The agent does not serve this client, such as one of another version."""


class Connect(Protocol):
    """Connects to the agent: ``AgentLink.connect``."""

    def __call__(self, *, wants_arena: bool = False, outbox: int = -1) -> "AgentConnection":
        """Return a new connection. Raises ``ObjkvError``. For the arguments see
        ``AgentConnection``."""


class ArenaLease(NamedTuple):
    """A payload that the client may read, now or soon."""

    number: int
    """0 if there is no lease: the payload is a miss."""
    cell: int
    progress: Progress
    """The state when it was opened."""


def leases_of(opened: Opened, board: Board) -> list[ArenaLease]:
    """Return what was opened as objects, with the progress so far."""
    leases = []
    for state, reason, layout, lease, cell, offset, nbytes in zip(*opened, strict=True):
        frames = ALL_FRAMES if state == CellState.READY else 0
        progress = Progress(CellState(state), frames, offset, nbytes, reason, layout)
        if state == CellState.FILLING:
            progress = board.read(cell)
        leases.append(ArenaLease(lease, cell, progress))
    return leases


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
        call_s: float = CALL_S,
    ) -> None:
        """``outbox``: a memfd to send; the caller still owns it. ``replica``: its name, if its
        ranks join payloads. Raises ``TransferError`` if no agent serves ``path``, or it
        refuses."""
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
            hello = pack_hello(Hello(VERSION, wants_arena, outbox >= 0, name))
            socket.send_fds(sock, [hello], [outbox] if outbox >= 0 else [])
            message, descriptors, _, _ = socket.recv_fds(sock, MESSAGE_BYTES_MAX, 2)
            self._greeted(message, descriptors, wants_arena)
        except OSError as exc:
            sock.close()
            raise TransferError(f"no agent at {path}: {_reason(exc)}") from exc
        except TransferError:
            sock.close()
            raise

    def _greeted(self, message: bytes, descriptors: list[int], wants_arena: bool) -> None:
        try:
            if message and kind_of(message) is MessageKind.REFUSED:
                raise AgentRefused(f"the agent at {self._path} refused: {unpack_text(message)}")
            if not message or kind_of(message) is not MessageKind.WELCOME:
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
        """Whether the connection has failed, or the agent has ended it, as one that is replaced
        does. Costs a system call."""
        if not self._is_lost:
            poll = select.poll()
            poll.register(self._sock, select.POLLRDHUP)
            self._is_lost = bool(poll.poll(0))
        return self._is_lost

    def open(self, wanted: Claims, *, deadline_s: float, urgency: Urgency) -> Opened:
        """Open payloads for reading, in order: from 1 to ``OPEN_MAX``. Each lease must be
        released."""
        deadline_ms = int(min(max(1.0, 1000 * deadline_s), DEADLINE_MS_MAX))
        answer = self._call(pack_opening(Opening(urgency, deadline_ms, wanted)))
        return self._read(partial(unpack_opened, answer, len(wanted)))

    def release(self, leases: Sequence[int]) -> None:
        """End leases, at most ``RELEASE_MAX``. The memory may change from now on."""
        if leases:
            self._send(pack_release(leases))

    def reject(self, claim: Claim) -> None:
        """Report that a resident payload is not what its key promises a reader. Its record is
        forgotten, and this copy is not served any more."""
        self._send(pack_rejection(claim))

    def commit(self, commits: Sequence[Commit]) -> list[CommitStatus]:
        """Hand over payloads in the outbox, or parts of some, at most ``COMMITS_MAX``. Their memory
        may be reused when this returns."""
        answer = self._call(pack_commits(commits))
        return self._read(partial(unpack_committed, answer, len(commits)))

    def drop(self, drop: Drop) -> None:
        """Report that this rank will not hand over its part of a payload."""
        self._send(pack_drop(drop))

    def find(
        self, namespace: str, hashes: Sequence[bytes], fields: tuple[str, ...]
    ) -> Steps[list[Shards | None]]:
        """Look up chunks, see ``ReadIndex.find``: in the answers first, and in steps what they
        lack. Raises ``StoreUnavailable`` if the agent has no answer, also because its index has
        none."""
        if len(fields) > FIELDS_MAX:
            raise StoreUnavailable(f"a lookup of {len(fields)} fields, allowed are {FIELDS_MAX}")
        scope = Scope(namespace, fields)
        parts = scope.blocks(b"".join(hashes))
        now = time.time()
        blocks = [self._kept(scope.key(part), part, fields, now) for part in parts]
        unknown = [number for number, block in enumerate(blocks) if block is None]
        at_once = find_max(len(fields)) // scope.chunks
        for first in range(0, len(unknown), at_once):
            numbers = unknown[first : first + at_once]
            some = [parts[number] for number in numbers]
            answer = yield Question(self, pack_find(namespace, some, fields))
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
        block = self._read(partial(read_block, text, len(part) // PREFIX_HASH_BYTES, fields))
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[key] = found[0], block
        return block

    def _found(
        self, answer: bytes, parts: Sequence[bytes], fields: tuple[str, ...]
    ) -> list[FoundBlock]:
        """Read what the agent answers about some blocks of prefix hashes."""
        if self._read(partial(kind_of, answer)) is MessageKind.FAILED:
            raise StoreUnavailable(f"lookup by the agent: {unpack_text(answer)}")
        texts = self._read(partial(unpack_found, answer, len(parts)))
        return [
            self._read(partial(read_block, text, len(part) // PREFIX_HASH_BYTES, fields))
            for text, part in zip(texts, parts, strict=True)
        ]

    def call(self, message: bytes) -> Steps[bytes]:
        """Send a message of ``objkv.agent.calls`` and return the answer."""
        answer = yield Question(self, message)
        if self._read(partial(kind_of, answer)) not in (MessageKind.RESULT, MessageKind.FAILED):
            self._is_lost = True
            raise ProtocolError(f"{kind_of(answer).name} instead of a result")
        return answer

    def fileno(self) -> int:
        """See ``Line``."""
        return self._sock.fileno()

    def send(self, message: bytes) -> bool:
        """See ``Line``. Not for a connection that is used in another way, too."""
        if self._is_lost:
            raise TransferError(f"the connection to the agent at {self._path} is lost")
        try:
            self._sock.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise self._lost("no connection to", exc) from exc
        self._unanswered += 1
        return True

    def receive(self) -> bytes | None:
        """See ``Line``."""
        try:
            answer = self._sock.recv(MESSAGE_BYTES_MAX + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise self._lost("no answer from", exc) from exc
        if not answer:
            raise self._lost("no answer from", "it ended the connection")
        self._unanswered -= 1
        if self._leaves:
            self.leave()
        return answer

    def leave(self) -> None:
        """Close the connection once all questions are answered: one that the agent has ended."""
        self._leaves = True
        if not self._unanswered:
            self.close()

    def wait(self, seconds: float, also: Alarm | None = None) -> bool:
        """Wait for progress of a payload that is being filled, or for ``also``, for at most
        ``seconds``. Returns False if the agent has gone."""
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
            try:
                answer = self._sock.recv(MESSAGE_BYTES_MAX + 1)
            except OSError as exc:
                raise self._lost("no answer from", exc) from exc
        if not answer:
            raise self._lost("no answer from", "it ended the connection")
        return answer

    def _send(self, message: bytes) -> None:
        with self._lock:
            self._push(message)

    def _push(self, message: bytes) -> None:
        if self._is_lost:
            raise TransferError(f"the connection to the agent at {self._path} is lost")
        try:
            self._sock.send(message)
        except OSError as exc:
            raise self._lost("no connection to", exc) from exc

    def _lost(self, what: str, reason: OSError | str) -> TransferError:
        self._is_lost = True
        text = _reason(reason) if isinstance(reason, OSError) else reason
        return TransferError(f"{what} the agent at {self._path}: {text}")

    def _read(self, parse: Callable[[], T]) -> T:
        """Parse an answer. A connection that sends nonsense is lost."""
        try:
            return parse()
        except ProtocolError:
            self._is_lost = True
            raise


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
    """Return what to report: a time-out of the socket itself is an error like any other."""
    return "timed out" if isinstance(error, BlockingIOError) else error.strerror or error
