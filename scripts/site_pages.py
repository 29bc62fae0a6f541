"""mkdocs calls these functions: Markdown outside ``docs`` becomes pages of the site, and links to
all other files lead to the repository."""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)\s#]+)")
PLACES = {"README.md": "index.md", "docs": "index.md"}
"""The page of the site for each Markdown file of the repository, and for each folder with one."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    PLACES.update({f"docs/{file.src_uri}": file.src_uri for file in files})
    for folder in ("", "benchmarks", "examples", "terraform"):
        for path in sorted((ROOT / folder).glob("**/*.md" if folder else "*.md")):
            name = path.relative_to(ROOT).as_posix()
            if name in PLACES or "/." in name:
                continue
            PLACES[name] = f"repository/{name}".replace("README.md", "index.md")
            if path.name == "README.md":
                PLACES[posixpath.dirname(name)] = PLACES[name]
            hidden = InclusionLevel.NOT_IN_NAV  # unless the navigation lists it
            generated = File.generated(
                config, PLACES[name], content=path.read_text(), inclusion=hidden
            )
            files.append(generated)
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, **_: Any) -> str:
    """Let links lead to the pages of the site."""
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    elif "\n## " not in markdown:
        page.meta["hide"] = ["toc"]  # Room for a wide table, and nothing to list.
    source = next(path for path, place in reversed(PLACES.items()) if place == here)
    folder = source if (ROOT / source).is_dir() else posixpath.dirname(source)

    def placed(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        place = PLACES.get(target)
        if place is None and not os.path.exists(ROOT / target):
            return found[0]  # mkdocs reports it
        if place is None:
            return f"{found[1]}{config.repo_url.rstrip('/')}/blob/HEAD/{target}"
        return found[1] + posixpath.relpath(place, posixpath.dirname(here) or ".")

    return LINK.sub(placed, markdown)
