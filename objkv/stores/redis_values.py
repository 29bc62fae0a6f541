"""Values between Redis and the caller's memory, without another copy on the way.

The client's own reading of a value assembles it from blocks of 64 KiB and copies it twice more; its
packing of a command copies what is sent. Here a value is received into the buffer it is for, and
sent from the one it is in.
"""

from typing import Any, Final

from redis import exceptions

from objkv.resp.line import Line, packed
from objkv.resp.lines import Lines
from objkv.stores.base import Arrived, Buffer

UNDONE: Final = -1
"""The call has done nothing that counts, and is to be made with the client: what a server refused,
a connection that was lost, a cluster that has changed are what the client knows how to mend."""

_GET = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n"
_WRITTEN = b"+OK"
_NOTHING = b"$-1"


class RedisValues:
    """Gets and puts through connections of ``client``, which stays its owner's.

    Raises redis-py's exceptions, and what ``arrived`` raises.
    """

    def __init__(self, client: Any) -> None:
        self._lines = Lines(client)

    def get_into(self, name: str, buffer: memoryview, arrived: Arrived | None) -> int | None:
        """The value's length, None if there is none, or ``UNDONE``. A length greater than the
        buffer's is only told: nothing of such a value is received."""
        line = self._lines.take(name)
        if line is None:
            return UNDONE
        try:
            expected = len(b"$%d\r\n" % len(buffer))
            head = self._asked(line, expected, _GET % (len(name), name.encode()))
            if head is None or head[:1] != b"$":
                line.clean = head is not None and head[:1] == b"-"
                return UNDONE
            line.clean = head == _NOTHING
            return None if line.clean else _received(line, head, buffer, arrived)
        finally:
            self._lines.give(line)

    def get_range_into(
        self, name: str, start: int, buffer: memoryview, arrived: Arrived | None
    ) -> int | None:
        """How many of the bytes from ``start`` there were, None if no value, or ``UNDONE``."""
        line = self._lines.take(name) if len(buffer) else None  # GETRANGE has no word for none
        if line is None:
            return UNDONE
        try:
            key, end = name.encode(), start + len(buffer) - 1
            expected = len(b":1\r\n$%d\r\n" % len(buffer))
            command = packed(b"EXISTS", key) + packed(b"GETRANGE", key, start, end)
            exists = self._asked(line, expected, command)
            head = self._asked(line, expected) if exists in (b":0", b":1") else None
            if head is None or head[:1] != b"$":
                return UNDONE  # closes the connection: there may be another answer
            if exists == b":0":
                _received(line, head, buffer, None)
                return None
            return _received(line, head, buffer, arrived)
        finally:
            self._lines.give(line)

    def put(self, name: str, value: Buffer, *options: bytes | int) -> bool | None:
        """SET with ``options``: whether it wrote; None is ``UNDONE``."""
        line = self._lines.take(name)
        if line is None:
            return None
        try:
            # Built as one command, then cut where the value belongs: it is sent from where it is.
            command = packed(b"SET", name.encode(), b"", *options)
            before, after = command.split(b"$0\r\n\r\n", 1)
            before += b"$%d\r\n" % len(value)
            with memoryview(value) as view:
                parts = (before, view, b"\r\n" + after)
                answer = self._asked(line, len(b"+OK\r\n"), *parts)
            line.clean = (answer is not None and answer[:1] in (b"+", b"-")) or answer == _NOTHING
            return answer == _WRITTEN if answer in (_WRITTEN, _NOTHING) else None
        finally:
            self._lines.give(line)

    def close(self) -> None:
        """Bring the connections back. Idempotent."""
        self._lines.close()

    def _asked(self, line: Line, expected: int, *parts: bytes | memoryview) -> bytes | None:
        """The first line of the answer; None if it was lost before it: the client asks again."""
        try:
            if parts:
                line.send(*parts)
            return line.read_line(expected)
        except (exceptions.ConnectionError, exceptions.InvalidResponse):
            return None
        except exceptions.TimeoutError:
            if self._lines.is_cluster:
                return None
            raise


def _received(line: Line, head: bytes, buffer: memoryview, arrived: Arrived | None) -> int:
    """Receive what ``head`` announces, unless it is too long. What is lost from here on is an
    error: of another value the beginning may differ, and ``arrived`` has been told of this one."""
    if not head[1:].isdigit():
        raise exceptions.InvalidResponse(f"{head[:20]!r} announces no value")
    nbytes = int(head[1:])
    if nbytes <= len(buffer):
        line.read_bulk(head, buffer[:nbytes], arrived)
        line.clean = True
    return nbytes
