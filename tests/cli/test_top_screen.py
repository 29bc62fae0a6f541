"""``objkv.cli.top``: what fits on which terminal, and what keys do."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from objkv.cli.top import SORTS, Showing, screen, sort_rows, summary_lines
from objkv.ops.top.prefixes import HotPrefix, PrefixLook
from objkv.ops.top.rates import Flow, ReplicaRow, total_of
from objkv.ops.top.watch import StoredTotals, View

BUSY = Flow(computed_tokens=60, local_tokens=20, bulk_tokens=20, bulk_load_bytes=5 << 30)
QUIET = Flow(computed_tokens=5, refusals=3, drops=1)
ROWS = (
    ReplicaRow("replica-one:8000", "up", None, BUSY, ("bulk_write",)),
    ReplicaRow("replica-two:8000", "down", "Connection refused", Flow(), ()),
    ReplicaRow("replica-three:8000", "new", None, Flow(running=2), ()),
    ReplicaRow("replica-four:8000", "up", None, QUIET, ()),
)
PREFIX = HotPrefix("ab" * 16, b"\x01" * 20, 1234, 5.5, 512, 2048, 1 << 20, 1_700_000_000)
VIEW = View(
    ROWS,
    total_of(ROWS),
    (None, 0.0, 0.5, 1.0),
    StoredTotals(1 << 30, 10, 2, "index"),
    (("bulk", True), ("index", False)),
    PrefixLook(0.0, (PREFIX,) * 40, 50_000, whole=False),
    ("the exporter does not answer: \x1b[31mrefused",),
)


def drawn(view: View | None, showing: Showing, width: int, height: int) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width, height=height, no_color=True)
    console.print(screen(view, showing, "12:00:00", (width, height)))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [72, 80, 100, 148, 220])
def test_every_width_shows_what_matters_most(width: int) -> None:
    lines = drawn(VIEW, Showing(2), width, 40)
    assert max(map(len, lines)) <= width
    text = " ".join("\n".join(lines).split())
    assert "hit rate 24%" in text
    for name in ("replica-one:8000", "replica-two:8000", "down", "tokens/s", "refused/s"):
        assert name in text
    assert "\x1b" not in text


def test_a_wide_terminal_shows_all_columns_and_a_narrow_one_fewer() -> None:
    wide = "\n".join(drawn(VIEW, Showing(2), 200, 40))
    narrow = "\n".join(drawn(VIEW, Showing(2), 90, 40))
    assert "wait" in wide
    assert "wait" not in narrow
    assert "open: bulk write" in wide
    assert "Connection refused" in wide
    assert "index DOWN" in wide


@pytest.mark.parametrize("height", [16, 20, 30, 50])
def test_no_more_is_drawn_than_there_is_room_for(height: int) -> None:
    many = View(ROWS * 20, *[getattr(VIEW, name) for name in View.__slots__[1:]])
    lines = drawn(many, Showing(2), 160, height)
    assert len(lines) <= height
    assert any("of 80" in line for line in lines)


def test_an_index_that_was_read_in_part_says_so() -> None:
    text = "\n".join(drawn(VIEW, Showing(2), 160, 40))
    assert "of 50,000 chunks, and there are more" in text
    assert "1,234" in text


def test_before_the_first_look_it_says_that_it_asks() -> None:
    assert "asking ..." in "\n".join(drawn(None, Showing(2), 80, 24))


def test_rows_are_sorted_by_what_the_user_chose() -> None:
    assert sort_rows(ROWS, "name") == list(ROWS)
    assert sort_rows(ROWS, "tokens")[0] is ROWS[0]
    assert sort_rows(ROWS, "refusals")[0] is ROWS[3]
    for name in SORTS:
        assert len(sort_rows(ROWS, name)) == len(ROWS)


def test_keys_do_what_the_head_says() -> None:
    showing = Showing(2)
    assert all(showing.key(key, 3) for key in ("p", "s", "down", "x"))
    assert (showing.paused, showing.sort, showing.top) == (True, "tokens", 1)
    for key in ("down", "down", "down"):
        showing.key(key, 3)
    assert showing.top == 2
    showing.key("up", 3)
    assert showing.top == 1
    assert not showing.key("q", 3)


def test_on_a_very_narrow_terminal_the_reason_why_a_replica_is_down_stays() -> None:
    text = "\n".join(drawn(VIEW, Showing(2), 60, 40))
    assert "Connection refused" in text
    assert "open: bulk write" in text


def test_a_fleet_that_is_down_has_no_figures() -> None:
    down = (ROWS[1],)
    lines = summary_lines(replace(VIEW, rows=down, total=total_of(down)))
    assert lines[0] == "1 replica, 1 down; hit rate -; - prompt tokens/s"
    assert not any(char.isdigit() for char in lines[1])
    assert "--endpoint URL" in lines[2]
    assert lines[3].startswith("stored 1.0 GiB")
    assert "--endpoint URL" in "\n".join(drawn(replace(VIEW, rows=down), Showing(2), 100, 40))
