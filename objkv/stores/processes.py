"""A store whose large gets are made by processes.

Python decrypts TLS on one core per process, however many threads it has. A fetching process only
moves bytes from its own connections to memory that it shares with the agent that started it:
guards, verification and counters stay with the agent. See decision 40.

That memory is never the agent's arena: the agent copies what has arrived, and verifies the copy. So
a process that writes late changes nothing that is read.

It has a thread per channel, which carries one get at a time in datagrams of JSON: a request,
answers with the bytes that have arrived, and a last answer.
"""

import fcntl
import logging
import math
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import Event, Lock, Thread
from time import monotonic
from typing import Annotated, Final

from pydantic import Field, TypeAdapter

from objkv.errors import (
    StoreBusy,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    TransferError,
    ValueTooLong,
)
from objkv.net.deadline import EndsBy, ends_s
from objkv.stores.base import Arrived, PruneStore, ReadStore, check_key, copy_bytes, map_memory
from objkv.stores.guarded import GuardedStore
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)
CHANNEL_BYTES: Final = 256 << 20
"""Memory of a channel. The system provides it as it is written."""
GRACE_S = 2.0
"""How long a process may still answer after the deadline of a get, before it is killed."""
_RESTART_S = 30.0
"""How long none is started after one ended early or could not be started."""
_READY_S = 60.0
_LOOK_S = 0.5
_JOIN_S = 5.0
_END_S = 1.0
_BYTES_MIN: Final = 256 << 10
"""Smaller buffers are filled by the agent: two messages would cost more than they free."""
_SLACK_S: Final = 0.1
"""How long after the deadline a process may report why it failed."""
_FINAL_LENGTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
READY = b"ready"
"""Sent through the control socket once the store is open."""
MESSAGE_BYTES_MAX: Final = 64 << 10
_TEXT_CHARS_MAX = 4096
_ERRORS: Final = (StoreError, StoreUnavailable, StoreBusy, StoreDenied, ValueTooLong)
"""By number in an answer. A subclass that is not listed becomes its first listed base class."""


@dataclass(frozen=True, slots=True)
class GetRequest:
    """A ``get_into`` to the start of the channel's memory."""

    number: int
    nbytes: int
    start: int | None
    ends_s: float
    """Deadline by ``time.monotonic``, whose clock all processes of a machine share."""
    key: str


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to the request with this number."""

    number: int
    nbytes: int | None
    """How many leading bytes of the channel's memory are valid. None without a value."""
    is_last: bool = False
    error: Annotated[int, Field(ge=0, lt=len(_ERRORS))] | None = None
    text: str = ""


REQUESTS: Final = TypeAdapter(GetRequest)
ANSWERS: Final = TypeAdapter(Answer)


def run(arguments: Sequence[str], open_store: Callable[[], ReadStore]) -> None:
    """The fetching process: serve an agent until that ends. The caller then ends the process at
    once, because threads may hang in a get. ``arguments``: descriptors of the memory, of the
    control socket and of each channel's socket."""
    for one in (signal.SIGINT, signal.SIGTERM):  # an agent that drains still fetches
        signal.signal(one, signal.SIG_IGN)
    memory, control_fd, *channel_fds = map(int, arguments)
    size = os.fstat(memory).st_size
    view = memoryview(map_memory(memory, size))
    os.close(memory)
    control = socket.socket(fileno=control_fd)
    store = open_store()
    share = size // len(channel_fds)
    for number, fd in enumerate(channel_fds):
        part = view[number * share : (number + 1) * share]
        serve = partial(_serve, socket.socket(fileno=fd), part, store)
        Thread(target=serve, name=f"objkv-serve-{number}", daemon=True).start()
    with suppress(OSError):
        control.send(READY)
        control.recv(1)  # returns when the agent has closed its end, or ended


def _serve(channel: socket.socket, memory: memoryview, store: ReadStore) -> None:
    with suppress(OSError), channel:
        while message := channel.recv(MESSAGE_BYTES_MAX):
            last = _get(channel, REQUESTS.validate_json(message), memory, store)
            channel.send(ANSWERS.dump_json(last))


