"""Pages that are written in part: comments around blocks, and options of several commands."""

import re
from pathlib import Path

import pytest

from scripts.pages import filled
from scripts.write_cli import blocks

PAGE = "before\n<!-- one -->\n\nold\n\n<!-- end of one -->\nafter\n"


def test_what_is_between_its_comments_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert filled(page, {"one": "new"}) == PAGE.replace("old", "new")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("<!-- one -->", "<!-- won -->"),
        ("<!-- one -->", "<!-- one -->\n\n<!-- one -->"),
        ("<!-- end of one -->", "<!-- end of won -->"),
        ("<!-- end of one -->", ""),
        ("before", "<!-- end of one -->"),
    ],
)
def test_a_block_whose_comments_are_wrong_is_named(tmp_path: Path, right: str, wrong: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace(right, wrong))
    with pytest.raises(SystemExit, match=r"page\.md: mend the two comments .*one"):
        filled(page, {"one": "new"})


def test_an_option_of_several_commands_is_described_once() -> None:
    names = re.findall(r"^\* `([^ `]+)", blocks()["shared options"], re.MULTILINE)
    assert len(names) == len(set(names)) > 1
