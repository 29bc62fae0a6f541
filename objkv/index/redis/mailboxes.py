"""Requests from one agent to another, in Redis: a stream for each agent that reads its own.

A stream exists only as long as its reader renews it, so a sender sees at once that an agent has
ended. It has a bounded length, and whatever is lost with it costs a recomputed prompt at most. Only
commands on one key are used, so clusters can run them.
"""

from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import Any, Final

import redis

from objkv.index.base import REQUESTS_MAX, REQUESTS_S

_TEXT: Final = b"text"
_RENEW_S: Final = REQUESTS_S / 3
_BATCH: Final = 64
_WAIT_S_MAX: Final = 1.0
"""A socket's time-out is at least two seconds."""


class Mailboxes:
    """Thread-safe, except that each holder's requests are for one thread. Raises redis-py's
    exceptions."""

    def __init__(
        self,
        client: redis.Redis | redis.RedisCluster,
        prefix: str,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``prefix``: of all keys. ``client`` remains the caller's."""
        self._client, self._prefix, self._clock = client, prefix, clock
        self._lock = Lock()
        self._read: dict[str, tuple[bytes, float]] = {}
        """By holder: the last entry that was read, and when the stream was renewed."""

    def send(self, holder: str, text: bytes) -> bool:
        """Add a request to the stream of ``holder``. False if it has none."""
        options = ("NOMKSTREAM", "MAXLEN", "~", REQUESTS_MAX)
        return self._run("XADD", holder, *options, "*", _TEXT, text) is not None

    def receive(self, holder: str, wait_s: float) -> list[bytes]:
        """Return the requests to ``holder`` since the last call, after ``wait_s`` if there is none.
        Makes its stream if it is missing."""
        wait_ms = max(1, int(1000 * min(wait_s, _WAIT_S_MAX)))
        last = self._renew(holder)
        options = ("COUNT", _BATCH, "BLOCK", wait_ms, "STREAMS")
        reply = self._run("XREAD", holder, last, before=options)
        entries = reply[0][1] if reply else []
        if entries:
            with self._lock:
                self._read[holder] = (entries[-1][0], self._read[holder][1])
        return [_text(fields) for _, fields in entries]

    def _renew(self, holder: str) -> bytes:
        """Have the stream live on, and return the last entry that was read."""
        now = self._clock()
        with self._lock:
            last, renewed_s = self._read.get(holder, (b"", 0.0))
        if last and now - renewed_s < _RENEW_S:
            return last
        if not last or not self._run("PEXPIRE", holder, 1000 * REQUESTS_S):
            # Entries are named by time, so none of a lost stream hides those of a new one.
            last = self._run("XADD", holder, "*", _TEXT, b"")
            self._run("PEXPIRE", holder, 1000 * REQUESTS_S)
        with self._lock:
            self._read[holder] = (last, now)
        return last

    def _run(
        self, command: str, holder: str, *args: str | bytes | int, before: tuple[Any, ...] = ()
    ) -> Any:
        key = self._prefix + holder
        run: Callable[..., Any] = self._client.execute_command
        where: dict[str, Any] = {}
        if isinstance(self._client, redis.RedisCluster):  # else it queries the place of the key
            where["target_nodes"] = self._client.get_node_from_key(key)
        return run(command, *before, key, *args, **where)


def _text(fields: Any) -> bytes:
    """Return the text of an entry: pairs of names and values, as a list or as a mapping."""
    if isinstance(fields, dict):
        return bytes(fields.get(_TEXT, b""))
    return bytes(fields[1]) if len(fields) == 2 else b""
