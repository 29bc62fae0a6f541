"""Token ids of many prompts, on disk: a corpus may have more than memory has room for."""

import os
import tempfile
from array import array
from collections.abc import Sequence
from threading import Lock

_TOKEN_BYTES = 4


class Spool:
    """A file without a name, which ends with this process. Safe from many threads."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``close``
        self._lock = Lock()
        self._places: list[tuple[int, int]] = []
        self._end = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, tokens: Sequence[int]) -> int:
        """Keep them; the number that ``read`` takes."""
        encoded = array("I", tokens)
        assert encoded.itemsize == _TOKEN_BYTES
        with self._lock:
            os.pwrite(self._file.fileno(), encoded.tobytes(), self._end)
            self._places.append((self._end, len(encoded)))
            self._end += len(encoded) * _TOKEN_BYTES
            return len(self._places) - 1

    def read(self, number: int) -> "array[int]":
        """What was added as ``number``."""
        start, length = self._places[number]
        tokens = array("I")
        tokens.frombytes(os.pread(self._file.fileno(), length * _TOKEN_BYTES, start))
        return tokens

    def length(self, number: int) -> int:
        """How many tokens it has."""
        return self._places[number][1]

    def close(self) -> None:
        """Give the room back. Idempotent."""
        self._file.close()
