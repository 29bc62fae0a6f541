"""A real browser that looks at a page, and tells what it drew, said and asked for."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--force-prefers-reduced-motion",
    "--force-color-profile=srgb",
)  # fmt: skip
SIZE = (1360, 1000)
PATIENCE_S = 120


def browser_programs() -> tuple[str, str] | None:
    """Debian's Chromium and its driver, if both are installed."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    return (found[0], found[1]) if found[0] and found[1] else None


@contextmanager
def open_browser() -> Iterator["Browser"]:
    programs = browser_programs()
    assert programs is not None
    with TemporaryDirectory(prefix="objkv-browser-") as profile:
        options = ChromeOptions()
        options.binary_location = programs[0]
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={SIZE[0]},{SIZE[1]}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = Chrome(options=options, service=Service(programs[1]))
        try:
            yield Browser(driver)
        finally:
            driver.quit()


class Browser:
    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, *, width: int = SIZE[0]) -> None:
        """Show ``page``, from its beginning; what was before is forgotten."""
        self.driver.get("about:blank")
        self.complaints(), self.requests()
        self.driver.get(page.as_uri())
        metrics = {"width": width, "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def every(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return list(self.driver.execute_script(script, selector))

    def boxes(self) -> list[str]:
        script = """
            return [...document.querySelectorAll(".box")].filter((b) => !b.hidden)
              .map((b) => b.getAttribute("aria-label"));
        """
        return list(self.driver.execute_script(script))

    def until(self, what: str) -> None:
        wait = WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05)
        wait.until(lambda driver: driver.execute_script(f"return {what}"))

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
