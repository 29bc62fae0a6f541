"""The fetching process: gets values from a store into memory that it shares with an agent.

It has a thread per lane. It verifies nothing and keeps nothing. It ends when its agent does,
because the agent's end of the control socket closes.

A lane carries one get at a time, each message in a datagram of JSON: a request, answers with the
bytes that have arrived, and a last answer.
"""

import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Thread
from typing import Annotated, Final

from pydantic import Field, TypeAdapter

from objkv.errors import StoreBusy, StoreDenied, StoreError, StoreUnavailable, ValueTooLong
from objkv.net.deadline import EndsBy, Trial
from objkv.stores.base import ReadStore, map_memory
from objkv.telemetry import MemoryRecorder, Recorder

READY = b"ready"
"""Sent through the control socket once the store is open."""
MESSAGE_BYTES_MAX: Final = 64 << 10
_TEXT_CHARS_MAX = 4096
_ERRORS: Final = (StoreError, StoreUnavailable, StoreBusy, StoreDenied, ValueTooLong)
"""By number in an answer. A subclass that is not listed becomes its first listed base class."""


@dataclass(frozen=True, slots=True)
class GetRequest:
    """A ``get_into`` to the start of the lane's memory."""

    number: int
    nbytes: int
    """Size of the buffer."""
    start: int | None
    ends_s: float
    """Deadline by ``time.monotonic``, whose clock all processes of a machine share."""
    is_trial: bool
    """See ``objkv.net.deadline.Trial``."""
    key: str


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to the request with this number."""

    number: int
    nbytes: int | None
    """How many leading bytes of the lane's memory are valid. None in a last answer: the key does
    not exist, or the get failed."""
    is_last: bool = False
    """Whether the get has ended, and the lane is free."""
    error: Annotated[int, Field(ge=0, lt=len(_ERRORS))] | None = None
    """Number of the error that ended the get."""
    text: str = ""
    counts: dict[str, float] = field(default_factory=dict)
    """By how much the store's counters rose."""

    def raise_error(self) -> None:
        """Raise the error that ended the get, if one did."""
        if self.error is not None:
            raise _ERRORS[self.error](self.text)


class _Counters(MemoryRecorder):
    """Keeps counters alone. The agent adds up what it is told, which would be wrong for others."""

    def observe(self, name: str, value: float) -> None:
        """Drop it."""

    def level(self, name: str, value: float) -> None:
        """Drop it."""


REQUESTS: Final = TypeAdapter(GetRequest)
ANSWERS: Final = TypeAdapter(Answer)


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
    recorder = _Counters()
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
    lane: socket.socket, memory: memoryview, store: ReadStore, recorder: MemoryRecorder
) -> None:
    """Answer the requests of one lane until the agent closes it."""
    with suppress(OSError), lane:
        while message := lane.recv(MESSAGE_BYTES_MAX):
            last = _get(lane, REQUESTS.validate_json(message), memory, store)
            lane.send(ANSWERS.dump_json(replace(last, is_last=True, counts=recorder.drain())))


def _get(lane: socket.socket, request: GetRequest, memory: memoryview, store: ReadStore) -> Answer:
    """Make one get. Returns its last answer."""

    def arrived(nbytes: int) -> None:
        lane.send(ANSWERS.dump_json(Answer(request.number, nbytes)))

    room = memory[: request.nbytes]
    try:
        with EndsBy(request.ends_s), Trial() if request.is_trial else nullcontext():
            return Answer(request.number, store.get_into(request.key, room, arrived, request.start))
    except Exception as exc:  # the agent knows what becomes of it
        return failed(request.number, exc)


def failed(number: int, error: Exception) -> Answer:
    """Return the answer for an exception of a store."""
    kinds = [_ERRORS.index(kind) for kind in type(error).__mro__ if kind in _ERRORS]
    text = str(error) if kinds else f"{type(error).__name__}: {error}"
    text = text.encode(errors="replace").decode()[:_TEXT_CHARS_MAX]
    return Answer(number, None, error=kinds[0] if kinds else 0, text=text)
