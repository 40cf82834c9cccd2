"""The site in a real browser: readable on a phone, search finds (also in pages opened as files), no request leaves it. `make docs`
builds it first."""

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
    "project/reports/model-types",
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
    assert len(visible_text(chrome, "article")) > 300
    assert outside_requests(chrome, address) == []


def test_no_page_is_wider_than_a_phone(chrome, address):
    """Every page but those of files that pages link, and of single diagnostics and decisions: PAGES has one of each."""
    pages = [path.relative_to(SITE).as_posix() for folder in ("", "guides") for path in (SITE / folder).glob("*.html")]
    assert {"index.html", "compared.html", "guides/refused.html"} <= {*pages}
    wide, empty = {}, {}
    for page in pages:
        look(chrome, f"{address}/{page}", PHONE)
        wide[page], empty[page] = sideways(chrome), len(visible_text(chrome, "article")) < 300
    assert [page for page, by in wide.items() if by > 0] == []
    assert [page for page, is_empty in empty.items() if is_empty] == ["404.html"]
    assert console_errors(chrome) == []


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("place", ["server", "file"])
@pytest.mark.parametrize(
    ("words", "page"),
    [("SP401 partial sum", "SP401"), ("resume", "checkpoints"), ("colwise", "styles"), ("fit --gpus", "cli")],
)
def test_search_finds(chrome, address, words, page, place, size):
    """Among the first results; an option of the command line is a word (docs/assets/search.js)."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    own = address if place == "server" else SITE.as_uri()
    look(chrome, f"{own}/index.html", size)
    if size == PHONE:
        chrome.find_element(By.CSS_SELECTOR, "label.md-header__button[for=__search]").click()
    field = (By.CSS_SELECTOR, "input.md-search__input")
    WebDriverWait(chrome, 20).until(lambda c: c.find_element(*field).is_displayed())
    chrome.find_element(*field).send_keys(words)
    found = (By.CSS_SELECTOR, f".md-search-result__link[href*='{page}']")
    WebDriverWait(chrome, 20).until(lambda c: c.find_elements(*found))
    assert console_errors(chrome) == []
    assert outside_requests(chrome, own) == []


def test_what_sticks_out_is_noticed(chrome, address):
    look(chrome, f"{address}/index.html", PHONE)
    chrome.execute_script("document.body.insertAdjacentHTML('beforeend', '<div style=\"width: 2000px\">wide</div>')")
    assert sideways(chrome) > 0
