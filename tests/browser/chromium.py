"""A headless Chromium that says what a person would see: errors of the console, what sticks out sideways, whether the page is empty."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)
PHONE, DESK = (390, 844), (1280, 900)


def missing() -> str | None:
    """Why no browser can be started; None where one can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install '.[browser]')"
    if BROWSER is None or DRIVER is None:
        return "chromium and chromedriver are not installed (apt-get install chromium chromium-driver)"
    return None


@contextmanager
def browser() -> Iterator[Chrome]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield chrome
    finally:
        chrome.quit()


def look(chrome: Chrome, address: str, size: tuple[int, int], picture: Path | None = None) -> None:
    """Open a page at a size of the window, in pixels, and keep a picture of it, from its top to at most 6,000 pixels below."""
    chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE},
    )
    chrome.get(address)
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        height = min(chrome.execute_script("return document.documentElement.scrollHeight"), 6000)
        clip = {"x": 0, "y": 0, "width": size[0], "height": height, "scale": 1}
        shot = chrome.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        picture.write_bytes(base64.b64decode(shot["data"]))


def console_errors(chrome: Chrome) -> list[str]:
    """What the console says is an error, since it was asked last."""
    return [entry["message"] for entry in chrome.get_log("browser") if entry["level"] == "SEVERE"]


def sideways(chrome: Chrome) -> int:
    """By how many pixels the page is wider than the window."""
    return chrome.execute_script("return document.documentElement.scrollWidth - window.innerWidth")


def visible_text(chrome: Chrome, part: str = "body") -> str:
    """The text of the first element that a selector finds: a page's menus are no content."""
    return chrome.execute_script("return document.querySelector(arguments[0]).innerText", part)


def outside_requests(chrome: Chrome, own: str) -> list[str]:
    """The addresses that the page asked for and that do not begin with `own`."""
    asked = chrome.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    return [address for address in asked if not address.startswith((own, "data:", "blob:"))]
