"""The load thread's connection to the agent, and until when the lane reads what is leased on it.

A connection that failed still holds its leases until it is closed, and its arena is mapped. It is
closed when nothing reads that memory any more. If a device may do so for ever, it is kept until the
process ends.
"""

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic, sleep
from typing import NamedTuple

from objkv.agent.client import AgentConnection, ArenaLease, leases_of
from objkv.agent.memory.arena import BOARD_BYTES
from objkv.agent.messages import Claims, MissReason, Urgency
from objkv.background import Alarm, wait_for
from objkv.errors import ObjkvError, TransferError
from objkv.telemetry import Trouble
from objkv.transfer.lanes import Mark
from objkv.transfer.layouts import PlacedLayout
from objkv.transfer.plan import Source
from objkv.transfer.registration import DeviceFrames

logger = logging.getLogger(__name__)
LOOK_S = 3e-4
"""How often the device is polled while it reads leased memory."""
_RETRY_S, RETRY_MAX_S = 0.1, 5.0
"""Pauses between attempts to reach an agent."""
WINDOW, _WINDOW_BYTES = 64, 512 << 20
"""Payloads open at once, so that one long prompt does not lease the whole arena."""
_WINDOW_SHARE = 2
"""Divisor: of a small arena, they take at most this fraction."""
_IN_STEP_SHARE = 4
"""Divisor: loads within a step may open so much more. Otherwise slow loads between steps could take
all room, and the forward pass waited for them, for what is in the arena already."""
_BATCH_BYTES = 128 << 20
"""Payloads opened at once. Their pages are copied before the thread looks for more urgent loads.
Counts those of other ranks too: if a rank of TP 8 opened as many of its own, loads of all ranks
took 1.25 times as long, although 5 % less processor time (2 cores, 2026-11)."""
_KEPT: list[AgentConnection] = []
"""Connections whose memory a hung device may still read. They end with the process."""


class CopyUnknownError(TransferError):
    """The device failed, and nothing shows until when it reads the frames."""


class _Ended(NamedTuple):
    """Leases of payloads of which the lane gets nothing more."""

    mark: Mark | None
    """After all that it was given of them. None: nothing."""
    numbers: list[int]
    nbytes: int


class LoadConnection:
    """Belongs to the load thread, except for ``is_open``."""

    def __init__(
        self,
        connect: Callable[[], AgentConnection],
        on_device: DeviceFrames | None,
        lost_s: float,
    ) -> None:
        """``lost_s``: how long the copies of a lost connection are awaited. For the rest see
        ``Loader``."""
        self._connect, self._on_device, self._lost_s = connect, on_device, lost_s
        self.agent: AgentConnection | None = None
        """The present connection, None without one."""
        self.is_moving = False
        """Whether the agent opens no more, because it is replaced."""
        self.layouts: dict[tuple[int, Source], PlacedLayout] = {}
        """By the agent's numbers, which are few, and mean something else after ``reach``."""
        self.leased, self._leased_bytes, self._share_bytes = 0, 0, 0
        self._ended: deque[_Ended] = deque()
        """In the order of their marks."""
        self.mark: Mark | None = None
        """The last one of the lane, after everything that it was given."""
        self.trouble = Trouble(logger, "loads from the agent")
        self._retry_at, self._retry_s = 0.0, _RETRY_S

    @property
    def is_open(self) -> bool:
        """Whether loads may begin: there is an agent, and it is not known to be lost."""
        agent = self.agent
        return agent is not None and agent.is_open

    @property
    def present(self) -> AgentConnection:
        """The present connection, where there is one."""
        assert self.agent is not None
        return self.agent

    @property
    def is_copying(self) -> bool:
        """Whether the lane may still read payloads that ``end`` was called for."""
        return bool(self._ended)

    def reach(self) -> AgentConnection | None:
        """Return a new connection, which replaces the present one; None if there is none now."""
        if monotonic() < self._retry_at:
            return None
        self._retry_at = monotonic() + self._retry_s  # whatever fails now
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        try:
            before, self.agent = self.agent, self._connect()
        except ObjkvError as exc:
            self.trouble.failed(exc)
            return None
        if before is not None:
            self._leave(before)
        arena = self.agent.arena
        if self._on_device is not None:
            self._on_device.attach(arena)
        self.layouts = {}
        self._share_bytes = (arena.nbytes - BOARD_BYTES) // _WINDOW_SHARE
        self.trouble.worked()
        self._retry_at, self._retry_s, self.is_moving = 0.0, _RETRY_S, False
        return self.agent

    def await_retry(self, alarm: Alarm) -> None:
        """Wait until an agent may be reached again, or for ``alarm``."""
        wait_for([alarm], self._retry_at - monotonic())

    def room(self, *, in_step: bool) -> tuple[int, int]:
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
        """Open payloads of about ``nbytes``, each until ``end``. None if the agent is replaced."""
        opened = self.present.open(claims, deadline_s=deadline_s, urgency=urgency)
        if opened.reasons[0] == MissReason.CLOSED:
            self.is_moving = True
            return None
        self.leased += len(claims)
        self._leased_bytes += nbytes
        return leases_of(opened, self.present.arena.board)

    def end(self, leases: list[ArenaLease], nbytes: int, *, is_given: bool) -> None:
        """Release payloads, in ``release``. ``is_given``: once the lane has read what it was given
        so far."""
        numbers = [lease.number for lease in leases]
        if is_given:
            self._ended.append(_Ended(self.mark, numbers, nbytes))
        else:
            self._ended.appendleft(_Ended(None, numbers, nbytes))

    def release(self) -> None:
        """End the leases of what the lane has read. Raises ``TransferError``."""
        ended: list[int] = []
        while self._ended and _is_past(self._ended[0].mark):
            _, numbers, nbytes = self._ended.popleft()
            self.leased -= len(numbers)
            self._leased_bytes -= nbytes
            ended += filter(None, numbers)
        self.present.release(ended)

    def lose(self, agent: AgentConnection | None, *, keep: bool) -> None:
        """End a connection that was given up, once the lane does not read its arena any more.
        ``keep``: leave it open for ever, because it is unknown when a device has read its memory.
        """
        self._ended.clear()
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
            self._leave(agent)

    def _leave(self, agent: AgentConnection) -> None:
        """Close a connection whose arena nothing reads, once a device has unlocked it."""
        if self._on_device is None:
            agent.close()
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
