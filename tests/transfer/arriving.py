"""Stores that give what they have piece by piece, or late, as a network does."""

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from threading import Event

from objkv.errors import StoreUnavailable
from objkv.stores.base import Arrived, check_fits
from objkv.stores.memory import MemoryStore
from tests.transfer.world import PATIENCE_S


class PiecewiseStore(MemoryStore):
    """Tells of bytes in pieces of the sizes that ``pieces`` gives for each call; what has not
    arrived yet is noise."""

    def __init__(self, pieces: Callable[[], Iterator[int]] = lambda: repeat(1000)) -> None:
        super().__init__()
        self.pieces = pieces
        self.requests: list[tuple[str, int]] = []
        """(key, first byte) of each get."""

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        if start is None:
            start = 0
            check_fits(key, len(self.get(key) or b""), buffer)
        self.requests.append((key, start))
        value = self.get(key)
        if value is None:
            return None
        value = value[start : start + len(buffer)]
        buffer[:] = b"\xaa" * len(buffer)
        at = 0
        for piece in chain(self.pieces(), repeat(len(value))):
            part = value[at : at + piece]
            buffer[at : at + len(part)] = part
            at += len(part)
            if arrived is not None:
                arrived(at)
            if at == len(value):
                return at
        raise AssertionError


class StuckStore(MemoryStore):
    """Gets hang until told; puts can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.go = Event()
        self.asked = Event()
        self.broken = False

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        self.asked.set()
        assert self.go.wait(PATIENCE_S)
        return super().get_into(key, buffer, arrived, start)

    def put_if_absent(self, key: str, value: bytes | bytearray | memoryview) -> bool:
        if self.broken:
            raise StoreUnavailable("put: gone")
        return super().put_if_absent(key, value)
