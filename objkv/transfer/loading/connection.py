"""The load thread's connection to the agent, and until when the lane reads what is leased on it.

A connection that failed holds its leases, and its arena is mapped, until it is closed: when nothing
reads that memory any more. If a device may do so for ever, it is kept until the process ends.
"""

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic, sleep
from typing import NamedTuple

from objkv.agent.client import AgentConnection, ArenaLeases
from objkv.errors import TransferError
from objkv.transfer.lanes import Mark
from objkv.transfer.layouts import PayloadLayout
from objkv.transfer.plan import Source
from objkv.transfer.registration import ArenaRegistration

logger = logging.getLogger(__name__)
LOOK_S = 3e-4
"""How often the device is polled while it reads leased memory."""
_SHARE = 2
"""Divisor: of a small arena, payloads that are open take at most this fraction."""
_KEPT: list[AgentConnection] = []
"""Connections whose memory a hung device may still read. They end with the process."""


class CopyUnknownError(TransferError):
    """The device failed, and nothing shows until when it reads the frames."""


class _Ended(NamedTuple):
    """Leases of payloads of which the lane gets nothing more."""

    mark: Mark | None
    """After all that it was given of them."""
    numbers: list[int]
    nbytes: int


class LoadConnection(ArenaLeases):
    """Belongs to the load thread, except for ``is_open``."""

    def __init__(
        self,
        connect: Callable[[], AgentConnection],
        on_device: ArenaRegistration | None,
        lost_s: float,
    ) -> None:
        """``lost_s``: how long copies of a lost connection are awaited. Else see ``Loader``."""
        super().__init__(connect, "loads from the agent", share=_SHARE)
        self._on_device, self._lost_s = on_device, lost_s
        self.layouts: dict[tuple[int, Source], PayloadLayout] = {}
        """By the agent's numbers, which are few, and mean something else after ``reach``."""
        self.ended: deque[_Ended] = deque()
        """What the lane may still be reading. What it was given nothing of comes first."""
        self.mark: Mark | None = None
        """The last one of the lane, after everything that it was given."""

    def _opened(self, agent: AgentConnection) -> None:
        """Prepare what reads the arena."""
        if self._on_device is not None:
            self._on_device.attach(agent.arena)
        self.layouts = {}

    def end(self, numbers: list[int], nbytes: int, mark: Mark | None) -> None:
        """Have payloads released once the lane has passed ``mark``. None: it had none of them."""
        # Other loads and the agent need the room of what nothing reads.
        put = self.ended.appendleft if mark is None else self.ended.append
        put(_Ended(mark, numbers, nbytes))

    def release_ended(self) -> None:
        """End the leases of what the lane has read. Raises ``TransferError``."""
        numbers, nbytes = list[int](), 0
        while self.ended and _is_past(self.ended[0].mark):
            one = self.ended.popleft()
            numbers += one.numbers
            nbytes += one.nbytes
        if numbers:
            self.release(numbers, nbytes)

    def retire(self, agent: AgentConnection | None, *, keep: bool) -> None:
        """End a connection that was given up, once the lane does not read its arena any more.
        ``keep``: leave it open for ever, because it is unknown when a device has read its memory.
        """
        self.ended.clear()
        self.leased = self._leased_bytes = 0
        keep = keep or not self._await_lane()
        self.mark = None
        if agent is None:
            return
        if keep:
            logger.error("copies of loads did not finish on the device, keeping their memory")
            _KEPT.append(agent)
            if self._on_device is not None:
                self._on_device.abandon()
        else:
            self._close(agent)

    def _close(self, agent: AgentConnection) -> None:
        """Close a connection whose arena nothing reads, once a device has unlocked it."""
        if self._on_device is None:
            super()._close(agent)
        else:
            self._on_device.detach(agent.close)

    def _await_lane(self) -> bool:
        """Wait until the last mark has passed. Returns False if nothing shows that it has."""
        end = monotonic() + self._lost_s
        try:
            while not _is_past(self.mark):
                if monotonic() >= end:
                    return False
                sleep(LOOK_S)
        except CopyUnknownError:
            return False
        return True


def _is_past(mark: Mark | None) -> bool:
    """Whether a device has read everything before ``mark``. Raises ``CopyUnknownError``."""
    try:
        return mark is None or mark.done()
    except Exception as exc:
        raise CopyUnknownError(f"the device failed: {exc}") from exc