def _get(
    channel: socket.socket, request: GetRequest, memory: memoryview, store: ReadStore
) -> Answer:
    def arrived(nbytes: int) -> None:
        channel.send(ANSWERS.dump_json(Answer(request.number, nbytes)))

    room = memory[: request.nbytes]
    try:
        with EndsBy(request.ends_s):
            nbytes = store.get_into(request.key, room, arrived, request.start)
            return Answer(request.number, nbytes, is_last=True)
    except Exception as exc:  # the agent knows what becomes of it
        return failed(request.number, exc)


def failed(number: int, error: Exception) -> Answer:
    """Return the answer for an exception of a store."""
    kinds = [_ERRORS.index(kind) for kind in type(error).__mro__ if kind in _ERRORS]
    text = str(error) if kinds else f"{type(error).__name__}: {error}"
    text = text.encode(errors="replace").decode()[:_TEXT_CHARS_MAX]
    return Answer(number, None, is_last=True, error=kinds[0] if kinds else 0, text=text)


class ChannelLost(Exception):
    """The process has ended, or does not follow the protocol."""


class FetchChannel:
    """Belongs to the thread that took it from the pool. Raises ``ChannelLost``."""

    def __init__(self, process: "FetchProcess", sock: socket.socket, memory: memoryview) -> None:
        self.process = process
        self.memory = memory
        """Valid up to the last number of bytes that was reported."""
        self.is_answer_due = False
        """Whether a request has not had its last answer."""
        self.kill_s = 0.0
        """When the process is killed if an abandoned channel has no answer, by ``monotonic``."""
        self._sock = sock
        self._number = 0

    def ask(self, request: GetRequest) -> None:
        self._number, self.is_answer_due = request.number, True
        try:
            self._sock.settimeout(_END_S)
            self._sock.send(REQUESTS.dump_json(request))
        except OSError as exc:
            raise ChannelLost(str(exc)) from exc

    def read(self, by_s: float) -> Answer | None:
        """Return the next answer; None if there is none by ``by_s``, a time of ``monotonic``."""
        try:
            # Python takes 0 for "never wait", which the last look at a channel should do.
            self._sock.settimeout(max(0.0, by_s - monotonic()))
            message = self._sock.recv(MESSAGE_BYTES_MAX)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as exc:
            raise ChannelLost(str(exc)) from exc
        if not message:
            raise ChannelLost("the fetching process ended")
        try:
            answer = ANSWERS.validate_json(message)
        except ValueError as exc:
            raise ChannelLost(f"invalid answer of a fetching process: {exc}") from exc
        if answer.number != self._number:
            raise ChannelLost("a fetching process answered another request")
        self.is_answer_due = not answer.is_last
        return answer

    def has_answered(self, now_s: float) -> bool:
        """Whether an abandoned channel is free. Never waits. Raises, too, if the process is
        late."""
        while self.is_answer_due and self.read(0.0) is not None:
            pass
        if self.is_answer_due and now_s >= self.kill_s:
            raise ChannelLost("it hangs")
        return not self.is_answer_due

    def close(self) -> None:
        """Close the socket. The memory stays valid as long as it is referenced."""
        self._sock.close()


class FetchProcess:
    """A running process. Not thread-safe, except for its channels: each belongs to one thread."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], channels: int) -> None:
        """Start ``command`` with descriptors appended, and do not wait. Raises ``OSError``."""
        memory, view = _shared_memory(channels * CHANNEL_BYTES)
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            pairs += (
                socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                for _ in range(channels + 1)
            )
            theirs = [memory, *(there.fileno() for _, there in pairs)]
            self._process = subprocess.Popen(
                [*command, *map(str, theirs)],
                pass_fds=theirs,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C at a terminal is for the agent
            )
        except BaseException:
            for here, _ in pairs:
                here.close()
            raise
        finally:
            os.close(memory)
            for _, there in pairs:
                there.close()
        self.pid = self._process.pid
        self._control, *ours = [here for here, _ in pairs]
        self._control.setblocking(False)
        self.channels: tuple[FetchChannel, ...] = tuple(
            FetchChannel(self, sock, view[n * CHANNEL_BYTES : (n + 1) * CHANNEL_BYTES])
            for n, sock in enumerate(ours)
        )
        self.free = list(self.channels)
        """Guarded by the pool's lock."""
        self.born_s = monotonic()
        self.is_ready = False

    def is_alive(self) -> bool:
        """Whether the process is alive. Updates ``is_ready``. Never waits."""
        try:
            message = self._control.recv(len(READY))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.is_ready = message == READY
        return self.is_ready

    def end(self) -> None:
        """Kill it, and close its sockets, which wakes threads that wait for it. Waits a second at
        most; Python collects a later one when it starts the next."""
        with suppress(OSError):
            self._process.kill()
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        for channel in self.free:
            channel.close()
        self.free.clear()
        self.channels = ()  # channels refer to their process, and would keep its memory


