"""Takes the pictures of an audit's page that stand in the documents.

    python benchmarks/audit.py --chunks 100000 --steps 1 --keep STORE
    objkv audit --bulk-url file://STORE/chunks --index-url sqlite://STORE/index.sqlite \
        --tokenizer STORE/tokenizer.json --show-text --html report.html
    python scripts/take_audit_pictures.py report.html docs/images

Needs Debian's chromium and chromium-driver.
"""

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a script
    sys.path[0] = str(Path(__file__).parents[1])

from tests.support.browser import Browser, open_browser

WIDTH = 1320


def main() -> int:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="what objkv audit --html wrote")
    parser.add_argument("folder", type=Path, help="of the pictures")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    page = given.report.resolve()
    with open_browser() as browser:
        take(browser, page, given.folder)
    with open_browser(dark=True) as browser:
        browser.open(page)
        _scroll(browser, "#tree")
        browser.shoot(given.folder / "audit-dark.png", width=WIDTH, height=1000)
    return 0


def take(browser: Browser, page: Path, folder: Path) -> None:
    """Those on a light ground."""
    browser.open(page)
    browser.shoot(folder / "audit-summary.png", width=WIDTH, height=1240)
    _go_into_largest(browser)
    _scroll(browser, "#tree")
    browser.shoot(folder / "audit-tree.png", width=WIDTH, height=620)
    _scroll(browser, "#trends")
    browser.shoot(folder / "audit-prefixes.png", width=WIDTH, height=960)
    _scroll(browser, "#health")
    browser.shoot(folder / "audit-health.png", width=WIDTH, height=760)


def _go_into_largest(browser: Browser) -> None:
    """Into the largest prefix of the largest namespace, pointing at what it goes on with."""
    browser.driver.execute_script("""
        const of = (level) => [...document.querySelectorAll(`.box[aria-level="${level}"]`)]
          .filter((box) => box.style.display !== "none");
        const largest = (boxes) => boxes.reduce((a, b) => (b.offsetWidth > a.offsetWidth ? b : a));
        largest(of(3)).click();
        const below = of(5).length ? of(5) : of(4);
        largest(below).dispatchEvent(new MouseEvent("mouseenter"));
    """)


def _scroll(browser: Browser, selector: str) -> None:
    browser.driver.execute_script(
        "document.documentElement.style.scrollBehavior = 'auto';"
        "document.querySelector(arguments[0]).scrollIntoView()",
        selector,
    )


if __name__ == "__main__":
    sys.exit(main())
