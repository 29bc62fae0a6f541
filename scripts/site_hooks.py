"""Additions to mkdocs: pages for files outside ``docs`` that pages link to, folders shown as one
page, and pictures that follow the reader's palette.

mkdocs calls the functions named ``on_...``. Links are written for code hosts, relative to the file
on disk. On the site a link to a Markdown file outside ``docs`` leads to a page made of that file, a
link into a folder of ``TOGETHER`` to its section of the folder's one page, and a link to any other
file to its section of the page ``FILES_PAGE``.
"""

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs"
OUTSIDE = "repository"
"""The folder of the site that holds what lies outside ``docs``."""

FILES_PAGE = f"{OUTSIDE}/files.md"
"""The page that shows all other files that pages link to, one section each."""
TOGETHER = {"docs/decisions": "docs/decisions/index.md", "terraform": "terraform/README.md"}
"""Folders whose Markdown files are sections of one page, by the file that page begins with."""

LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?(\))")
NAMED = re.compile(r"\[[\w./-]+\.md\](?=\((?!\w+:)([^)\s#]+))")
CODE = re.compile(r"(^ *(```+|~~~+).*?^ *\2[ \t]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*pictures/([\w-]+)\.svg"\s*/?>')
STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
LANGUAGES = {
    ".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml",
    ".json": "json", ".tf": "hcl", ".hcl": "hcl", "Dockerfile": "docker",
}  # fmt: skip


def outside_links(text: str, folder: str) -> set[str]:
    """The paths outside ``docs``, from the root, that Markdown ``text`` in ``folder`` links to."""
    found: set[str] = set()

    def note(path: str, _anchor: str) -> str:
        if not path.startswith(f"{DOCS}/"):
            found.add(path)
        return path

    _each_link(text, folder, note)
    return found


def source(path: str) -> str:
    """The file that is shown for ``path`` from the root: a folder's first page, else ``path``."""
    first = {"": "README.md", DOCS: f"{DOCS}/index.md"}.get(path, f"{path}/README.md")
    if f"{path}/index.md" in TOGETHER.values():
        return f"{path}/index.md"
    return first if (ROOT / first).is_file() else path


def site_place(path: str) -> tuple[str, str]:
    """The page of the site that shows the file or folder at ``path`` from the root, and the id of
    its section there; no id if it is the page itself."""
    path = source(path)
    for folder, first in TOGETHER.items():
        if path.endswith(".md") and path != first and path.startswith(f"{folder}/"):
            name = path.removeprefix(f"{folder}/").removesuffix(".md").removesuffix("/README")
            return site_place(first)[0], name.replace("/", "-").lower()
    if path == "README.md":
        return "index.md", ""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/"), ""
    if not path.endswith(".md"):
        return FILES_PAGE, re.sub(r"\W+", "-", path).lower()
    return (
        f"{OUTSIDE}/{path.removesuffix('README.md')}{'index.md' * path.endswith('README.md')}",
        "",
    )


def rewritten(text: str, path: str) -> str:
    """Markdown ``text`` of the file at ``path``, with its links as they are on the site, and with a
    page's title in place of its file name."""
    here = posixpath.dirname(site_place(path)[0])
    folder = posixpath.dirname(path)

    def titled(found: re.Match[str]) -> str:
        target = ROOT / posixpath.normpath(posixpath.join(folder, found[1]))
        title = TITLE.search(target.read_text()) if target.is_file() else None
        return f"[{title[1]}]" if title else found[0]

    def placed(target: str, anchor: str) -> str:
        page, section = site_place(target)
        anchor = "-".join(filter(None, (section, anchor)))
        return posixpath.relpath(page, here or ".") + (f"#{anchor}" if anchor else "")

    text = _outside_code(text, lambda part: NAMED.sub(titled, part))
    return _each_link(text, folder, placed)


def section(path: str) -> str:
    """The file or folder at ``path`` as a section of a longer page."""
    _, name = site_place(path)
    place = ROOT / path
    if place.is_dir():
        names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in place.iterdir())
        return f"## {path} {{: #{name} }}\n\n" + "".join(f"* `{name}`\n" for name in names)
    if path.endswith(".md"):

        def lower(found: re.Match[str]) -> str:
            anchor = name if found[1] == "#" else f"{name}-{_slug(found[2])}"
            return f"{found[1]}# {found[2]} {{: #{anchor} }}"

        text = rewritten(place.read_text(), path)
        return _outside_code(text, lambda part: HEADING.sub(lower, part))
    language = LANGUAGES.get(place.suffix or place.name, "text")
    return f"## {path} {{: #{name} }}\n\n``````{language}\n{place.read_text()}\n``````\n"


