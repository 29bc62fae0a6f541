"""The fetching process: gets values from a store into memory that it shares with an agent.

It has a thread per lane. It verifies nothing and keeps nothing. It ends when its agent does,
because the agent's end of the control socket closes.
"""

import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from threading import Lock, Thread

from objkv.net.deadline import EndsBy, Trial
from objkv.stores.base import ReadStore, map_memory
from objkv.stores.processes.messages import (
    MESSAGE_BYTES_MAX,
    Answer,
    AnswerKind,
    GetRequest,
    failed,
)
from objkv.telemetry import Recorder

READY = b"ready"
"""Sent through the control socket once the store is open."""


class CountedSince:
    """A recorder of counters, which are sent with answers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def count(self, name: str, amount: float = 1) -> None:
        """Add ``amount``. Fractions are dropped."""
        with self._lock:
            self._counts[name] += int(amount)

    def observe(self, name: str, value: float) -> None:
        """Drop it."""

    def level(self, name: str, value: float) -> None:
        """Drop it."""

    def take(self) -> Counter[str]:
        """Return and clear all counters."""
        if not self._counts:
            return Counter()
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return counts


def run(arguments: Sequence[str], open_store: Callable[[Recorder], ReadStore]) -> None:
    """Serve an agent until it ends. The caller then ends the process at once, because threads may
    hang in a get.

    Args:
        arguments: of the command line, see ``FetchProcess``: descriptors of the memory, of the
            control socket and of each lane's socket.
        open_store: opens the store; its counters are sent to the agent.
    """
    for one in (signal.SIGINT, signal.SIGTERM):  # an agent that drains still fetches
        signal.signal(one, signal.SIG_IGN)
    memory, control_fd, *lane_fds = map(int, arguments)
    size = os.fstat(memory).st_size
    view = memoryview(map_memory(memory, size))
    os.close(memory)
    control = socket.socket(fileno=control_fd)
    recorder = CountedSince()
    store = open_store(recorder)
    share = size // len(lane_fds)
    for number, fd in enumerate(lane_fds):
        part = view[number * share : (number + 1) * share]
        serve = partial(_serve, socket.socket(fileno=fd), part, store, recorder)
        Thread(target=serve, name=f"objkv-lane-{number}", daemon=True).start()
    with suppress(OSError):
        control.send(READY)
        control.recv(1)  # returns when the agent has closed its end, or ended


def _serve(
    lane: socket.socket, memory: memoryview, store: ReadStore, recorder: CountedSince
) -> None:
    """Answer the requests of one lane until the agent closes it."""
    with suppress(OSError), lane:
        while message := lane.recv(MESSAGE_BYTES_MAX):
            request = GetRequest.unpack(message)
            last = _get(lane, request, memory, store)
            for name, amount in recorder.take().items():
                lane.send(Answer(AnswerKind.COUNTED, request.number, amount, name).pack())
            lane.send(last.pack())


def _get(lane: socket.socket, request: GetRequest, memory: memoryview, store: ReadStore) -> Answer:
    """Make one get. Returns its last answer."""

    def arrived(nbytes: int) -> None:
        lane.send(Answer(AnswerKind.ARRIVED, request.number, nbytes).pack())

    room = memory[: request.nbytes]
    try:
        with EndsBy(request.ends_s), Trial() if request.is_trial else nullcontext():
            nbytes = store.get_into(request.key, room, arrived, request.start)
    except Exception as exc:  # the agent knows what becomes of it
        return failed(request.number, exc)
    if nbytes is None:
        return Answer(AnswerKind.MISSING, request.number)
    return Answer(AnswerKind.DONE, request.number, nbytes)