def _shared_memory(nbytes: int) -> tuple[int, memoryview]:
    """Return the descriptor of new memory, and a view of it, which does not need the descriptor.
    Its length is final: reading what a process has cut off would kill the agent."""
    fd = os.memfd_create("objkv-fetch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FINAL_LENGTH)
        return fd, memoryview(map_memory(fd, nbytes))
    except BaseException:
        os.close(fd)
        raise


class FetchPool:
    """The fetching processes of an agent: started at the first get, restarted, and ended when idle.

    One thread watches them all. Thread-safe. Only ``close`` waits: without a free channel of a
    process that is ready, a get is made in the agent itself.
    """

    def __init__(
        self,
        start: Callable[[], FetchProcess],
        processes_max: int,
        recorder: Recorder,
        *,
        idle_s: float = 120.0,
    ) -> None:
        """``start`` raises ``OSError``. Processes end after ``idle_s`` without a get."""
        self._start, self._processes_max, self._recorder = start, processes_max, recorder
        self._idle_s = idle_s
        self._lock = Lock()
        self._processes: list[FetchProcess] = []
        self._abandoned: list[FetchChannel] = []
        self._lost: list[FetchProcess] = []
        self._used_s = self._next_start_s = -math.inf
        self._closed = False
        self._wake = Event()
        self._thread = Thread(target=self._watch, name="objkv-fetchers", daemon=True)
        self._thread.start()

    def acquire(self) -> FetchChannel | None:
        """Return a channel of the process with the fewest gets, if any. One that is late with an
        answer gets nothing new: it may hang."""
        with self._lock:
            if self._closed:
                return None
            self._used_s = now = monotonic()
            if len(self._processes) < self._processes_max:
                self._wake.set()
            late = [one.process for one in self._abandoned if now >= one.kill_s - GRACE_S]
            ready = [
                one for one in self._processes if one.is_ready and one.free and one not in late
            ]
            return max(ready, key=lambda one: len(one.free)).free.pop() if ready else None

    def release(self, channel: FetchChannel, by_s: float) -> None:
        """Give a channel back. If its last answer is due, it becomes free with that; if that does
        not come soon after ``by_s``, a time of ``monotonic``, the process is killed."""
        with self._lock:
            if channel.is_answer_due and channel.process in self._processes:
                channel.kill_s = by_s + GRACE_S
                self._abandoned.append(channel)
            else:
                self._free(channel)

    def give_up_process(self, channel: FetchChannel, reason: object) -> None:
        """Give up a process that has ended or does not follow the protocol, and kill it."""
        with self._lock:
            self._drop(channel.process, reason)

    def close(self) -> None:
        """End all processes. Gets that have no byte yet continue in the agent. Idempotent."""
        self._closed = True
        self._wake.set()
        self._thread.join(_JOIN_S)

    def _free(self, channel: FetchChannel) -> None:
        """Keep a channel for the next get. The lock must be held."""
        if channel.process in self._processes:
            channel.process.free.append(channel)
        else:
            channel.close()

    def _drop(self, process: FetchProcess, reason: object) -> None:
        """Use a process no longer. The lock must be held."""
        if process not in self._processes:
            return
        logger.warning("fetching process lost pid=%d reason=%s", process.pid, reason)
        self._recorder.count("fetch_process_losses")
        self._processes.remove(process)
        self._lost.append(process)
        self._wake.set()
        self._next_start_s = monotonic() + _RESTART_S

    def _watch(self) -> None:
        while not self._closed:
            try:
                self._kill_lost()
                while self._is_short() and monotonic() >= self._next_start_s:
                    process = self._start()
                    with self._lock:
                        self._processes.append(process)
                is_idle = not self._processes and not self._is_short()
                self._wake.wait(None if is_idle else _LOOK_S)
                self._wake.clear()
                self._drop_ended()
            except Exception as exc:  # no memory, descriptor or process, or no such program
                logger.warning("no fetching process, the agent fetches without it reason=%s", exc)
                self._next_start_s = monotonic() + _RESTART_S
        with self._lock:
            self._lost += self._processes
            self._processes.clear()
            while self._abandoned:
                self._abandoned.pop().close()
        self._kill_lost()

    def _is_short(self) -> bool:
        """Whether processes should be started: some are missing, and gets were made lately."""
        is_used = monotonic() < self._used_s + self._idle_s
        return is_used and len(self._processes) < self._processes_max and not self._closed

    def _drop_ended(self) -> None:
        """Drop what has ended or hangs, and all processes if they are idle."""
        now = monotonic()
        with self._lock:
            for channel in tuple(self._abandoned):
                try:
                    if not channel.has_answered(now):
                        continue
                except ChannelLost as exc:
                    self._drop(channel.process, exc)
                self._abandoned.remove(channel)
                self._free(channel)
            for one in tuple(self._processes):
                if not one.is_alive():
                    self._drop(one, "it ended")
                elif not one.is_ready and now >= one.born_s + _READY_S:
                    self._drop(one, "it did not start")
            if now < self._used_s + self._idle_s:
                return
            if any(len(one.free) < len(one.channels) for one in self._processes):
                self._used_s = now
            else:
                self._lost += self._processes
                self._processes.clear()

    def _kill_lost(self) -> None:
        """Kill the processes that were given up. Users of their channels close those."""
        with self._lock:
            lost, self._lost = self._lost, []
        for one in lost:
            one.end()


class ProcessStore(GuardedStore):
    """``inner``, whose large ``get_into`` are made by the processes of ``pool``. Closes both.

    ``inner`` makes a get that finds no process, or whose process ends before a byte has arrived.
    One whose process ends later fails: ``inner`` might continue with bytes of another value.
    """

    def __init__(
        self, inner: PruneStore, pool: FetchPool, *, deadline_s: float, recorder: Recorder
    ) -> None:
        super().__init__(inner)
        self._pool, self._deadline_s, self._recorder = pool, deadline_s, recorder
        self._numbers = count(1)

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        check_key(key)
        channel = self._pool.acquire() if _BYTES_MIN <= len(buffer) <= CHANNEL_BYTES else None
        if channel is None:
            return self.inner.get_into(key, buffer, arrived, start)
        self._recorder.count("fetch_process_gets")
        end_s = min(monotonic() + self._deadline_s, ends_s())
        request = GetRequest(next(self._numbers), len(buffer), start, end_s, key)
        at = 0  # so many bytes have arrived
        try:
            channel.ask(request)
            while (answer := channel.read(end_s + _SLACK_S)) is not None:
                if answer.error is not None:
                    raise _ERRORS[answer.error](answer.text)
                if (nbytes := answer.nbytes) is None:
                    return None
                if not at <= nbytes <= len(buffer):
                    raise ChannelLost(f"{nbytes} bytes after {at}, for {len(buffer)}")
                copy_bytes(buffer[at:nbytes], channel.memory[at:nbytes], nbytes - at)
                at = nbytes
                if answer.is_last:  # it was reported before
                    return nbytes
                if arrived is not None:
                    arrived(nbytes)
            raise StoreUnavailable(
                f"get_into {key}: the deadline passed after {at} of {len(buffer)} bytes, and the "
                "fetching process did not answer"
            )
        except ChannelLost as exc:
            self._pool.give_up_process(channel, exc)
            if at:  # no fault of the store, whose breaker does not count it
                raise TransferError(
                    f"get_into {key}: the fetching process ended after {at} bytes"
                ) from exc
        finally:
            self._pool.release(channel, end_s)
        with EndsBy(end_s):
            return self.inner.get_into(key, buffer, arrived, start)

    def close(self) -> None:
        self._pool.close()
        super().close()
