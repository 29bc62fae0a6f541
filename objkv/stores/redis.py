"""A store in Redis or Valkey, for small and much-used payloads: every value has a time to live.

Values may go earlier than that, by the server's eviction: to readers both are a miss. The client
keeps connections, TLS, retries, time-outs and topology, whether one server, Sentinel or Cluster;
payloads pass between its sockets and the caller's buffer: ``RedisValues``.
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
"""Nothing was read or written: the call is left to the client, which knows what to do about a
server that refused, a connection that was lost, a cluster that has changed."""
_GET = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n"
_WRITTEN = b"+OK"
_NOTHING = b"$-1"


class RedisValues:
    """Gets and puts through connections of ``client``, which stays its owner's, without a copy.

    The client's own reading of a value assembles it from blocks of 64 KiB and copies it twice more;
    its packing of a command copies what is sent. Here a value is received into the buffer it is
    for, and sent from the one it is in. Raises redis-py's exceptions, and what ``arrived`` raises.
    """

    def __init__(self, client: Any) -> None:
        self._connections = RespConnections(client)

    def get_into(
        self, name: str, buffer: memoryview, arrived: Arrived | None, start: int | None = None
    ) -> int | None:
        """The number of bytes read, None if there is no value, or ``UNDONE``.

        Without ``start`` it is the value's length: where that exceeds the buffer, nothing of the
        value is received.
        """
        # GETRANGE cannot ask for an empty range.
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
                return UNDONE  # a connection that is not clean is closed: more may be coming
            nbytes = _received(one, head, buffer, None if is_missing else arrived)
            return None if is_missing else nbytes
        finally:
            self._connections.give(one)

    def put(self, name: str, value: Buffer, *options: bytes | int) -> bool | None:
        """SET with ``options``: whether it wrote; None is ``UNDONE``."""
        one = self._connections.take(name)
        if one is None:
            return None
        try:
            # Built as one command, then cut where the value belongs, which is not copied.
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
        """Bring the connections back. Idempotent."""
        self._connections.close()

    def _asked(self, one: RespConnection, nbytes: int, *parts: bytes | memoryview) -> bytes:
        """The first line of the answer, received by ``nbytes`` at first; empty if the connection
        was lost before it: the call is left to the client."""
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
    """Receive what ``head`` announces, unless it is too long. A loss from here on is an error:
    another value may begin otherwise, and ``arrived`` has been called for this one."""
    if not head[1:].isdigit():
        raise exceptions.InvalidResponse(f"{head[:20]!r} announces no value")
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
    """Values under ``<prefix><key>``, each living ``ttl_s`` from its last put.

    ``client`` is open, returns bytes (no ``decode_responses``), and has time-outs: they are this
    store's deadline. The store closes it with itself.
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
        self._client: Any = client  # its return types are unions with the asynchronous ones
        self._values = RedisValues(client)
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._clock = clock

    def __repr__(self) -> str:
        return f"<RedisStore {self._prefix}* for {self._ttl_s} s>"

    def get(self, key: str) -> bytes | None:
        """The whole value, or None."""
        name = self._name(key)
        with _translated("get", key):
            value: bytes | None = self._client.get(name)
            return value

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Bytes ``[start, end)`` of the value, or None; one round trip."""
        name = self._name(key)
        with _translated("get_range", key):
            batch = self._client.pipeline(transaction=False)
            batch.exists(name)
            if start < end:  # the server counts to an end that is included, -1 being the last
                batch.getrange(name, start, end - 1)
            exists, *values = batch.execute()
            return b"".join(values) if exists else None

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """GET, or EXISTS and GETRANGE in one round trip, received into ``buffer``."""
        name = self._name(key)
        try:  # rather than _translated: its generator takes 2 us, a twentieth of a call
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
        """Size and age, or None. The age is what has passed of this store's ``ttl_s``."""
        name = self._name(key)
        with _translated("head", key):
            return self._entries([name])[0]

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Entries in no order, of all primaries on a cluster; some may come twice."""
        check_prefix(prefix)
        pattern = _GLOB.sub(r"\\\1", self._prefix + prefix) + "*"
        with _translated("scan", prefix):  # asks a cluster for its topology
            names = self._client.scan_iter(match=pattern, count=SCAN_BATCH)
        while True:
            with _translated("scan", prefix):
                found = [name.decode() for name in islice(names, SCAN_BATCH)]
                entries = self._entries(found)
            if not found:
                return
            yield from (entry for entry in entries if entry is not None and is_key(entry.key))

    def folders(self, folder: str) -> list[str]:
        """Found by looking at every key."""
        keys = (entry.key for entry in self.scan(f"{folder}/" if folder else ""))
        return folders_of(keys, folder)

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """SET NX EX; True if this call wrote it."""
        name = self._name(key)
        with _translated("put_if_absent", key):
            written = self._values.put(name, value, b"EX", self._ttl_s, b"NX")
            if written is None:
                written = bool(self._client.set(name, _plain(value), nx=True, ex=self._ttl_s))
            return written

    def put(self, key: str, value: Buffer) -> None:
        """SET EX, replacing what is there."""
        name = self._name(key)
        with _translated("put", key):
            if not self._values.put(name, value, b"EX", self._ttl_s):
                self._client.set(name, _plain(value), ex=self._ttl_s)

    def delete(self, key: str) -> bool:
        """UNLINK; True if there was a value."""
        name = self._name(key)
        with _translated("delete", key):
            return bool(self._client.unlink(name))

    def unfinished(self) -> Iterator[Unfinished]:
        """Nothing is ever left."""
        return iter(())

    def discard(self, unfinished: Unfinished) -> bool:
        """There is nothing to discard."""
        return False

    def check(self) -> None:
        """PING."""
        with _translated("check", self._prefix):
            self._client.ping()

    def close(self) -> None:
        """Close the client and its connections."""
        with _translated("close", self._prefix):
            self._values.close()
            self._client.close()

    def _name(self, key: str) -> str:
        check_key(key)
        return self._prefix + key

    def _entries(self, names: list[str]) -> list[Entry | None]:
        """One round trip (one per node on a cluster). STRLEN cannot tell empty from absent,
        PTTL can."""
        batch = self._client.pipeline(transaction=False)
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
    """The client takes no bytearray, and sends a memoryview without a copy."""
    return memoryview(value) if isinstance(value, bytearray) else value


@contextmanager
def _translated(verb: str, key: str) -> Iterator[None]:
    try:
        yield
    except CLIENT_ERRORS as exc:
        raise _translation(f"{verb} {key}: {exc}", exc) from exc


def _translation(reason: str, exc: Exception) -> StoreError:
    words = str(exc)
    if isinstance(exc, _DENIED) or words.startswith(_DENIED_WORDS):
        return StoreDenied(
            f"{reason}: check the Redis user, its password and its ACL, which objkv access prints"
        )
    if isinstance(exc, _LATER) or words.startswith(_LATER_WORDS):
        return StoreUnavailable(reason)
    return StoreError(reason)
