"""The site: links that leave the documents, pictures, and the check of what was built."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))


@pytest.fixture(scope="module")
def check() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "check_site.py"))


def found(check: dict[str, Any], site: Path, **pages: str) -> list[str]:
    for name, body in pages.items():
        (site / f"{name}.html").write_text(f"<html><body>{body}</body></html>")
    return list(check["problems"](site))


def test_a_link_out_of_the_documents_leads_to_a_page_of_that_file(hooks: dict[str, Any]) -> None:
    text = hooks["rewritten"]("[rules](../CONTRIBUTING.md#tests)", "docs/format.md")
    assert text == "[rules](repository/CONTRIBUTING.md#tests)"
    text = hooks["rewritten"]("[rules](../../CONTRIBUTING.md)", "docs/decisions/0001-x.md")
    assert text == "[rules](../repository/CONTRIBUTING.md)"


def test_a_link_to_code_leads_to_its_section_of_one_page(hooks: dict[str, Any]) -> None:
    text = hooks["rewritten"]("[rights](../objkv/ops/doctor/access.py)", "docs/access.md")
    assert text == "[rights](repository/files.md#objkv-ops-doctor-access-py)"


def test_a_link_into_a_folder_that_is_one_page_leads_to_its_section(hooks: dict[str, Any]) -> None:
    text = hooks["rewritten"]("[why](decisions/0026-one-guard.md)", "docs/reliability.md")
    assert text == "[why](decisions/index.md#0026-one-guard)"
    text = hooks["rewritten"]("[it](modules/bucket/README.md#inputs)", "terraform/README.md")
    assert text == "[it](index.md#modules-bucket-inputs)"
    text = hooks["rewritten"]("[roles](modules/roles)", "terraform/README.md")
    assert text == "[roles](index.md#modules-roles)"
    text = hooks["rewritten"]("[all](../docs/decisions)", "examples/README.md")
    assert text == "[all](../../decisions/index.md)"


def test_a_page_of_a_whole_folder_holds_every_file_under_its_own_heading(
    hooks: dict[str, Any],
) -> None:
    page = hooks["together"]("docs/decisions/index.md")
    for file in (ROOT / "docs" / "decisions").glob("0*.md"):
        title = file.read_text().splitlines()[0]
        assert f"\n#{title} {{: #{file.stem} }}\n" in page


def test_a_link_from_outside_leads_back_to_the_document(hooks: dict[str, Any]) -> None:
    text = hooks["rewritten"]("[format](docs/format.md), [start](README.md)", "CHANGELOG.md")
    assert text == "[format](../format.md), [start](../index.md)"


def test_a_link_that_is_called_like_its_file_is_called_like_the_page(hooks: dict[str, Any]) -> None:
    text = hooks["rewritten"]("see [format.md](format.md#header), [it](format.md)", "docs/cli.md")
    assert text == "see [Payload format 1](format.md#header), [it](format.md)"


def test_links_in_code_and_to_other_hosts_are_left_as_they_are(hooks: dict[str, Any]) -> None:
    text = "`[a](../b.py)` [c](https://example.com/d.md) [e](#f)\n\n```\n[g](../h.py)\n```\n"
    assert hooks["rewritten"](text, "docs/format.md") == text


def test_a_file_is_shown_whole(hooks: dict[str, Any]) -> None:
    shown = hooks["section"]("scripts/picture.py")
    assert shown.startswith("## scripts/picture.py {: #scripts-picture-py }")
    assert (ROOT / "scripts" / "picture.py").read_text() in shown


def test_a_picture_is_put_into_the_page_without_colours_of_its_own(hooks: dict[str, Any]) -> None:
    html = '<p><img alt="what" src="../pictures/overview.svg" /></p>'
    page = hooks["on_page_content"](html)
    assert "<svg" in page
    assert "<style>" not in page
    assert 'aria-label="Replicas' in page
    assert (
        hooks["on_page_content"]('<img alt="" src="soak.svg" />') == '<img alt="" src="soak.svg" />'
    )


def test_a_site_that_is_whole_has_no_problems(check: dict[str, Any], tmp_path: Path) -> None:
    other = '<h2 id="top">B</h2><a href="https://example.com">out</a>'
    assert found(check, tmp_path, a='<a href="b.html#top">b</a>', b=other) == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('<a href="gone.html">x</a>', "not there"),
        ('<a href="#gone">x</a>', "no such anchor"),
        ('<img src="gone.png">', "not there"),
        ('<script src="https://example.com/a.js"></script>', "from another host"),
        ('<link rel="stylesheet" href="//example.com/a.css">', "from another host"),
        ('<pre class="mermaid">a</pre>', "from another host"),
    ],
)
def test_what_leads_nowhere_or_elsewhere_is_a_problem(
    check: dict[str, Any], tmp_path: Path, body: str, says: str
) -> None:
    problems = found(check, tmp_path, a=body)
    assert len(problems) == 1
    assert says in problems[0]


def test_a_sheet_that_loads_a_font_from_elsewhere_is_a_problem(
    check: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "a.css").write_text("@font-face { src: url(https://example.com/f.woff2) }")
    assert found(check, tmp_path, a="") == ["a.css: loads from elsewhere"]


def test_a_site_without_pages_is_a_problem(check: dict[str, Any], tmp_path: Path) -> None:
    assert found(check, tmp_path) == [f"{tmp_path}: no page"]
    assert check["main"]([str(tmp_path)]) == 1
