"""The site is whole: every page has its place, and every public name is on the page of the Python interface."""

import ast
import re
from pathlib import Path

import pytest

import shardplan
from shardplan.cli.reference import cli_document
from shardplan.language.form import KNOWN_VERSION
from shardplan.report import json as reports
from shardplan.report import lock_json
from tools.api_pages import PAGES, page_document

ROOT = Path(__file__).parent.parent
SITE = ROOT / "build" / "site"
CONFIG = (ROOT / "mkdocs.yml").read_text("utf-8")
# What a page, and what a style, would load from another host.
LOADED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*|<link\b[^>]*\brel=["']?stylesheet[^>]*//[^>]*"""
)
IMPORTED = re.compile(r"""(?:@import|url\()\s*["']?(?:https?:)?//[^)"']*""")


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"^ +- [^:]+: (\S+\.md)$", CONFIG, flags=re.MULTILINE))
    docs = ROOT / "docs"
    written = {str(path.relative_to(docs)) for pattern in ("*.md", "guides/*.md") for path in docs.glob(pattern)}
    assert listed - {"decisions/README.md"} == written
    by_question = (docs / "index.md").read_text("utf-8")
    assert [page for page in sorted(listed - {"index.md"}) if f"({page})" not in by_question] == []


def test_every_public_name_is_on_the_pages_of_the_python_interface():
    """With a docstring, once. Those of the last two pages are not imported from `shardplan` or its rooms of training."""
    *_, others, built_on = PAGES.values()
    named = [name for page in PAGES.values() if page not in (others, built_on) for _, name in page.places]
    training = ast.parse((ROOT / "shardplan" / "runtime" / "training" / "__init__.py").read_text("utf-8")).body[-1]
    assert isinstance(training, ast.Assign)
    public = {*shardplan.__all__, *ast.literal_eval(training.value), "Muon"}
    assert sorted(named) == sorted(public - {"__version__"})


@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_the_python_interface_has_signatures_and_is_read_at_once(page):
    text = page_document(page)
    assert len(text.split()) <= 2_500
    for _, name in PAGES[page].places:
        signature, _, said = text.partition(f"\n## {name}\n\n```python\n")[2].partition("```")
        assert re.search(rf"^(def|class) {name}\b", signature, flags=re.MULTILINE), name
        assert re.match(r"\n\n[^#]", said), f"{name} has no docstring"


def test_the_page_of_what_is_stable_has_the_versions():
    page = (ROOT / "docs" / "stable.md").read_text("utf-8")
    rows = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("|") for line in page.splitlines())
        if len(cells) == 5
    }
    said = {re.sub(r"\]\([^)]*\)|\[", "", name): version for name, version in rows.items() if version.isdigit()}
    assert said == {
        "the plan language": KNOWN_VERSION,
        "the JSON Schema of plans": KNOWN_VERSION,
        "the JSON Schema of reports": reports.VERSION,
        "locks of plans": lock_json.VERSION,
    }
    codes = re.findall(r"^\| (\d) \|", cli_document().partition("## Exit codes")[2], flags=re.MULTILINE)
    (row,) = (line for line in page.splitlines() if "exit-codes" in line)
    assert re.findall(r"\b\d\b", row) == codes


def test_search_of_pages_that_are_opened_as_files_needs_nothing_from_the_net():
    """Material's plugin `offline` writes the index as a script, and loads its worker from another host where none is given."""
    (worker,) = re.findall(r"^  polyfills: \[(\S*iframe-worker\S*)\]", CONFIG, flags=re.MULTILINE)
    assert "  - offline" in CONFIG.splitlines()[CONFIG.splitlines().index("  - search") + 1]
    text = (ROOT / "docs" / worker).read_text("utf-8")
    assert "Permission is hereby granted" in text and len(text) < 4_000


@pytest.mark.skipif(not (SITE / "search").exists(), reason="the site is not built (make docs)")
def test_no_page_of_the_site_loads_anything_from_another_host():
    pages = sorted(SITE.rglob("*.html"))
    assert len(pages) > 100 and (SITE / "search" / "search_index.js").read_text("utf-8").startswith("var __index = {")
    assert [(page.name, found) for page in pages for found in LOADED.findall(page.read_text("utf-8"))] == []
    styles = sorted(SITE.rglob("*.css"))
    assert styles and [found for style in styles for found in IMPORTED.findall(style.read_text("utf-8"))] == []
