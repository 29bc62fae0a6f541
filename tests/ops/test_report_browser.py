"""The audit's page in a real browser: its drawings, and that it makes no requests."""

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from objkv.ops.audit.html.page import html_report
from tests.support.audit import CHAT, CODE, large_report, sample_report
from tests.support.browser import Browser, browser_programs, open_browser

pytestmark = pytest.mark.xdist_group("browser")
NODES = 2_000
NAMESPACES = 500


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
    large = html_report(large_report(namespaces=NAMESPACES, nodes=NODES))
    (folder / "large.html").write_text(large, "utf-8")
    return folder


@pytest.fixture
def sample(browser: Browser, pages: Path) -> Iterator[Browser]:
    """The sample's page. After each test, it must have made no requests and logged no errors."""
    yield from _watched(browser, pages / "sample.html")


@pytest.fixture
def large(browser: Browser, pages: Path) -> Iterator[Browser]:
    yield from _watched(browser, pages / "large.html")


def _watched(browser: Browser, page: Path) -> Iterator[Browser]:
    browser.open(page)
    yield browser
    assert browser.complaints() == []
    asked = browser.requests()
    assert page.as_uri() in asked
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_a_page_that_asked_somebody_would_be_noticed(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "asking.html"
    page.write_text('<!doctype html><img src="http://127.0.0.1:9/x"><script>nothing()</script>')
    browser.open(page)
    browser.until("document.readyState === 'complete'")
    assert "http://127.0.0.1:9/x" in browser.requests()
    assert any("nothing is not defined" in told for told in browser.complaints())


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


def test_the_tree_is_drawn_to_scale(sample: Browser) -> None:
    boxes = sample.boxes()
    whole = boxes["Everything, 272 MiB, 68 chunks, 1,296 hits"]
    trunk = next(box for name, box in boxes.items() if name.startswith("You are a helpful"))
    alone = next(box for name, box in boxes.items() if name.startswith("2c2c2c2c"))
    # 176 MiB with all that is below the trunk, and 96 MiB.
    assert trunk[2] / whole[2] == pytest.approx(176 / 272, abs=0.005)
    assert alone[2] / whole[2] == pytest.approx(96 / 272, abs=0.005)
    assert alone[0] == pytest.approx(trunk[0] + trunk[2], abs=1)
    assert trunk[1] == alone[1] > whole[1]


def test_what_is_hit_more_is_painted_darker(sample: Browser) -> None:
    picture = sample.picture("#icicle")
    boxes = sample.boxes()
    light: dict[str, int] = {}
    for start in ("You are a helpful", "2c2c2c2c"):
        x, y, width = next(box for name, box in boxes.items() if name.startswith(start))
        pixel = picture.getpixel((int(x + width - 12), int(y + 6)))
        assert isinstance(pixel, tuple)
        light[start] = sum(pixel)
    assert light["You are a helpful"] < light["2c2c2c2c"] < 3 * 245


def test_a_click_goes_into_a_box_and_escape_leads_back(sample: Browser) -> None:
    before = sample.boxes()
    sample.find('.box[aria-label^="2c2c2c2c"]').click()
    inside = sample.boxes()
    whole = before["Everything, 272 MiB, 68 chunks, 1,296 hits"][2]
    name = next(one for one in inside if one.startswith("2c2c2c2c"))
    assert inside[name][2] == pytest.approx(whole, abs=1)
    assert not any(one.startswith("You are a helpful") for one in inside)
    home = 'acme/chat-8b · <script>alert("x")</script>'
    assert sample.texts("#tree-path button") == ["Everything", home, "2c2c2c2c"]
    assert "24" in sample.find("#tree-detail dl").text
    sample.press("ESCAPE")
    sample.press("ESCAPE")
    assert sample.boxes() == before


def test_the_tree_can_be_walked_with_the_keyboard_alone(sample: Browser) -> None:
    sample.driver.execute_script("document.querySelector('.box[tabindex=\"0\"]').focus()")
    for key in ("ARROW_DOWN", "ARROW_RIGHT", "ARROW_DOWN"):
        sample.press(key)
    active = sample.driver.switch_to.active_element
    assert (active.get_attribute("aria-label") or "").startswith("2c2c2c2c, 96.0 MiB, 24 chunks")
    assert active.get_attribute("aria-level") == "3"
    assert CODE in sample.find("#tree-detail").text or "2c" * 20 in sample.find("#tree-detail").text
    sample.press("ENTER")
    assert sample.texts("#tree-path button")[-1] == "2c2c2c2c"


def test_width_colour_and_search_change_the_picture(sample: Browser) -> None:
    sample.find('#tree-width option[value="leaves"]').click()
    trunk = next(box for name, box in sample.boxes().items() if name.startswith("You are a"))
    alone = next(box for name, box in sample.boxes().items() if name.startswith("2c2c2c2c"))
    assert trunk[2] / alone[2] == pytest.approx(40, rel=0.1)
    sample.find('#tree-colour option[value="space"]').click()
    assert "search" in sample.find("#tree-legend").text
    sample.find("#tree-find").send_keys("2c2c2c")
    dim = sample.texts(".box.dim")
    assert any(text.startswith("You are a helpful") for text in dim)
    assert not any(text.startswith("2c2c") for text in dim)


def test_what_others_wrote_is_shown_and_not_obeyed(sample: Browser) -> None:
    """The sample has a tenant that is a script, and a text with markup."""
    assert '<script>alert("x")</script>' in column(sample, "tenants", 1)
    assert sample.every("main script") == []
    assert sample.every("main b") == []
    assert any("<b>Acme</b>" in name for name in sample.boxes())


def test_a_page_of_500_namespaces_and_2000_boxes_shows_some_and_all_on_demand(
    large: Browser,
) -> None:
    assert len(column(large, "namespaces", 1)) == 12
    more = large.find("#namespaces .controls button")
    assert more.text == f"Show all {NAMESPACES}"
    more.click()
    assert len(column(large, "namespaces", 1)) == NAMESPACES
    large.find("#namespaces input").send_keys("acme/chat-70b")
    assert set(column(large, "namespaces", 2)) == {"acme/chat-70b"}
    drawn = large.boxes()
    assert 100 < len(drawn) <= NODES + 10
    whole = large.find("#icicle").size["width"]
    assert all(x >= -1 and x + width <= whole + 1 for x, _, width in drawn.values())


def test_boxes_of_one_level_never_overlap(large: Browser) -> None:
    rows: dict[float, list[tuple[float, float]]] = {}
    for x, y, width in large.boxes().values():
        rows.setdefault(y, []).append((x, width))
    assert len(rows) > 10
    for row in rows.values():
        row.sort()
        for (x, width), (following, _) in pairwise(row):
            assert x + width <= following + 0.6


def test_the_page_is_readable_on_a_narrow_screen(sample: Browser) -> None:
    sample.resize(420, 900)
    sample.until("document.getElementById('icicle').clientWidth < 420")
    assert sample.driver.execute_script("return document.documentElement.scrollWidth") <= 420


@pytest.mark.parametrize("name", ["sample", "large"])
@pytest.mark.parametrize("width", [1265, 1280, 1360])
def test_every_table_fits_into_its_card_on_a_common_screen(
    browser: Browser, pages: Path, name: str, width: int
) -> None:
    """1265 is the width of a window of 1280 with a scrollbar."""
    browser.open(pages / f"{name}.html")
    browser.resize(width, 900)
    browser.until("document.documentElement.clientWidth === arguments[0]", width)
    script = """
        return [...document.querySelectorAll(".over")].map((e) =>
          [e.firstElementChild.id, e.scrollWidth - e.clientWidth])
    """
    tables = browser.driver.execute_script(script)
    assert "roots-table" in [table for table, _ in tables]
    assert [table for table, too_wide in tables if too_wide > 0] == []


def test_a_table_that_is_too_wide_scrolls_under_its_first_column(sample: Browser) -> None:
    sample.resize(700, 900)
    sample.until("document.documentElement.clientWidth === 700")
    script = """
        const over = document.querySelector("#roots .over");
        over.scrollLeft = 1e6;
        const edges = (e) => [e.getBoundingClientRect().left, e.getBoundingClientRect().right];
        const [first, last] = ["td", "td:last-child"].map((e) => edges(over.querySelector(e)));
        return [edges(over), first, last, over.scrollLeft];
    """
    card, first, last, scrolled = sample.driver.execute_script(script)
    assert scrolled > 100
    assert first[0] == pytest.approx(card[0], abs=1)
    assert last[1] <= card[1]
    assert sample.driver.execute_script("return document.documentElement.scrollWidth") <= 700


def test_every_field_and_button_has_a_name(sample: Browser) -> None:
    script = """
        return [...document.querySelectorAll("button, select, input, svg[role=img], nav, section")]
          .filter((e) => !(e.textContent.trim() || e.getAttribute("aria-label") || e.title ||
                           e.closest("label"))).map((e) => e.outerHTML)
    """
    assert sample.driver.execute_script(script) == []
    ids = re.findall(r'href="#([a-z]+)"', sample.driver.page_source)
    assert [name for name in ids if not sample.every(f"#{name}")] == []
    assert CHAT[:8] in sample.find("#sharing").text
