"""The page of each code: its wrong example gives the code and nothing else, its right one is clean."""

from importlib.util import find_spec

import pytest

from tests.code_pages import codes_in, examples
from tests.examples import findings

ABSENT = {"SP551"} if find_spec("megatron_fsdp") else set()  # a package that is optional
CODES = [code for code in codes_in("compiler/bind", "compiler/check") if examples(code) and code not in ABSENT]


@pytest.mark.parametrize("code", CODES)
def test_the_wrong_example_gives_its_code_alone(code: str):
    assert {finding.code for finding in findings(examples(code)["Wrong"])} == {code}


@pytest.mark.parametrize("code", CODES)
def test_the_right_example_is_clean(code: str):
    assert findings(examples(code)["Right"]) == ()
