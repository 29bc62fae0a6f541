"""Schedules prompts over several prefillers, even if some are busy or down.

Prompts of one tree go to the same prefiller while it has room, because its prefix cache holds their
shared prefix. A prefiller that does not answer gets no prompts until a health check succeeds.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

from objkv.ops.warm.prefill import Prefiller, PrefillError

_FIRST_PAUSE_S: Final = 0.5
_PAUSE_MAX_S: Final = 30.0
_RETRY_AFTER_MAX_S: Final = 120.0
_ROOTS_MAX: Final = 65_536


@dataclass(slots=True)
class Seat:
    """The state of one prefiller. Only the owner's thread changes it."""

    asker: Prefiller
    asked: int = 0
    """Requests in flight."""
    answered: int = 0
    tokens: int = 0
    """Tokens of the prompts that it computed."""
    errors: int = 0
    failed_in_row: int = 0
    not_before_s: float = 0.0
    is_down: bool = False
    """Whether its last request got no answer. It must pass a check before the next prompt."""
    down_since_s: float = 0.0
    last_error: str = ""

    @property
    def free(self) -> int:
        """The number of further requests that it can take."""
        return self.asker.at_once - self.asked


class PrefillFleet:
    """For one thread. ``first_pause_s`` doubles with each consecutive failure."""

    def __init__(
        self,
        askers: Sequence[Prefiller],
        *,
        clock: Callable[[], float] = monotonic,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        assert askers
        self.seats = [Seat(asker) for asker in askers]
        self._clock = clock
        self._first_pause_s = first_pause_s
        self._homes: OrderedDict[bytes, Seat] = OrderedDict()

    @property
    def at_once(self) -> int:
        """Concurrent requests of all prefillers together."""
        return sum(seat.asker.at_once for seat in self.seats)

    def has_room(self) -> bool:
        """Whether a prefiller can take a request now."""
        return any(self._is_ready(seat) for seat in self.seats)

    def take(self, root: bytes) -> Seat:
        """Choose the prefiller for a prompt of this tree. Call only if ``has_room``."""
        ready = [seat for seat in self.seats if self._is_ready(seat)]
        home = self._homes.pop(root, None)
        if home is not None and home in ready and not home.failed_in_row:
            seat = home
        else:  # a prefiller whose last request failed is the last choice
            seat = max(ready, key=lambda s: (not s.failed_in_row, s.free))
        self._homes[root] = seat
        while len(self._homes) > _ROOTS_MAX:
            self._homes.popitem(last=False)
        seat.asked += 1
        return seat

    def to_check(self) -> list[Seat]:
        """Return the prefillers that are due for a check, and mark them as being checked."""
        now = self._clock()
        seats = [s for s in self.seats if s.is_down and not s.asked and now >= s.not_before_s]
        for seat in seats:
            seat.asked += 1
        return seats

    def passed(self, seat: Seat) -> None:
        """Record a successful check."""
        seat.asked -= 1
        seat.failed_in_row, seat.is_down = 0, False

    def answered(self, seat: Seat, tokens: int) -> None:
        """Record a computed prompt of ``tokens`` tokens."""
        seat.asked -= 1
        seat.answered += 1
        seat.tokens += tokens
        seat.failed_in_row, seat.is_down = 0, False

    def failed(self, seat: Seat, error: PrefillError) -> None:
        """Record a failed request or check."""
        seat.asked -= 1
        if error.trouble == "refused":  # the prompt is at fault, and the prefiller answers
            seat.failed_in_row = 0
            return
        now = self._clock()
        seat.errors += 1
        seat.failed_in_row += 1
        seat.last_error = str(error)
        if error.trouble == "down" and not seat.is_down:
            seat.is_down, seat.down_since_s = True, now
        pause_s = min(_PAUSE_MAX_S, self._first_pause_s * 2 ** min(seat.failed_in_row - 1, 10))
        if error.trouble == "failed":  # its other requests may succeed
            pause_s = min(pause_s, self._first_pause_s)
        if error.after_s is not None:
            pause_s = max(pause_s, min(error.after_s, _RETRY_AFTER_MAX_S))
        seat.not_before_s = max(seat.not_before_s, now + pause_s)

    def rest_s(self) -> float:
        """Return the seconds until a prefiller with room may be used; 0 if one may be used now."""
        now = self._clock()
        waits = [max(0.0, seat.not_before_s - now) for seat in self.seats if seat.free > 0]
        return min(waits, default=0.0)

    def gone_s(self) -> float:
        """Return the seconds since all prefillers are down; 0 while one is up."""
        if not all(seat.is_down for seat in self.seats):
            return 0.0
        return self._clock() - max(seat.down_since_s for seat in self.seats)

    def _is_ready(self, seat: Seat) -> bool:
        return seat.free > 0 and not seat.is_down and self._clock() >= seat.not_before_s
