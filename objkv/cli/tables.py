"""Tables that fit a terminal: shortened hashes, cut names, and only the columns that have room."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

HASH_DIGITS: Final = 12
"""Digits of a shortened hash: enough to name one chunk among millions."""
_HASH: Final = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{32,64}(?![0-9A-Za-z])")
_GAP: Final = 2
_NAME_MIN: Final = 12
"""Names are cut to this width before a column is left out."""
_PROSE_MIN: Final = 24
_ELLIPSIS: Final = "…"


def short_length(texts: Iterable[str]) -> int:
    """Return the number of digits, at least 12, with which all hashes in ``texts`` differ."""
    hashes = sorted({found for text in texts for found in _HASH.findall(text)})
    length = HASH_DIGITS
    for one, following in pairwise(hashes):
        while one[:length] == following[:length] and length < len(one):
            length += 1
    return length


def shortened(text: str, length: int) -> str:
    """Return ``text`` with its hashes cut to ``length`` digits. Only a hash that is a word of its
    own lacks an ellipsis: commands take its beginning, but not that of a path.

    >>> shortened("0" * 40, 12), shortened("0" * 40 + "/0.0", 12)
    ('000000000000', '000000000000…/0.0')
    """

    def cut(found: re.Match[str]) -> str:
        around = text[found.start() - 1 : found.start()] + text[found.end() : found.end() + 1]
        return found[0][:length] + (_ELLIPSIS if around.strip() else "")

    return _HASH.sub(cut, text)


class FittedTable:
    """The columns and cells of one table, at first in full width.

    ``>`` before a column's name aligns it right; such columns (numbers) are never cut. ``~`` lets a
    column wrap between words. Other columns are cut with an ellipsis.
    """

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
        self._columns = list(columns)
        self._has_names = any(name.lstrip(">~") for name in columns)
        self._rows = [list(row) for row in rows]
        self._shown = list(range(len(columns)))
        self._widths: dict[int, int] = {}
        """Widths of the columns of a table that is fitted."""
        self._hashes: dict[int, int] = {}
        """The columns with shortened hashes, and the width up to the end of the last one."""
        self.is_cut = False
        """Whether names were cut or columns left out."""

    def fit(self, width: int) -> None:
        """Fit the table to ``width`` cells: hashes are shortened (in a table without names only if
        it is too wide), then names are cut, and then columns left out, the last one first."""
        natural = self._natural()
        if self._has_names or self._total(natural) > width:
            self._shorten_hashes()
            natural = self._natural()
        least = {place: self._least(place, wanted) for place, wanted in natural.items()}
        for place in reversed(range(1, len(self._columns))):
            if self._total(least) <= width:
                break
            del least[place]
            self.is_cut = True
        self._shown = sorted(least)
        self._widths = self._spread(width, least, natural)
        self.is_cut = self.is_cut or any(
            width < natural[place] and not self._columns[place].startswith("~")
            for place, width in self._widths.items()
        )

    def table(self) -> Table:
        """Return the table to print."""
        names = [self._columns[place] for place in self._shown]
        table = Table(box=None, pad_edge=False, header_style="bold", show_header=self._has_names)
        for place, name in zip(self._shown, names, strict=True):
            is_prose = name.startswith("~")
            table.add_column(
                name.lstrip(">~"),
                justify="right" if name.startswith(">") else "left",
                width=self._widths.get(place),
                no_wrap=bool(self._widths) and not is_prose,
                overflow="ellipsis" if self._widths and not is_prose else "fold",
            )
        for row in self._rows:
            table.add_row(*(row[place] for place in self._shown))
        return table

    def _natural(self) -> dict[int, int]:
        """The widths that cut nothing."""
        return {
            place: max(cell_len(name.lstrip(">~")), *(row[place].cell_len for row in self._rows), 0)
            for place, name in enumerate(self._columns)
        }

    def _least(self, place: int, wanted: int) -> int:
        name = self._columns[place]
        if name.startswith(">"):
            return wanted
        if place in self._hashes:
            return self._hashes[place]
        return min(wanted, _PROSE_MIN if name.startswith("~") else _NAME_MIN)

    def _spread(self, width: int, least: dict[int, int], natural: dict[int, int]) -> dict[int, int]:
        """Widen the columns from ``least`` into the remaining room, in their order but prose last.
        If even ``least`` is too wide, narrow those that are not numbers."""
        widths = dict(least)
        left = width - self._total(widths)
        for place in sorted(widths, key=lambda place: self._columns[place].startswith("~")):
            more = max(0, min(left, natural[place] - widths[place]))
            widths[place] += more
            left -= more
        names = [place for place in widths if not self._columns[place].startswith(">")]
        while left < 0 and names and (most := max(widths[place] for place in names)) > 1:
            widths[next(place for place in names if widths[place] == most)] -= 1
            left += 1
        return widths

    def _shorten_hashes(self) -> None:
        cells = [
            (row, place)
            for row in self._rows
            for place, name in enumerate(self._columns)
            # Text may quote a command with a whole hash.
            if not name.startswith("~") or _HASH.fullmatch(row[place].plain)
        ]
        length = short_length(row[place].plain for row, place in cells)
        for row, place in cells:
            short = shortened(row[place].plain, length)
            if short != row[place].plain:
                rest = _HASH.split(row[place].plain)[-1]
                end = cell_len(short) - cell_len(rest)
                self._hashes[place] = max(end, self._hashes.get(place, 0))
                row[place] = Text(short, style=row[place].style)

    @staticmethod
    def _total(widths: dict[int, int]) -> int:
        return sum(widths.values()) + _GAP * (len(widths) - 1)
