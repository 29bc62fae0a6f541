"""What can be made to go wrong with the answers of a server, and the sockets that do it.

``SpoilS3`` and ``SpoilRedis`` are the proxies: they read whole requests and whole answers, count
them by verb, and spoil those that a ``Spoil`` names. ``Far`` makes a server far away instead.
"""

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from tests.support.servers.listener import Listener

FAULTS = frozenset(
    ("reset", "unanswered", "stall", "lag", "truncate", "flip", "another", "error", "hook")
)
SMALL_BYTES = 1024
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Spoil:
    """One fault, and whom it meets."""

    fault: str
    """One of ``FAULTS``.

    ``reset``: the connection is reset, halfway through the answer if that has a body;
    ``unanswered``: the server does what is asked, and the connection is reset instead of the
    answer; ``stall``: nothing comes any more, halfway through a body; ``lag``: the answer comes
    ``lag_s`` later; ``truncate``: of an answer's body comes half, and as far as HTTP goes that is
    all there is, while Redis closes the connection; of a body that is put, half goes on before both
    connections end; ``flip``: one bit of the body, of the answer or of what is put, is another;
    ``another``: the bytes of another value of this server, as long as the right ones if there are
    such; ``error``: the answer is ``error`` and the server is not asked; ``hook``: nothing, but
    that ``hook`` is called first.
    """
    verbs: frozenset[str] = frozenset()
    """``GET``, ``LIST``, ``EVALSHA``; empty: all."""
    containing: bytes = b""
    """A part of the request's head, its target or its key for instance."""
    when: Callable[[bytes], bool] = lambda _: True
    """Told the request's head: its first line and headers, or a command's first words."""
    skip: int = 0
    """So many that match are spared first."""
    times: int | None = None
    """So many are spoiled; None: all until ``mend``."""
    lag_s: float = 0.05
    error: str = ""
    """``503 SlowDown`` where HTTP is spoken, ``LOADING wait`` of Redis."""
    hook: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        assert self.fault in FAULTS
        assert (self.fault == "error") == bool(self.error)


class Spoiler(Listener):
    """A proxy to ``target``; a context manager. Subclasses carry requests and answers."""

    def __init__(self, target: tuple[str, int], *, port: int = 0) -> None:
        self.target = target
        """May be replaced at any time: of connections that are made from then on."""
        self.asked: Counter[str] = Counter()
        """Requests so far, by verb, spoiled ones included."""
        self.spoiled: Counter[str] = Counter()
        """Of those, how many met each fault."""
        self.overlooked = b""
        """A part of the head of requests that are neither counted nor spoiled; empty: there are
        none. For what clients ask by the clock, whatever else they do."""
        self._rules: list[Spoil] = []
        self._matched: Counter[int] = Counter()
        self._rules_lock = threading.Lock()
        self._ended = threading.Event()
        self._mended = threading.Event()
        super().__init__(port)

    def spoil(self, *rules: Spoil) -> None:
        """From now on these faults, and no others: the first rule that a request matches."""
        self.mend()
        with self._rules_lock:
            self._mended = threading.Event()
            self._rules, self._matched = list(rules), Counter()

    def mend(self) -> None:
        """No faults from now on. Who was stalled is hung up on."""
        with self._rules_lock:
            self._rules = []
            self._mended.set()

    def close(self) -> None:
        """Also frees what stalls."""
        self._ended.set()
        self.mend()
        super().close()

    def _rule_for(self, verb: str, head: bytes) -> Spoil | None:
        if self.overlooked and self.overlooked in head:
            return None
        with self._rules_lock:
            self.asked[verb] += 1
            for number, rule in enumerate(self._rules):
                if rule.verbs and verb not in rule.verbs:
                    continue
                if rule.containing not in head or not rule.when(head):
                    continue
                self._matched[number] += 1
                at = self._matched[number] - rule.skip
                if at > 0 and (rule.times is None or at <= rule.times):
                    self.spoiled[rule.fault] += 1
                    return rule
        return None

    def _stall(self, client: socket.socket) -> None:
        """Until the rules change or the client has gone."""
        mended = self._mended
        while not (mended.wait(_POLL_S) or self._ended.is_set()) and is_open(client):
            pass

    def _lag(self, seconds: float) -> None:
        self._ended.wait(seconds)


class Upstream:
    """The server's end of a client's connection, connected when it is needed."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self.socket: socket.socket | None = None
        self._file: BinaryIO | None = None

    def send(self, parts: Iterable[bytes | memoryview]) -> BinaryIO:
        """Send them, and where the answer comes from. Raises ``OSError``."""
        if self.socket is None:
            self.socket = socket.create_connection(self._target)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._file = self.socket.makefile("rb")
        for part in parts:
            self.socket.sendall(part)
        assert self._file is not None
        return self._file

    def close(self) -> None:
        """Idempotent."""
        if self.socket is not None:
            with suppress(OSError):
                self.socket.close()
            if self._file is not None:
                self._file.close()
            self.socket = self._file = None


def reset(client: socket.socket) -> None:
    """Make the close that follows a reset instead of an orderly end."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def flipped(body: bytes) -> bytes:
    """The same but for one bit. Payloads begin with a header of some 4 KiB, and what follows it is
    what the model reads: that of a large body is in its last quarter. A small one is no payload."""
    at, bit = (len(body) - 1 - len(body) // 8, 4) if len(body) >= SMALL_BYTES else (0, 0x80)
    return body[:at] + bytes((body[at] ^ bit,)) + body[at + 1 :]


def is_open(client: socket.socket) -> bool:
    """Whether the client is still there."""
    try:
        return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1  # ESTABLISHED
    except (OSError, AttributeError):
        return False


def wait_for(reached: Callable[[], bool], *, bound_s: float = 30.0) -> bool:
    """Poll until ``reached()``, at most so long; whether it was."""
    end = time.monotonic() + bound_s
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S / 4)
    return True
