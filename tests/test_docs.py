"""What the documents say is there is there."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from objkv.cli.app import all_commands, app
from objkv.config import Config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def documents() -> Iterator[Path]:
    """All that is not in a hidden folder: there, tools come and go while tests are collected."""
    for folder, subfolders, files in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name != "node_modules"]
        yield from (Path(folder, name) for name in files if name.endswith(".md"))


DOCUMENTS = sorted(documents())
FOR_USERS = [path for path in DOCUMENTS if path.name not in ("CHANGELOG.md", "coverage.md")]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
COMMAND = re.compile(r"(?<![\w/.-])objkv ((?:bench )?[a-z]+(?:-[a-z]+)?\b)([^|#;`()]*)")
LOGGED = {"ready", "identity"}
"""Lines of a replica's log begin like a command."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = HEADING.findall(FENCED.sub("", document.read_text()))
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def code(document: Path) -> list[str]:
    """Each line that stands in a fence, lines that go on joined, and each piece of inline code."""
    text = document.read_text().replace("\\\n", " ")
    lines = [line.strip() for fence in FENCED.findall(text) for line in fence.splitlines()[1:-1]]
    return lines + CODE.findall(FENCED.sub("", text))


@cache
def commands() -> dict[str, set[str]]:
    """The options of every command of objkv."""
    return {
        path.removeprefix("objkv").strip(): {
            option for p in command.params for option in (*p.opts, *p.secondary_opts)
        }
        for path, command in all_commands()
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(FENCED.sub("", document.read_text())):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("document", FOR_USERS, ids=name_of)
def test_commands_in_documents_exist_and_have_these_options(document: Path) -> None:
    for line in code(document):
        # Only what is typed: a line of output may say "objkv index", or anything else.
        typed = line.removeprefix("$ ").split("  #")[0]
        for name, rest in COMMAND.findall(typed) if typed.startswith("objkv ") else ():
            if name in LOGGED:
                continue
            assert name in commands(), line
            for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
                known = commands()[name] | {"--help"}
                assert option in known, f"{option} in: {line}"


@pytest.mark.parametrize("document", FOR_USERS, ids=name_of)
def test_variables_in_documents_are_settings(document: Path) -> None:
    known = {f"OBJKV_{name.upper()}" for name in Config.model_fields} | {"OBJKV_CONFIG_FILE"}
    for name in re.findall(r"\bOBJKV_[A-Z0-9_]*[A-Z0-9]\b", document.read_text()):
        assert name in known, name


@pytest.mark.parametrize("document", sorted((DOCS / "operations").glob("*.md")), ids=name_of)
def test_metrics_in_the_handbook_are_told_by_replicas(document: Path) -> None:
    told = (DOCS / "metrics.md").read_text()
    metrics = set(re.findall(r"`(?:vllm:)?objkv_(\w+)", told))
    known = metrics | {name.removesuffix("_total") for name in metrics}
    words = set(Config.model_fields) | {"cached_tokens", "evicted_keys", "identity"}
    text = FENCED.sub("", document.read_text())
    for name in re.findall(r"`vllm:objkv_(\w+)`", text):
        assert name in known, name
    short = r"`((?:load|saves?|lookup|hit|admission|breaker|publish|query|sweep)_[a-z_]+)(\*?)`"
    for name, star in re.findall(short, text):
        found = any(one.startswith(name) for one in known) if star else name in known | words
        assert found, name


def printed(document: Path, command: str) -> Iterator[tuple[str, list[str]]]:
    """Each line ``$ command ...`` in a fence, with the lines that follow it as its output."""
    for fence in FENCED.findall(document.read_text()):
        for shown in ("\n" + fence.rstrip("` \n")).split("\n$ ")[1:]:
            typed, *output = shown.splitlines()
            if typed.startswith(command):
                yield typed, output


@pytest.mark.parametrize("page", ["operations/capacity.md"])
def test_what_objkv_size_prints_in_documents_is_what_it_prints(page: str) -> None:
    shown = list(printed(DOCS / page, "objkv size"))
    assert shown
    for typed, output in shown:
        answer = CliRunner().invoke(app, shlex.split(typed)[1:])
        assert answer.exit_code == 0, answer.output
        lines = [line.rstrip() for line in answer.stdout.strip().splitlines()]
        assert [line.rstrip() for line in output if line.strip()] == lines, typed


def test_the_list_of_decisions_is_complete() -> None:
    listed = (DOCS / "decisions" / "index.md").read_text()
    pages = sorted((DOCS / "decisions").glob("0*.md"))
    assert pages
    for page in pages:
        number, title = int(page.name[:4]), page.read_text().splitlines()[0]
        assert re.search(rf"^\| {number} \| \[[^]]+\]\({page.name}\)", listed, re.MULTILINE), page
        assert title.startswith(f"# {number}"), page


def stale(name: str) -> Any:
    """The script that writes a page, and whether the page is not what it would write."""
    script = runpy.run_path(str(ROOT / "scripts" / name))
    return script["PAGE"].read_text() != script["page"]()


def test_the_configuration_page_lists_the_settings_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert not stale("write_configuration.py"), "run make docs"


def test_the_page_of_options_lists_the_commands_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert not stale("write_cli.py"), "run make docs"


def test_the_page_of_the_python_api_says_what_docstrings_say() -> None:
    assert not stale("write_api.py"), "run make docs"


def test_pictures_are_as_they_are_drawn(tmp_path: Path) -> None:
    drawn = f"import draw_pictures as d, pathlib; d.FOLDER = pathlib.Path({str(tmp_path)!r})"
    each = "[(d.FOLDER / f'{n}.svg').write_text(p().svg()) for n, p in d.PICTURES.items()]"
    subprocess.run(
        [sys.executable, "-c", f"{drawn}; {each}"], cwd=ROOT / "scripts", check=True, timeout=60
    )
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert made == kept, "run make docs"


def test_shell_lines_in_documents_can_be_read() -> None:
    for document in (ROOT / "README.md", DOCS / "quickstart.md"):
        for line in code(document):
            if line.startswith("$ "):
                assert shlex.split(line[2:], comments=True), line
