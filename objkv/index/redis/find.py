"""Looks up the shards of a whole prompt in one round trip, at the speed of the wire.

All commands are sent at once, one ``HGET`` per chunk (``HMGET`` for several fields). One regular
expression parses usual replies while more of them arrive: 0.5 us per chunk, compared to 10 us with
a client's parser. Others are parsed one at a time by the rules of the protocol.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import Any

from redis import exceptions

from objkv.index.base import ShardRecords
from objkv.index.fields import SHARD_PATTERN, WrittenShards, decode_shard
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.net.redis_errors import CLIENT_ERRORS
from objkv.net.resp import Pool, RespConnection, RespConnections, packed

_SEND_HASHES = 256
"""Hashes sent together, 32 KiB for one field: the server starts while the next are packed."""
_AHEAD_BYTES = 524_288
"""Limit of sent bytes without a reply, about 4,000 commands: the server has to buffer them."""
_AHEAD_BYTES_TLS = 65_536
"""Lower if sending cannot be interrupted to receive: the buffers in between must hold it all."""
_REST_BYTES_MAX = 65_536
"""Limit of an incomplete reply; every shard is shorter."""
_VALUE = rb"\$(?:-1|[0-9]{1,3}\r\n(%b))\r\n" % SHARD_PATTERN
_REST = rb"|((?s:.+))"
"""Everything from the first position without a value."""
_FAST = re.compile(_VALUE + _REST)
_FAST_ROWS = re.compile(rb"(?:\*[0-9]+\r\n)?" + _VALUE + _REST)
_LENGTH = re.compile(rb"-1|[0-9]{1,10}")
_HEAD = re.compile(rb"([-+:*$])([^\r\n]*)\r\n")


class Finder:
    """Reads fields of many chunks on connections of ``client``, which the caller still owns."""

    def __init__(self, client: Any) -> None:
        self._connections = RespConnections(client)

    def find(
        self, key: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[ShardRecords | None] | None:
        """See ``ReadIndex``. ``key``: the prefix of every chunk's key. No argument is empty.
        Returns None if the caller must repeat the lookup through the client: the server refused,
        the connection was lost, or the cluster changed. Raises redis-py's exceptions."""
        wanted = tuple(dict.fromkeys(fields))
        if not self._connections.is_cluster:
            return self._ask({self._connections.pool_of(key): prefix_hashes}, key, wanted)
        try:
            found = self._find_in_cluster(key, list(dict.fromkeys(prefix_hashes)), wanted)
        except CLIENT_ERRORS:
            return None  # the client reads the topology again
        return None if found is None else [found[one] for one in prefix_hashes]

    def close(self) -> None:
        """Return the connections to the client. Idempotent."""
        self._connections.close()

    def _find_in_cluster(
        self, key: str, prefix_hashes: list[bytes], fields: tuple[str, ...]
    ) -> dict[bytes, ShardRecords | None] | None:
        by_pool: dict[Pool | None, list[bytes]] = defaultdict(list)
        for prefix_hash in prefix_hashes:
            by_pool[self._connections.pool_of(key + prefix_hash.hex())].append(prefix_hash)
        # The same order for all threads, because each holds connections while it waits for the next
        # pool.
        by_pool = dict(sorted(by_pool.items(), key=lambda item: id(item[0])))
        found = self._ask(by_pool, key, fields)
        if found is None:
            return None
        return dict(zip(chain.from_iterable(by_pool.values()), found, strict=True))

    def _ask(
        self, by_pool: Mapping[Pool | None, Sequence[bytes]], key: str, fields: tuple[str, ...]
    ) -> list[ShardRecords | None] | None:
        """Return the shards of all hashes, pool by pool. All servers work at once."""
        connections: list[RespConnection] = []
        try:
            for pool in by_pool:
                connection = self._connections.acquire_from(pool)
                if connection is None:
                    return None
                connections.append(connection)
            pairs = zip(connections, by_pool.values(), strict=True)
            questions = [_Question(connection, key, hashes, fields) for connection, hashes in pairs]
            with suppress(exceptions.ConnectionError, exceptions.InvalidResponse, _RefusedError):
                for question in questions:
                    question.push()
                return [one for question in questions for one in question.answers()]
            return None
        finally:
            for connection in connections:
                self._connections.release(connection)


class _RefusedError(Exception):
    """The server returned an error that the client can handle."""


