"""The page of every code shows what gives the code, and what does not."""

from pathlib import Path
from textwrap import dedent

import pytest

from shardplan.core.diagnostics import Code
from shardplan.language import CODES, lint_plan

PAGES = [code for code in CODES if not dedent(code.bad).strip().startswith("$")]


def found(example: str, folder: Path) -> set[str]:
    """The codes of an excerpt, read as the file mine.yaml beside base.yaml."""
    text = dedent(example).strip() + "\n"
    (folder / "base.yaml").write_text('version: "1"\ntensor_parallel: {norm: replicate}\n')
    (folder / "mine.yaml").write_text(text if "version:" in text else f'version: "1"\n{text}')
    return {finding.code for finding in lint_plan(folder / "mine.yaml").diagnostics}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.code)
def test_the_examples_of_a_page(page: Code, tmp_path: Path) -> None:
    assert found(page.bad, tmp_path) >= {page.code}
    assert found(page.good, tmp_path) == set()


def test_pages_are_complete() -> None:
    assert len(PAGES) >= len(CODES) - 1
    for page in CODES:
        assert page.code.startswith("SP1") and page.title == page.title[:1].lower() + page.title[1:]
        assert len(page.text) > 100 and page.bad and page.good
