"""Puts the payloads that other nodes request, of those that this node holds back.

A thread reads the requests from the index, waiting there for the next. A payload in the arena
becomes due at once. One on the disk is read first, like for a replica of this node.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
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
        self._closed = Event()
        self._lock = Lock()
        self._waiting: deque[str] = deque()
        self._open: dict[Resident, int] = {}
        """Leases of payloads that are being read, with their bytes."""
        self._pool: Pool[None] = Pool("objkv-requested", 1, self._run)
        self._thread = Thread(target=self._listen, name="objkv-requests", daemon=True)
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
        return True

    def _take(self, text: bytes) -> None:
        try:
            paths = PutRequest.unpack(text).paths()
        except ValueError:  # the index may contain anything
            self._recorder.count("agent_requests_invalid")
            return
        unsaved = self._core.residents.unsaved
        held = [path for path in paths if path in unsaved]
        with self._lock:
            room = _WAITING_MAX - len(self._waiting)
            self._waiting.extend(held[: max(0, room)])
        self.wake()
        self._recorder.count("agent_requested_puts", len(held))
        self._let_go(paths)

    def _let_go(self, paths: Iterable[str]) -> None:
        """Report those that are not held back any more: evicted, or saved."""
        unsaved = self._core.residents.unsaved
        lost = [path for path in paths if path not in unsaved]
        if not lost:
            return
        self._recorder.count("agent_requested_lost", len(lost))
        try:
            self._index.let_go(lost, self._name)
        except StoreError as exc:
            self._trouble.failed(exc)

    def _run(self, job: None) -> None:
        """End the leases of payloads that were read, and open the next ones."""
        residents = self._core.residents
        while True:
            with self._lock:
                ended = [one for one in self._open if not residents.is_filling(one)]
                for one in ended:
                    del self._open[one]
                is_full = sum(self._open.values()) * _SHARE >= residents.total_bytes
                path = None if is_full or not self._waiting else self._waiting.popleft()
            failed = [one.key for one in ended if not residents.is_ready(one)]
            for one in ended:
                residents.release(one, self)
            self._let_go(failed)
            if path is None:
                return
            self._open_one(path)

    def _open_one(self, path: str) -> None:
        found = self._core.residents.unsaved.get(path)
        if found is None:
            self._let_go([path])
            return
        wanted = Wanted(*found)
        (lease,) = self._core.open(
            self, [wanted], deadline_s=_READ_S, urgency=Urgency.BETWEEN_STEPS
        )
        if isinstance(lease, MissReason):
            self._let_go([path])
            return
        with self._lock:
            keeps = lease not in self._open and not self._closed.is_set()
            if keeps:
                self._open[lease] = wanted.record.nbytes
        if not keeps:
            self._core.residents.release(lease)
