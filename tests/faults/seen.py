"""What was seen of one verb under one fault, and whether it is what the matrix says."""

import logging
from collections import Counter
from dataclasses import dataclass, field

from objkv.cache.switch import SWITCH_PATH
from tests.faults.rows import Cell

UNEXPECTED = ("unexpectedly", "continuing without it", "not taken out", "Traceback (most")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass
class Seen:
    outcome: str = ""
    right: bool = False
    """Whether the tokens are those of a model without a connector, and all KV that was read what
    was computed for it."""
    counted: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    asked: int = 0
    """Requests to the end with the fault, while it was there."""
    ended: bool = False
    """Whether the request ended while the fault was there: nobody waited for its end."""

    def check(self, cell: Cell) -> None:
        assert self.right
        assert self.ended
        assert self.outcome == cell.outcome, (self.counted, self.lines)
        if not cell.touched:
            assert self.asked == 0
        if cell.counted:
            assert self.counted.get(cell.counted, 0) >= 1, (self.counted, self.lines)
        self.check_lines(cell)

    def check_lines(self, cell: Cell) -> None:
        """That the log tells the fault, each change of state once, and nothing unforeseen."""
        for words in UNEXPECTED:
            assert not [line for line in self.lines if words in line]
        kinds = Counter(line.partition(" reason=")[0] for line in self.lines)
        repeated = {line: n for line, n in kinds.items() if n > 1 and "payload refused" not in line}
        assert not repeated, self.lines
        told = [line for line in kinds if not (cell.beside and line.startswith(cell.beside))]
        if cell.told:
            assert [line for line in told if line.startswith(cell.told)], self.lines
        elif any(SWITCH_PATH in line for line in self.lines):
            # The operator's switch is read by the clock, so it may meet the fault of any verb.
            assert not [line for line in told if not line.startswith("bulk reads ")], self.lines
        else:
            assert not told, self.lines
