"""Messages between an agent and its fetching processes, one datagram each, in native byte order.

A lane carries one get at a time: a request, answers with the bytes that have arrived, and a last
answer. Each answer repeats the request's number.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from objkv.errors import StoreBusy, StoreDenied, StoreError, StoreUnavailable, ValueTooLong
from objkv.stores.base import KEY_BYTES_MAX

_REQUEST = struct.Struct("=QQqd?")
_ANSWER = struct.Struct("=BQq")
_TEXT_BYTES_MAX = 4096
MESSAGE_BYTES_MAX: Final = max(_REQUEST.size + KEY_BYTES_MAX, _ANSWER.size + _TEXT_BYTES_MAX)
_WHOLE = -1
_ERRORS: Final = (StoreError, StoreUnavailable, StoreBusy, StoreDenied, ValueTooLong)
"""By number in an answer. A subclass that is not listed becomes its first listed base class."""


@dataclass(frozen=True, slots=True)
class GetRequest:
    """A ``get_into`` to the start of the lane's memory."""

    number: int
    nbytes: int
    """Size of the buffer."""
    start: int | None
    ends_s: float
    """Deadline by ``time.monotonic``, whose clock all processes of a machine share."""
    is_trial: bool
    """See ``objkv.net.deadline.Trial``."""
    key: str

    def pack(self) -> bytes:
        """Return the message."""
        start = _WHOLE if self.start is None else self.start
        head = _REQUEST.pack(self.number, self.nbytes, start, self.ends_s, self.is_trial)
        return head + self.key.encode()

    @classmethod
    def unpack(cls, message: bytes) -> "GetRequest":
        """Return the request of a message. Raises ``ValueError``."""
        try:
            number, nbytes, start, ends_s, trial = _REQUEST.unpack_from(message)
        except struct.error as exc:
            raise ValueError(str(exc)) from exc
        key = message[_REQUEST.size :].decode()
        return cls(number, nbytes, None if start == _WHOLE else start, ends_s, trial, key)


class AnswerKind(IntEnum):
    """Meaning of an answer."""

    ARRIVED = 1
    """The first ``nbytes`` of the lane's memory are valid."""
    COUNTED = 2
    """The counter ``text`` rose by ``nbytes``."""
    DONE = 3
    """The last answer: the get returned ``nbytes``."""
    MISSING = 4
    """The last answer: the key does not exist."""
    FAILED = 5
    """The last answer: an error with number ``nbytes`` and message ``text``."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a fetching process."""

    kind: AnswerKind
    number: int
    nbytes: int = 0
    text: str = ""

    @property
    def is_last(self) -> bool:
        """Whether the lane is free after it."""
        return self.kind >= AnswerKind.DONE

    @property
    def error(self) -> StoreError:
        """The error of a ``FAILED`` answer."""
        return _ERRORS[self.nbytes](self.text)

    def pack(self) -> bytes:
        """Return the message."""
        text = self.text.encode(errors="replace")[:_TEXT_BYTES_MAX]
        return _ANSWER.pack(self.kind, self.number, self.nbytes) + text

    @classmethod
    def unpack(cls, message: bytes) -> "Answer":
        """Return the answer of a message. Raises ``ValueError``."""
        try:
            kind, number, nbytes = _ANSWER.unpack_from(message)
        except struct.error as exc:
            raise ValueError(str(exc)) from exc
        answer = cls(
            AnswerKind(kind), number, nbytes, message[_ANSWER.size :].decode(errors="replace")
        )
        if answer.kind is AnswerKind.FAILED and not 0 <= nbytes < len(_ERRORS):
            raise ValueError(f"no error has the number {nbytes}")
        return answer


def failed(number: int, error: Exception) -> Answer:
    """Return the answer for an exception of a store."""
    kinds = [_ERRORS.index(kind) for kind in type(error).__mro__ if kind in _ERRORS]
    text = str(error) if kinds else f"{type(error).__name__}: {error}"
    return Answer(AnswerKind.FAILED, number, kinds[0] if kinds else 0, text)