def together(path: str) -> str:
    """The page that begins with the file at ``path`` and goes on with the rest of its folder, if it
    is one of ``TOGETHER``; else the file alone."""
    folders = [folder for folder, first in TOGETHER.items() if first == path]
    rest = [
        os.path.relpath(file, ROOT)
        for folder in folders
        for file in sorted((ROOT / folder).rglob("*.md"))
        if not any(part[0] == "." for part in file.relative_to(ROOT).parts)
    ]
    parts = [rewritten((ROOT / path).read_text(), path)]
    return "\n\n".join([*parts, *(section(file) for file in rest if file != path)])


def on_files(files: Files, config: Any) -> Files:
    """Add pages for everything outside ``docs`` that pages link to, and for everything those link
    to."""
    for file in list(files.documentation_pages()):
        if site_place(f"{DOCS}/{file.src_uri}")[1]:
            files.remove(file)  # It is a section of another page.
    waiting = {os.path.relpath(page, ROOT) for page in (ROOT / DOCS).rglob("*.md")}
    seen: set[str] = set()
    listed: list[str] = []
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).exists():
            continue  # A missing target stays a broken link, which the strict build reports.
        seen.add(path)
        page, name = site_place(path)
        if page == FILES_PAGE:
            listed.append(path)
            continue
        waiting |= {source(p) for p in outside_links(_read(path), posixpath.dirname(path))}
        if page.startswith(f"{OUTSIDE}/") and not name:
            # A page that the navigation lists is in the navigation all the same.
            hidden = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, page, content=together(path), inclusion=hidden))
    text = "# Files of the repository\n\n" + "\n".join(section(path) for path in sorted(listed))
    hidden = InclusionLevel.NOT_IN_NAV
    files.append(File.generated(config, FILES_PAGE, content=_unsearched(text), inclusion=hidden))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links of the pages in ``docs`` lead to the pages that ``on_files`` added."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    elif "\n## " not in markdown:
        page.meta["hide"] = ["toc"]  # Room for a wide table, and nothing to list.
    if page.file.src_uri.startswith(f"{OUTSIDE}/"):
        return markdown
    path = f"{DOCS}/{page.file.src_uri}"
    return together(path) if path in TOGETHER.values() else rewritten(markdown, path)


def on_page_content(html: str, **_: Any) -> str:
    """Put pictures of ours into the page itself, where ``site.css`` colours them by palette."""

    def inlined(found: re.Match[str]) -> str:
        svg = (ROOT / DOCS / "pictures" / f"{found[2]}.svg").read_text()
        return STYLE.sub("", svg)

    return PICTURE.sub(inlined, html)


def _each_link(text: str, folder: str, change: Callable[[str, str], str]) -> str:
    """``text`` with each relative link replaced by ``change`` of its path from the root and its
    anchor."""

    def one(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        if target.startswith(".."):
            return found[0]
        anchor = (found[3] or "").removeprefix("#")
        return f"{found[1]}{change(target, anchor)}{found[4]}"

    return _outside_code(text, lambda part: LINK.sub(one, part))


def _slug(heading: str) -> str:
    """The anchor that code hosts make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _read(path: str) -> str:
    return (ROOT / path).read_text() if path.endswith(".md") else ""


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts: list[str] = []
    at = 0
    for code in CODE.finditer(text):
        parts += [change(text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, change(text[at:])])


def _unsearched(text: str) -> str:
    """A page that the site's search leaves out."""
    return f"---\nsearch:\n  exclude: true\n---\n{text}"
