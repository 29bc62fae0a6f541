"""Counts round trips: how often a Redis client has sent something and then waits for answers."""

from collections import Counter
from threading import Lock
from typing import Any

import redis


class RoundTrips:
    """Round trips of the connections that are made with its ``connection_class``.

    The first answer that a connection reads after it has sent counts; however many commands were
    sent before it, and however many answers are read after it, they are the same trip.
    """

    def __init__(self) -> None:
        self.by_port: Counter[int] = Counter()
        lock, by_port = Lock(), self.by_port

        class Counting(redis.Connection):
            _has_sent = False

            def send_packed_command(self, *args: Any, **options: Any) -> Any:
                sent = super().send_packed_command(*args, **options)  # type: ignore[no-untyped-call]  # through super()
                self._has_sent = True
                return sent

            def read_response(self, *args: Any, **options: Any) -> Any:
                if self._has_sent:
                    self._has_sent = False
                    with lock:
                        by_port[int(self.port)] += 1
                return super().read_response(*args, **options)

        self.connection_class = Counting

    @property
    def count(self) -> int:
        return self.by_port.total()
