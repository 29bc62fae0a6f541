"""Puts the payloads that other nodes request, of those that this node holds back.

A thread reads the requests from the index, waiting there for the next. A payload in the arena
becomes due at once. One on the disk is read first, like for a replica of this node. From each that
cannot be put, this node's name is withdrawn: others wait for it no longer, and request it no more.
"""

import logging
from collections import deque
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Final

from objkv.agent.core import Core
from objkv.agent.fill import Wanted
from objkv.agent.queue import Urgency
from objkv.agent.residents import MissReason, Resident
from objkv.agent.unsaved.requests import PutRequest
from objkv.background import JOIN_S, Pool, join_all
from objkv.errors import StoreDenied, StoreError
from objkv.index.base import WriteIndex
from objkv.telemetry import Recorder, Trouble

logger = logging.getLogger(__name__)
_WAIT_S: Final = 1.0
"""How long a round trip waits for a request."""
_RETRY_S: Final = 1.0
"""Between attempts while the index fails."""
_READ_S: Final = 10.0
"""A payload that the disk has not returned after this time is not put."""
_WAITING_MAX: Final = 16_384
"""Requested payloads that may wait to be opened. Further ones are ignored."""
_SHARE: Final = 8
"""Divisor: payloads that are read from the disk for others take at most this fraction of the
arena."""


class RequestedPuts:
    """Runs until it is closed. Thread-safe."""

    def __init__(
        self,
        core: Core,
        index: WriteIndex,
        name: str,
        announce: Callable[[str], None],
        recorder: Recorder,
    ) -> None:
        """``name``: unlike that of any other agent. ``announce``: called with the name under which
        payloads may be sighted from now on, which is empty while requests cannot be read."""
        self._core, self._index, self._name, self._announce = core, index, name, announce
        self._recorder = recorder
        self._trouble = Trouble(logger, "requests of other nodes")
        self._answer_trouble = Trouble(logger, "answers to other nodes")
        self._closed = Event()
        self._lock = Lock()
        self._waiting: deque[str] = deque()
        self._under_way: set[str] = set()
        """Payloads that wait to be opened, or are being read."""
        self._not_put: dict[str, None] = {}
        """Payloads from which this node's name will be withdrawn."""
        self._open: dict[Resident, int] = {}
        """Leases of payloads that are being read, with their bytes."""
        self._pool: Pool[None] = Pool("objkv-requested", 1, self._run)
        self._thread = Thread(target=self._listen, name="objkv-requests", daemon=True)
        core.residents.unsaved.on_not_put = self._withdraw
        self._thread.start()

    def wake(self) -> None:
        """See ``Waiter``."""
        if not self._pool.waiting:  # a waiting job looks at everything
            self._pool.put((None,))

    def stop(self) -> None:
        """Read no request from now on. Does not wait."""
        self._closed.set()

    def close(self) -> None:
        """Stop, and end all leases. Idempotent."""
        self.stop()
        join_all([self._thread], _WAIT_S + JOIN_S)
        self._pool.close(JOIN_S)
        with self._lock:
            left, self._open = list(self._open), {}
        for one in left:
            self._core.residents.release(one, self)
        self._core.forget_client(self)

    def __repr__(self) -> str:
        return f"<RequestedPuts {len(self._waiting)} waiting, {len(self._open)} being read>"

    def _listen(self) -> None:
        try:
            while not self._closed.is_set():
                if not self._read():
                    return
        except Exception:
            logger.exception("requests of other nodes are not read any more")
        finally:  # no payload may be sighted under a name that nothing answers to
            self._announce("")

    def _read(self) -> bool:
        """Read requests once, and act on them. Returns whether to go on."""
        try:
            texts = self._index.requests(self._name, wait_s=_WAIT_S)
        except StoreDenied as exc:
            logger.error("requests of other nodes cannot be read reason=%s", exc)
            return False
        except StoreError as exc:
            self._announce("")
            self._trouble.failed(exc)
            self._closed.wait(_RETRY_S)
            return True
        if texts is None:  # this index carries none
            return False
        self._trouble.worked()
        self._announce(self._name)
        for text in texts:
            self._take(text)
        if self._not_put:  # the index has failed meanwhile
            self.wake()
        return True

    def _take(self, text: bytes) -> None:
        try:
            paths = PutRequest.unpack(text).paths()
        except ValueError:  # the index may contain anything
            self._recorder.count("agent_requests_invalid")
            return
        unsaved = self._core.residents.unsaved
        held = [path for path in paths if unsaved.requested(path)]
        self._recorder.count("agent_requested_puts", len(held))
        with self._lock:
            room = max(0, _WAITING_MAX - len(self._waiting))
            self._waiting.extend(held[:room])
            self._under_way.update(held[:room])
        self.wake()
        for path in {*paths}.difference(held[:room]):  # evicted or saved, or too many
            self._withdraw(path)

    def _withdraw(self, path: str) -> None:
        """Have this node's name withdrawn from a payload, unless a read of it is still under way.
        Never waits."""
        with self._lock:
            if self._closed.is_set() or len(self._not_put) >= _WAITING_MAX:
                return
            if path in self._under_way and path in self._core.residents.unsaved:
                return
            self._not_put[path] = None
        self.wake()

    def _run(self, job: None) -> None:
        """Open payloads, and withdraw this node's name from those that are not put."""
        while (path := self._next()) is not None:
            self._open_one(path)
        with self._lock:
            lost, self._not_put = self._not_put, {}
        if not lost:
            return
        try:
            self._index.let_go([*lost], self._name)
        except StoreError as exc:
            self._answer_trouble.failed(exc)
            with self._lock:
                self._not_put = lost | self._not_put
        else:
            self._answer_trouble.worked()
            self._recorder.count("agent_requested_lost", len(lost))

    def _next(self) -> str | None:
        """End the leases of payloads that were read, and return the next one to open."""
        residents = self._core.residents
        with self._lock:
            ended = [one for one in self._open if not residents.is_filling(one)]
            for one in ended:
                del self._open[one]
            is_full = sum(self._open.values()) * _SHARE >= residents.total_bytes
            path = None if is_full or not self._waiting else self._waiting.popleft()
        for one in ended:
            is_read = residents.is_ready(one)
            residents.release(one, self)
            self._end(one.key, is_read=is_read)
        return path

    def _end(self, path: str, *, is_read: bool) -> None:
        """A read has ended. Its payload is saved, or about to be, or not put."""
        unsaved = self._core.residents.unsaved
        with self._lock:
            self._under_way.discard(path)
        is_put = is_read and (unsaved.seen_again(path) or path not in unsaved)
        if not is_put:
            self._withdraw(path)

    def _open_one(self, path: str) -> None:
        found = self._core.residents.unsaved.get(path)
        if found is None:
            self._end(path, is_read=False)
            return
        wanted = Wanted(*found)
        (lease,) = self._core.open(
            self, [wanted], deadline_s=_READ_S, urgency=Urgency.BETWEEN_STEPS
        )
        if isinstance(lease, MissReason):
            self._end(path, is_read=False)
            return
        with self._lock:
            keeps = lease not in self._open and not self._closed.is_set()
            if keeps:
                self._open[lease] = wanted.record.nbytes
        if not keeps:
            self._core.residents.release(lease)
