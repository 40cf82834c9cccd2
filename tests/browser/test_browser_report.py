"""The page of `shardplan show --html` in a real browser: readable on a desk and on a phone, no error, no request, nothing sticks out."""

import pytest

from shardplan.cli.main import main
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
from tests.browser.test_browser_site import PICTURES
from tests.test_report_html import HOSTILE

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

MODEL = "demo/models/qwen3-8b.json"
WORDS = {
    "right": [MODEL, "qwen3", "--mesh", "dp_shard=4,tp=2", "--seq-len", "4096", "--device", "h100"],
    "wrong": [MODEL, "demo/no-head-norms.yaml", "--mesh", "tp=8"],
}
# Texts of a picture that end right of the picture, or of the box that they are written in.
LEAVES_ITS_BOX = """
return [...document.querySelectorAll('svg text')].filter(text => {
  const right = text.getBBox().x + text.getBBox().width;
  const box = text.previousElementSibling;
  const inside = text.classList.contains('on') && box && box.tagName == 'rect';
  return right > text.ownerSVGElement.viewBox.baseVal.width || inside && right > box.getBBox().x + box.getBBox().width;
}).map(text => text.textContent);
"""


@pytest.mark.parametrize("name", WORDS)
def test_the_page_is_readable(name, tmp_path):
    file = tmp_path / "report.html"
    assert main(["show", *WORDS[name], "--html", str(file)]) == (name == "wrong")
    with browser() as chrome:
        for size, place in ((DESK, "desk"), (PHONE, "phone")):
            look(chrome, file.as_uri(), size, PICTURES / f"report-{name}-{place}.png")
            shown = visible_text(chrome)
            assert console_errors(chrome) == [] and outside_requests(chrome, "file:") == []
            assert sideways(chrome) <= 0 and len(shown) > 500
            assert ("SP401" in shown) == (name == "wrong")
            assert chrome.execute_script(LEAVES_ITS_BOX) == []
        if name == "right":
            summary = "document.querySelectorAll('details').length"
            assert chrome.execute_script(f"return {summary}") > 4
            boxes = (
                "[...document.querySelectorAll('.bar span')].filter(s => s.getBoundingClientRect().width > 2).length"
            )
            assert chrome.execute_script(f"return {boxes}") > 5
            leaf = chrome.find_element("xpath", "//div[@class='leaf'][contains(., 'q_proj')]")
            leaf.click()  # a tap: a finger has no pointer to hold over it
            shown = "return getComputedStyle(arguments[0], '::after').content"
            assert "weight: Shard(0)" in chrome.execute_script(shown, leaf)


def test_hostile_names_run_nothing(tmp_path):
    from shardplan.core.mesh import MeshSizes
    from shardplan.core.report import Report
    from shardplan.report.html_report import html_report

    file = tmp_path / "report.html"
    file.write_text(html_report(HOSTILE, HOSTILE, MeshSizes(tp=2), Report(), {}, {}, ("", ())), "utf-8")
    with browser() as chrome:
        look(chrome, file.as_uri(), DESK)
        assert HOSTILE in visible_text(chrome)
        assert chrome.execute_script("return document.images.length + document.scripts.length") == 0
        assert console_errors(chrome) == []
