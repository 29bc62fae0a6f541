"""The audit's page in a real browser: it makes no requests and obeys nobody."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from objkv.ops.audit.html.page import html_report
from tests.support.audit import sample_report
from tests.support.browser import Browser, browser_programs, open_browser

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if browser_programs() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("chromium and chromium-driver are not installed")
        pytest.skip("needs chromium and chromium-driver")
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "sample.html").write_text(html_report(sample_report()), "utf-8")
    return folder


@pytest.fixture
def sample(browser: Browser, pages: Path) -> Iterator[Browser]:
    """The sample's page. After each test, it must have made no requests and logged no errors."""
    yield from _watched(browser, pages / "sample.html")


def _watched(browser: Browser, page: Path) -> Iterator[Browser]:
    browser.open(page)
    yield browser
    assert browser.complaints() == []
    asked = browser.requests()
    assert page.as_uri() in asked
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_a_script_that_got_into_the_page_would_not_run(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "pierced.html"
    hole = "<script>document.title = 'pierced'</script><img src='http://127.0.0.1:9/y'></main>"
    page.write_text(html_report(sample_report()).replace("</main>", hole), "utf-8")
    browser.open(page)
    browser.until("document.readyState === 'complete'")
    assert browser.driver.title.startswith("objkv audit of")
    assert sum("Content Security Policy" in told for told in browser.complaints()) >= 2


def column(browser: Browser, table: str, number: int) -> list[str]:
    return browser.texts(f"#{table}-table tbody tr:not([hidden]) td:nth-child({number})")


def test_a_click_sorts_a_table_by_numbers_and_another_turns_it_round(sample: Browser) -> None:
    [number] = [
        place
        for place, name in enumerate(sample.texts("#namespaces-table th"), 1)
        if name == "Bytes"
    ]
    head = sample.find(f"#namespaces-table th:nth-child({number}) button")
    falling = ["192 MiB", "96.0 MiB", "7.0 MiB"]
    assert column(sample, "namespaces", number) == falling
    head.click()
    head.click()
    assert column(sample, "namespaces", number) == falling[::-1]
    assert sample.find("#namespaces-table [aria-sort]").get_attribute("aria-sort") == "ascending"
    head.click()
    assert column(sample, "namespaces", number) == falling


def test_what_others_wrote_is_shown_and_not_obeyed(sample: Browser) -> None:
    """The sample has a tenant that is a script."""
    assert '<script>alert("x")</script>' in column(sample, "tenants", 1)
    assert sample.every("main script") == []
    assert any("alert" in name for name in sample.boxes())


def test_nothing_is_wider_than_a_screen_of_1024_pixels(browser: Browser, pages: Path) -> None:
    browser.open(pages / "sample.html", width=1_024)
    browser.until("document.readyState === 'complete'")
    wide = browser.driver.execute_script("""
        const some = document.querySelectorAll(".over, .card, .kind, dl, p");
        return [document.documentElement, ...some]
          .filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
          .map((e) => `${e.tagName} ${e.className}: ${e.textContent.slice(0, 80)}`);
    """)
    assert wide == []


def test_boxes_are_zoomed_by_clicks_and_by_keys(sample: Browser) -> None:
    every = sample.boxes()
    assert any(name.startswith("37 smaller, ") for name in every), every
    [box] = [one for one in sample.every(".box") if one.text.startswith("1d1d1d1d")]
    box.click()
    assert sample.texts("#tree-path button")[-1] == "1d1d1d1d"
    box.send_keys(Keys.ESCAPE)
    assert len(sample.texts("#tree-path button")) == 2
    assert "192 MiB" in sample.find("#tree-detail").text
