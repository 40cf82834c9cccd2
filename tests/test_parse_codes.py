"""The page of every code shows what gives the code, and what does not."""

from pathlib import Path

import pytest

from shardplan.language import lint_plan
from tests.code_pages import codes_in, examples

CODES = [code for code in codes_in("language") if code != "SP101"]  # whose example is a command


def found(example: str, folder: Path) -> set[str]:
    """The codes of an excerpt, read as the file mine.yaml next to base.yaml."""
    (folder / "base.yaml").write_text('version: "1"\ntensor_parallel: {norm: replicate}\n')
    (folder / "mine.yaml").write_text(example if "version:" in example else f'version: "1"\n{example}')
    return {finding.code for finding in lint_plan(folder / "mine.yaml").diagnostics}


@pytest.mark.parametrize("code", CODES)
def test_the_examples_of_a_page(code: str, tmp_path: Path) -> None:
    assert code.startswith("SP1")
    assert found(examples(code)["Wrong"], tmp_path) >= {code}
    assert found(examples(code)["Right"], tmp_path) == set()
