"""Follows every link of a built site: ``python scripts/check_site.py FOLDER``.

Ends with 1 and one line for each link that leads nowhere, each anchor that is not there, and each
thing that a browser would load from another host.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "link": "href"}
"""Elements whose target a browser loads without being asked to."""
NOT_LOADED = {"canonical", "alternate", "next", "prev"}


@dataclass
class Seen(HTMLParser):
    """What one page names: ids, links, and what it loads."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one element."""
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if "mermaid" in values.get("class", "").split():
            self.loads.append("https://mermaid")  # The theme fetches what draws these.
        target = values.get(LOADED.get(tag, ""))
        if target and values.get("rel") not in NOT_LOADED:
            self.loads.append(target)


def read(page: Path) -> Seen:
    """What ``page`` names."""
    seen = Seen()
    seen.feed(page.read_text())
    return seen


def problems(site: Path) -> Iterator[str]:
    """One line for each thing that is wrong with the site."""
    pages = {page: read(page) for page in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no page"
    for page, seen in pages.items():
        name = page.relative_to(site)
        if name == Path("404.html"):
            continue  # Its links are from the root of the host, wherever it is shown.
        for target in (*seen.links, *seen.loads):
            if problem := _wrong(target, page, pages):
                yield f"{name}: {target}: {problem}"
        yield from (f"{name}: {t}: from another host" for t in seen.loads if urlsplit(t).netloc)
    for sheet in sorted(site.rglob("*.css")):
        if "url(http" in sheet.read_text() or "@import" in sheet.read_text():
            yield f"{sheet.relative_to(site)}: loads from elsewhere"


def _wrong(target: str, page: Path, pages: dict[Path, Seen]) -> str | None:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    place = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if place.is_dir():
        place = place / "index.html"
    if not place.exists():
        return "not there"
    anchor = unquote(parts.fragment)
    if anchor and place in pages and anchor not in pages[place].ids and anchor != "__search":
        return "no such anchor"
    return None


def main(arguments: list[str]) -> int:
    """Print what is wrong; 1 if anything is."""
    (folder,) = arguments
    site = Path(folder).resolve()
    found = list(problems(site))
    for line in found:
        print(line, file=sys.stderr)
    count = len(list(site.rglob("*.html")))
    print(f"{count} pages, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
