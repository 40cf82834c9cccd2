"""The site in a real browser: readable on a phone, search finds, no request leaves it. `make browser` builds it first."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser.chromium import (
    DESK,
    PHONE,
    browser,
    console_errors,
    look,
    missing,
    outside_requests,
    sideways,
    visible_text,
)

SITE = Path(__file__).parents[2] / "build" / "site"
PICTURES = SITE.parent / "pictures"
PAGES = (
    "index",
    "quickstart",
    "guides/refused",
    "language",
    "styles",
    "model-types",
    "api",
    "diagnostics",
    "diagnostics/SP401",
    "cli",
)

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.skipif(not SITE.exists(), reason="the site is not built (make docs)"),
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def chrome():
    with browser() as chrome:
        yield chrome


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_readable(chrome, address, page, size):
    look(chrome, f"{address}/{page}.html", size, PICTURES / f"{page.replace('/', '-')}-{size[0]}.png")
    assert console_errors(chrome) == []
    assert sideways(chrome) <= 0
    assert len(visible_text(chrome)) > 400
    assert outside_requests(chrome, address) == []


def test_search_finds_a_diagnostic(chrome, address):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    look(chrome, f"{address}/index.html", DESK)
    chrome.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys("SP401 partial sum")
    found = (By.CSS_SELECTOR, ".md-search-result__link[href*='SP401']")
    WebDriverWait(chrome, 20).until(lambda c: c.find_elements(*found))
    assert console_errors(chrome) == []


def test_what_sticks_out_is_noticed(chrome, address):
    look(chrome, f"{address}/index.html", PHONE)
    chrome.execute_script("document.body.insertAdjacentHTML('beforeend', '<div style=\"width: 2000px\">wide</div>')")
    assert sideways(chrome) > 0
