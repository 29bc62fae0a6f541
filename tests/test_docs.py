"""What the documents say is there is there."""

import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def documents() -> Iterator[Path]:
    """All that is not in a hidden folder: there, tools come and go while tests are collected."""
    for folder, subfolders, files in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name != "node_modules"]
        yield from (Path(folder, name) for name in files if name.endswith(".md"))


DOCUMENTS = sorted(documents())
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = HEADING.findall(FENCED.sub("", document.read_text()))
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(FENCED.sub("", document.read_text())):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_configuration_page_lists_the_settings_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    script = runpy.run_path(str(ROOT / "scripts/write_configuration.py"))
    assert script["PAGE"].read_text() == script["page"](), "run make docs"
