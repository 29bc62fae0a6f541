"""How much is stored, in Redis: running totals in one hash that all processes of a fleet add to.

A process adds up what its own saves change, and tells the server every few seconds, together with
a command that it sends anyway: no save waits for it, and a thousand replicas write the one key some
hundred times a second. What a killed process had not told is lost until the totals are counted
again.
"""

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from threading import Lock

from objkv.index.base import Usage
from objkv.index.shapes import SHAPES_HASH

Command = tuple[str | bytes | int, ...]
_TELL_S = 5.0
"""Kept back for so long at most, as long as something is saved at all."""
_TOTAL = re.compile(rb"([^:]+):(nbytes|payloads|counted)")
_NUMBER = re.compile(rb"-?[0-9]{1,18}")


class Totals:
    """What this process changed and has not told yet. Thread-safe."""

    def __init__(self, key: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._lock = Lock()
        self._pending: defaultdict[str, int] = defaultdict(int)
        self._due_s = clock() + _TELL_S
        self._process = os.getpid()

    def add(self, namespace: str, prefix_hash: bytes, nbytes: int, payloads: int) -> None:
        """Count what was published (or, below zero, removed)."""
        if prefix_hash == SHAPES_HASH:
            return
        with self._lock:
            self._pending[f"{namespace}:nbytes"] += nbytes
            self._pending[f"{namespace}:payloads"] += payloads

    def take(self, *, early: bool = False) -> dict[str, int]:
        """What is to be told now, by field; empty unless it is time, or ``early``."""
        now = self._clock()
        with self._lock:
            self._leave_to_parent()
            if not early and now < self._due_s:
                return {}
            taken = {field: change for field, change in self._pending.items() if change}
            self._pending.clear()
            self._due_s = now + _TELL_S
        return taken

    def take_of(self, namespace: str) -> dict[str, int]:
        """What there is to be told of ``namespace``, by field: for who tells it otherwise."""
        fields = f"{namespace}:nbytes", f"{namespace}:payloads"
        with self._lock:
            self._leave_to_parent()
            return {field: self._pending.pop(field, 0) for field in fields}

    def commands(self, taken: Mapping[str, int]) -> list[Command]:
        """What tells it."""
        return [("HINCRBY", self.key, field, change) for field, change in taken.items()]

    def put_back(self, taken: Mapping[str, int]) -> None:
        """What could not be told, for the next time. Some of it may have arrived after all: the
        totals then say more than there is, never less."""
        with self._lock:
            for field, change in taken.items():
                self._pending[field] += change

    def _leave_to_parent(self) -> None:
        if self._process != os.getpid():  # a fork's: the parent tells these
            self._process = os.getpid()
            self._pending.clear()


def read_totals(reply: Mapping[bytes, bytes]) -> list[Usage]:
    """What ``HGETALL`` of the totals answered; what no objkv wrote is left out."""
    numbers: dict[str, dict[bytes, int]] = defaultdict(dict)
    for field, value in reply.items():
        match = _TOTAL.fullmatch(field)
        if match and _NUMBER.fullmatch(value):
            numbers[match[1].decode("utf-8", "replace")][match[2]] = int(value)
    found = []
    for namespace, of in sorted(numbers.items()):
        nbytes, payloads = max(0, of.get(b"nbytes", 0)), max(0, of.get(b"payloads", 0))
        if nbytes or payloads:
            found.append(Usage(namespace, nbytes, payloads, of.get(b"counted", 0)))
    return found


def replaced(key: str, usage: Usage) -> Command:
    """The command that replaces a namespace's totals; it forgets one that holds nothing."""
    name = usage.namespace
    if not usage.payloads:
        return ("HDEL", key, f"{name}:nbytes", f"{name}:payloads", f"{name}:counted")
    numbers = (f"{name}:nbytes", usage.nbytes, f"{name}:payloads", usage.payloads)
    return ("HSET", key, *numbers, f"{name}:counted", usage.counted_s)
