"""What the site needs beyond mkdocs: pages for the files outside ``docs`` that pages link to, and
pictures that follow the palette of the reader.

mkdocs calls the functions named ``on_...``. A link that leaves ``docs`` is kept as it is on disk,
where code hosts follow it; on the site it leads to a page made of that file.
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

LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?(\))")
NAMED = re.compile(r"\[[\w./-]+\.md\](?=\((?!\w+:)([^)\s#]+))")
CODE = re.compile(r"(^ *(```+|~~~+).*?^ *\2[ \t]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*pictures/([\w-]+)\.svg"\s*/?>')
STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
LANGUAGES = {
    ".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml",
    ".json": "json", ".tf": "hcl", ".hcl": "hcl", "Dockerfile": "docker",
}  # fmt: skip


def outside_links(text: str, folder: str) -> set[str]:
    """The paths outside ``docs``, from the root, that Markdown ``text`` in ``folder`` links to."""
    found: set[str] = set()

    def note(path: str) -> str:
        if not path.startswith(f"{DOCS}/"):
            found.add(path)
        return path

    _each_link(text, folder, note)
    return found


def site_path(path: str) -> str:
    """Where the site has the file, or the folder, at ``path`` from the root."""
    if path in ("README.md", DOCS):
        return "index.md"
    if path.startswith(f"{DOCS}/"):
        path = path.removeprefix(f"{DOCS}/")
        return f"{path}/index.md" if (ROOT / DOCS / path).is_dir() else path
    if (ROOT / path).is_dir():
        return f"{OUTSIDE}/{path}/index.md"
    if path.endswith("README.md"):
        return f"{OUTSIDE}/{path.removesuffix('README.md')}index.md"
    return f"{OUTSIDE}/{path}" if path.endswith(".md") else f"{OUTSIDE}/{path}.md"


def rewritten(text: str, path: str) -> str:
    """Markdown ``text`` of the file at ``path``, with links as they are on the site: to its own
    places, and with the title of a page in place of the name of its file."""
    here = posixpath.dirname(site_path(path))
    folder = posixpath.dirname(path)

    def titled(found: re.Match[str]) -> str:
        target = ROOT / posixpath.normpath(posixpath.join(folder, found[1]))
        title = TITLE.search(target.read_text()) if target.is_file() else None
        return f"[{title[1]}]" if title else found[0]

    text = _outside_code(text, lambda part: NAMED.sub(titled, part))
    return _each_link(
        text, folder, lambda target: posixpath.relpath(site_path(target), here or ".")
    )


def shown(path: str) -> str:
    """The page that shows the file, or the folder, at ``path`` from the root."""
    place = ROOT / path
    if place.is_dir():
        readme = place / "README.md"
        if readme.exists():
            return rewritten(readme.read_text(), f"{path}/README.md")
        names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in place.iterdir())
        return _hidden(f"# {path}\n\n" + "".join(f"* `{name}`\n" for name in names))
    if path.endswith(".md"):
        return rewritten(place.read_text(), path)
    language = LANGUAGES.get(place.suffix or place.name, "text")
    return _hidden(f"# {path}\n\n``````{language}\n{place.read_text()}\n``````\n")


def on_files(files: Files, config: Any) -> Files:
    """Add a page for all that is linked to outside ``docs``, and for what that links to."""
    waiting: set[str] = set()
    for file in files.documentation_pages():
        folder = posixpath.dirname(f"{DOCS}/{file.src_uri}")
        waiting |= outside_links(file.content_string, folder)
    done: set[str] = set()
    while waiting:
        path = waiting.pop()
        uri = site_path(path)
        if uri in done or not (ROOT / path).exists() or uri == "index.md":
            continue  # What is not there stays a broken link, which the strict build names.
        done.add(uri)
        readme = ROOT / path / "README.md"
        source = readme if readme.is_file() else ROOT / path
        if source.suffix == ".md":
            waiting |= outside_links(source.read_text(), os.path.relpath(source.parent, ROOT))
        hidden = InclusionLevel.NOT_IN_NAV  # Unless the nav names it.
        files.append(File.generated(config, uri, content=shown(path), inclusion=hidden))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links of the pages in ``docs`` lead to what ``on_files`` added."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    elif "\n## " not in markdown:
        page.meta["hide"] = ["toc"]  # Room for a wide table, and nothing to list.
    if page.file.src_uri.startswith(f"{OUTSIDE}/"):
        return markdown
    return rewritten(markdown, f"{DOCS}/{page.file.src_uri}")


def on_page_content(html: str, **_: Any) -> str:
    """Put pictures of ours into the page itself, where ``site.css`` colours them by palette."""

    def inlined(found: re.Match[str]) -> str:
        svg = (ROOT / DOCS / "pictures" / f"{found[2]}.svg").read_text()
        return STYLE.sub("", svg)

    return PICTURE.sub(inlined, html)


def _each_link(text: str, folder: str, change: Callable[[str], str]) -> str:
    """``text`` with ``change`` applied to each relative link, given and taken from the root."""

    def one(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        if target.startswith(".."):
            return found[0]
        return f"{found[1]}{change(target)}{found[3] or ''}{found[4]}"

    return _outside_code(text, lambda part: LINK.sub(one, part))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts: list[str] = []
    at = 0
    for code in CODE.finditer(text):
        parts += [change(text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, change(text[at:])])


def _hidden(text: str) -> str:
    """A page that the site's search leaves out."""
    return f"---\nsearch:\n  exclude: true\n---\n{text}"
