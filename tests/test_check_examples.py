"""The page of each code: its bad example gives the code and nothing else, its good one is clean."""

from importlib.util import find_spec

import pytest

from shardplan.compiler import bind, check
from shardplan.core.diagnostics import Code
from tests.examples import findings

CODES = (*bind.CODES, *check.CODES)
WITHOUT_EXAMPLE = {"SP525", "SP555", "SP556", "SP557"}  # what no command line says; a package that is optional


def with_examples() -> list[Code]:
    absent = {"SP551"} if find_spec("megatron_fsdp") else set()
    return [code for code in CODES if code.code not in WITHOUT_EXAMPLE | absent]


@pytest.mark.parametrize("code", with_examples(), ids=lambda code: code.code)
def test_the_bad_example_gives_its_code_alone(code: Code):
    assert {finding.code for finding in findings(code.bad)} == {code.code}


@pytest.mark.parametrize("code", with_examples(), ids=lambda code: code.code)
def test_the_good_example_is_clean(code: Code):
    assert findings(code.good) == ()


def test_every_code_is_told_once_and_has_a_page():
    assert len({code.code for code in CODES}) == len(CODES)
    for code in CODES:
        assert code.title == code.title[0].lower() + code.title[1:] or code.title.startswith("FSDP"), code.title
        assert code.text.strip()
        assert (code.code in WITHOUT_EXAMPLE) == (not code.bad)