class _Question:
    """The commands for one server, and its replies so far."""

    def __init__(
        self,
        connection: RespConnection,
        key: str,
        prefix_hashes: Sequence[bytes],
        fields: tuple[str, ...],
    ) -> None:
        self._connection = connection
        self._fields = fields
        self._count = len(prefix_hashes) * len(fields)
        self._values: list[bytes] = []
        self._found: list[ShardRecords | None] = []
        self._refused = False
        self._rows = 0
        self._pattern = _FAST if len(fields) == 1 else _FAST_ROWS
        # Value lengths are not compared with the announced ones. Instead, the last reply is
        # unpredictable. If exactly as many values as requested precede it, none of them came from a
        # part of another value or from an earlier command.
        mark = os.urandom(8).hex().encode()
        self._mark = b"$16\r\n%b\r\n" % mark
        self._parts = _commands(key, prefix_hashes, fields, packed(b"PING", mark))
        self._unsent = memoryview(next(self._parts))
        self._value_bytes = len(self._unsent) / min(self._count, _SEND_HASHES * len(fields))
        self._sent = 0
        self._ahead = _AHEAD_BYTES_TLS if connection.tls else _AHEAD_BYTES

    def push(self) -> bool:
        """Send what socket and server may take. Return whether more must be sent."""
        while self._unsent:
            if self._sent - len(self._values) * self._value_bytes > self._ahead:
                return False
            taken = self._connection.offer(self._unsent)
            if not taken:
                return True
            self._sent += taken
            self._unsent = self._unsent[taken:] or memoryview(next(self._parts, b""))
        return False

    def answers(self) -> list[ShardRecords | None]:
        """Return one item per prefix hash, in order."""
        rest = b""
        while rest != self._mark:
            if self.push() and not self._connection.wait_to_receive():
                continue
            rest = self._take(rest + self._connection.receive())
            if len(rest) > _REST_BYTES_MAX or len(self._values) > self._count:
                raise exceptions.InvalidResponse("an unexpected reply")
        if len(self._values) != self._count:
            raise exceptions.InvalidResponse("fewer replies than commands")
        self._connection.clean = True
        if self._refused:
            raise _RefusedError
        if len(self._fields) == 1:
            return self._found
        rows = zip(*[iter(self._values)] * len(self._fields), strict=True)
        return [WrittenShards(self._fields, row) if any(row) else None for row in rows]

    def _take(self, data: bytes) -> bytes:
        """Keep the values of complete replies. Return the bytes after them."""
        while data:
            found = self._pattern.findall(data)
            rest: bytes = found[-1][1]
            if rest:
                found.pop()
            self._keep([value for value, _ in found])
            used = 0 if self._mark.startswith(rest) else self._take_odd(rest)
            if not used:
                return rest
            data = rest[used:]
        return b""

    def _keep(self, values: list[bytes]) -> None:
        self._values += values
        if len(self._fields) == 1:  # with several fields, a row may arrive in parts
            fields = self._fields
            self._found += [WrittenShards(fields, (one,)) if one else None for one in values]

    def _take_odd(self, data: bytes) -> int:
        """Keep one reply of any kind. Return its length, or 0 if it is incomplete."""
        head = _HEAD.match(data)
        if head is None:
            return 0
        kind, words = head.groups()
        if kind == b"*":
            self._rows += 1
            if self._rows > self._count:
                raise exceptions.InvalidResponse("too many rows")
            return head.end()  # the values of the row follow
        if kind == b"$":
            if _LENGTH.fullmatch(words) is None:
                raise exceptions.InvalidResponse("a value of unknown length")
            end = head.end() + max(0, int(words))
            if len(data) < end + 2:
                return 0
            if data[end : end + 2] != b"\r\n":
                raise exceptions.InvalidResponse("a value of the wrong length")
            value = data[head.end() : end]
            self._keep([value if decode_shard(value) else b""])
            return end + 2
        if kind != b"-":
            raise exceptions.InvalidResponse("a reply of the wrong kind")
        # A key of another type is not objkv's and holds no chunk.
        self._refused |= not words.startswith(b"WRONGTYPE")
        self._keep([b""] * len(self._fields))
        return head.end()


def _commands(
    key: str, prefix_hashes: Sequence[bytes], fields: tuple[str, ...], last: bytes
) -> Iterator[bytes]:
    """Yield the commands for all hashes in batches, then ``last``. Joining and replacing takes 0.1
    us per hash, and needs equal lengths."""
    assert set(map(len, prefix_hashes)) == {PREFIX_HASH_BYTES}
    before, after = _frame(key, fields)
    for start in range(0, len(prefix_hashes), _SEND_HASHES):
        joined = b"".join(prefix_hashes[start : start + _SEND_HASHES])
        between = joined.hex("|", PREFIX_HASH_BYTES).replace("|", after + before)
        end = last if start + _SEND_HASHES >= len(prefix_hashes) else b""
        yield (before + between + after).encode() + end


@lru_cache(maxsize=64)
def _frame(key: str, fields: tuple[str, ...]) -> tuple[str, str]:
    """Return the parts of a command before and after the hash."""
    verb = "HGET" if len(fields) == 1 else "HMGET"
    nbytes = len(key.encode()) + 2 * PREFIX_HASH_BYTES
    before = f"*{2 + len(fields)}\r\n${len(verb)}\r\n{verb}\r\n${nbytes}\r\n{key}"
    after = "\r\n" + "".join(f"${len(field.encode())}\r\n{field}\r\n" for field in fields)
    return before, after
