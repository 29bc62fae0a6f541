"""A store in Redis or Valkey for small payloads. Every value has a time to live.

The server may evict values earlier; readers see both cases as a miss. The client handles
connections, TLS, retries, time-outs and topology for one server, Sentinel or Cluster.
``RedisValues`` moves payloads between the client's sockets and the caller's buffer.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import redis
from redis import exceptions

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.net.resp import CLIENT_ERRORS, RespConnection, RespConnections, packed
from objkv.net.transport import WrongTransport
from objkv.stores.base import (
    Arrived,
    Buffer,
    Entry,
    Unfinished,
    check_fits,
    check_key,
    check_prefix,
    copy_into,
    folders_of,
    is_key,
)

UNDONE: Final = -1
"""Nothing was read or written, and the caller must repeat the call through the client. The client
handles refusals, lost connections and cluster changes."""
_GET = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n"
_WRITTEN = b"+OK"
_NOTHING = b"$-1"


class RedisValues:
    """Reads and writes values on connections of ``client`` without copying. The caller still owns
    the client.

    The client assembles a value from blocks of 64 KiB and copies it twice more, and copies what it
    sends. This class receives straight into the target buffer and sends straight from the source
    buffer. Raises redis-py's exceptions, and those of ``arrived``.
    """

    def __init__(self, client: Any) -> None:
        self._connections = RespConnections(client)

    def get_into(
        self, name: str, buffer: memoryview, arrived: Arrived | None, start: int | None = None
    ) -> int | None:
        """Return the number of bytes read, None if the key does not exist, or ``UNDONE``.

        Without ``start`` the result is the value's length. If that exceeds the buffer, no byte of
        the value is received.
        """
        # GETRANGE cannot request an empty range.
        is_possible = start is None or len(buffer) > 0
        one = self._connections.take(name) if is_possible else None
        if one is None:
            return UNDONE
        try:
            key, is_missing = name.encode(), False
            head_bytes = len(b"$%d\r\n" % len(buffer))
            if start is None:
                head = self._asked(one, head_bytes, _GET % (len(key), key))
                one.clean = head == _NOTHING or head[:1] == b"-"
                if head == _NOTHING:
                    return None
            else:
                end = start + len(buffer) - 1
                command = packed(b"EXISTS", key) + packed(b"GETRANGE", key, start, end)
                exists = self._asked(one, len(b":1\r\n") + head_bytes, command)
                head = self._asked(one, head_bytes) if exists in (b":0", b":1") else b""
                is_missing = exists == b":0"
            if head[:1] != b"$":
                return UNDONE  # the connection is not clean, so it is closed: more data may follow
            nbytes = _received(one, head, buffer, None if is_missing else arrived)
            return None if is_missing else nbytes
        finally:
            self._connections.give(one)

    def put(self, name: str, value: Buffer, *options: bytes | int) -> bool | None:
        """SET with ``options``. Return whether it wrote, or None for ``UNDONE``."""
        one = self._connections.take(name)
        if one is None:
            return None
        try:
            # Build one command, then split it at the value's position, so that the value is not
            # copied.
            command = packed(b"SET", name.encode(), b"", *options)
            before, after = command.split(b"$0\r\n\r\n", 1)
            before += b"$%d\r\n" % len(value)
            with memoryview(value) as view:
                parts = (before, view, b"\r\n" + after)
                answer = self._asked(one, len(b"+OK\r\n"), *parts)
            one.clean = answer[:1] in (b"+", b"-") or answer == _NOTHING
            return answer == _WRITTEN if answer in (_WRITTEN, _NOTHING) else None
        finally:
            self._connections.give(one)

    def close(self) -> None:
        """Return the connections to the client. Idempotent."""
        self._connections.close()

    def _asked(self, one: RespConnection, nbytes: int, *parts: bytes | memoryview) -> bytes:
        """Return the first line of the reply, requesting ``nbytes`` from the socket first. Empty if
        the connection was lost before it: the caller then falls back to the client."""
        try:
            if parts:
                one.send(*parts)
            return one.read_line(nbytes)
        except (exceptions.ConnectionError, exceptions.InvalidResponse):
            return b""
        except exceptions.TimeoutError:
            if self._connections.is_cluster:
                return b""
            raise


def _received(one: RespConnection, head: bytes, buffer: memoryview, arrived: Arrived | None) -> int:
    """Receive the value that ``head`` announces, unless it is too long. A connection loss from here
    on is an error: a retry may read a different value, and ``arrived`` has already reported this
    one."""
    if not head[1:].isdigit():
        raise exceptions.InvalidResponse(f"unexpected Redis reply {head[:20]!r} instead of a value")
    nbytes = int(head[1:])
    if nbytes <= len(buffer):
        one.read_bulk(head, buffer[:nbytes], arrived)
        one.clean = True
    return nbytes


SCAN_BATCH = 500
_GLOB = re.compile(r"([\\*?\[\]])")
_DENIED = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
    exceptions.NoPermissionError,
)
_DENIED_WORDS = ("NOAUTH", "NOPERM", "WRONGPASS", "DENIED")
_LATER = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.ClusterError,
    exceptions.RedisClusterException,
    exceptions.AskError,
    exceptions.TryAgainError,
)
_LATER_WORDS = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "BUSY", "TRYAGAIN", "OOM",
                "NOREPLICAS", "MISCONF", "UNKILLABLE")  # fmt: skip


class RedisStore:
    """Values under ``<prefix><key>``, each kept for ``ttl_s`` after its last put.

    ``client`` is open, returns bytes (no ``decode_responses``) and has time-outs, which are this
    store's deadline. Closing the store closes the client.
    """

    def __init__(
        self,
        client: "redis.Redis | redis.RedisCluster",
        *,
        prefix: str,
        ttl_s: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        assert ttl_s > 0
        self.client: Any = client  # its return types are unions with the asynchronous ones
        self._values = RedisValues(client)
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._clock = clock

    def __repr__(self) -> str:
        return f"<RedisStore {self._prefix}* for {self._ttl_s} s>"

    def get(self, key: str) -> bytes | None:
        """Return the whole value, or None."""
        name = self._name(key)
        with _translated("get", key):
            value: bytes | None = self.client.get(name)
            return value

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Return bytes ``[start, end)`` of the value, or None; one round trip."""
        name = self._name(key)
        with _translated("get_range", key):
            batch = self.client.pipeline(transaction=False)
            batch.exists(name)
            if start < end:  # Redis ranges include their end, and -1 means the last byte
                batch.getrange(name, start, end - 1)
            exists, *values = batch.execute()
            return b"".join(values) if exists else None

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """GET, or EXISTS and GETRANGE in one round trip, received straight into ``buffer``."""
        name = self._name(key)
        try:  # not _translated: its generator takes 2 us, a twentieth of a call
            nbytes = self._values.get_into(name, buffer, arrived, start)
        except CLIENT_ERRORS as exc:
            raise _translation(f"get_into {key}: {exc}", exc) from exc
        if nbytes == UNDONE:
            value = (
                self.get(key) if start is None else self.get_range(key, start, start + len(buffer))
            )
            return None if value is None else copy_into(key, value, buffer, arrived)
        if nbytes is not None:
            check_fits(key, nbytes, buffer)
        return nbytes

    def head(self, key: str) -> Entry | None:
        """Return size and age, or None. The age follows from the remaining time of ``ttl_s``."""
        name = self._name(key)
        with _translated("head", key):
            return self._entries([name])[0]

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Yield entries in no order, from all primaries of a cluster. Some may be repeated."""
        check_prefix(prefix)
        pattern = _GLOB.sub(r"\\\1", self._prefix + prefix) + "*"
        with _translated("scan", prefix):  # queries a cluster's topology
            names = self.client.scan_iter(match=pattern, count=SCAN_BATCH)
        while True:
            with _translated("scan", prefix):
                found = [name.decode() for name in islice(names, SCAN_BATCH)]
                entries = self._entries(found)
            if not found:
                return
            yield from (entry for entry in entries if entry is not None and is_key(entry.key))

    def folders(self, folder: str) -> list[str]:
        """Return the folder names; reads every key."""
        keys = (entry.key for entry in self.scan(f"{folder}/" if folder else ""))
        return folders_of(keys, folder)

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """SET NX EX. Return True if this call wrote the value."""
        name = self._name(key)
        with _translated("put_if_absent", key):
            written = self._values.put(name, value, b"EX", self._ttl_s, b"NX")
            if written is None:
                written = bool(self.client.set(name, _plain(value), nx=True, ex=self._ttl_s))
            return written

    def put(self, key: str, value: Buffer) -> None:
        """SET EX, replacing an existing value."""
        name = self._name(key)
        with _translated("put", key):
            if not self._values.put(name, value, b"EX", self._ttl_s):
                self.client.set(name, _plain(value), ex=self._ttl_s)

    def delete(self, key: str) -> bool:
        """UNLINK. Return True if the value existed."""
        name = self._name(key)
        with _translated("delete", key):
            return bool(self.client.unlink(name))

    def unfinished(self) -> Iterator[Unfinished]:
        """Yield nothing: this store has no leftovers."""
        return iter(())

    def discard(self, unfinished: Unfinished) -> bool:
        """Return False: this store has no leftovers."""
        return False

    def check(self) -> None:
        """PING."""
        with _translated("check", self._prefix):
            self.client.ping()

    def close(self) -> None:
        """Close the client and its connections."""
        with _translated("close", self._prefix):
            self._values.close()
            self.client.close()

    def _name(self, key: str) -> str:
        check_key(key)
        return self._prefix + key

    def _entries(self, names: list[str]) -> list[Entry | None]:
        """Return one entry per name, in one round trip (one per node on a cluster). STRLEN does not
        distinguish empty from absent; PTTL does."""
        batch = self.client.pipeline(transaction=False)
        for name in names:
            batch.strlen(name)
            batch.pttl(name)
        answers = batch.execute() if names else []
        now_s = self._clock()
        entries: list[Entry | None] = []
        for name, nbytes, left_ms in zip(names, answers[::2], answers[1::2], strict=True):
            if left_ms == -2:
                entries.append(None)
                continue
            age_s = 0.0 if left_ms < 0 else self._ttl_s - left_ms / 1000
            entries.append(Entry(name.removeprefix(self._prefix), nbytes, now_s - age_s))
        return entries


def _plain(value: Buffer) -> bytes | memoryview:
    """The client accepts no bytearray, and sends a memoryview without a copy."""
    return memoryview(value) if isinstance(value, bytearray) else value


@contextmanager
def _translated(verb: str, key: str) -> Iterator[None]:
    try:
        yield
    except CLIENT_ERRORS as exc:
        raise _translation(f"{verb} {key}: {exc}", exc) from exc


def _translation(reason: str, exc: Exception) -> StoreError:
    words = str(exc)
    if isinstance(exc, WrongTransport):
        return StoreDenied(reason)
    if isinstance(exc, _DENIED) or words.startswith(_DENIED_WORDS):
        return StoreDenied(
            f"{reason}: check the Redis user, its password and its ACL (see `objkv access`)"
        )
    if isinstance(exc, _LATER) or words.startswith(_LATER_WORDS):
        return StoreUnavailable(reason)
    return StoreError(reason)
