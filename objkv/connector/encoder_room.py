"""Memory for stored outputs: who has some, who waits for some, and who would wait in vain.

vLLM asks for all of its waiting requests in one step, and gives memory back request by request.
So an output for which there is no room yet waits, until its deadline. None of this is safe by
itself: one lock is held around every call.
"""

from dataclasses import dataclass, field

from objkv.connector.encoder_metadata import Output, Pages
from objkv.connector.encoder_read import State
from objkv.index.base import Shards


@dataclass(slots=True, eq=False)
class Entry:
    """An output that is wanted."""

    output: Output
    deadline: float
    owners: set[str] = field(default_factory=set)
    """Requests that want it; without any it is dropped."""
    state: State = State.WAITING
    pages: Pages | None = None
    shards: Shards | None = None
    """What the index knows, once that has said that it is stored."""
    nbytes: int = 0
    """Memory that it asked for."""
    wanted: bool = True
    busy: bool = False
    """Whether a thread writes into its memory."""


class Room:
    """At most so many bytes, first come, first served among those that fit."""

    def __init__(self, nbytes_max: int) -> None:
        self._nbytes_max = nbytes_max
        self._taken: dict[Entry, None] = {}
        self._parked: dict[Entry, None] = {}
        self.held_bytes = 0

    @property
    def parked(self) -> int:
        """How many wait for memory."""
        return len(self._parked)

    def ask(self, entry: Entry, nbytes: int) -> None:
        """Queue for memory; ``share_out`` says when there is some."""
        entry.nbytes = nbytes
        self._parked[entry] = None

    def free(self, entry: Entry) -> None:
        """It needs no memory, or none any more. Idempotent."""
        self._parked.pop(entry, None)
        if entry in self._taken:
            del self._taken[entry]
            self.held_bytes -= entry.nbytes

    def share_out(self) -> tuple[list[Entry], list[Entry]]:
        """Those who have memory from now on, and those who are to give up. To be asked whenever
        one asks, frees, settles, or loses an owner."""
        granted: list[Entry] = []
        refused: list[Entry] = []
        for entry in self._parked:
            if entry.nbytes > self._nbytes_max:
                refused.append(entry)
            elif self.held_bytes + entry.nbytes <= self._nbytes_max:
                self.held_bytes += entry.nbytes
                self._taken[entry] = None
                granted.append(entry)
        self._unpark(granted)
        self._unpark(refused)
        if self._parked and not granted:
            refused += self._unpark(self._in_vain())
        return granted, refused

    def _in_vain(self) -> list[Entry]:
        """Those of one request, if all memory is of requests that wait for more themselves: it goes
        on without them, and what it holds comes back."""
        waiting = set[str]().union(*(entry.owners for entry in self._parked))
        first = next(iter(self._taken))
        for entry in self._taken:
            if entry.state is not State.HELD or not entry.owners <= waiting:
                return []
        owner = min(first.owners)
        return [entry for entry in self._parked if owner in entry.owners]

    def _unpark(self, entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            del self._parked[entry]
        return entries
