"""Each case of the tree gives exactly its text, and each code has a case."""

import math

import pytest

from shardplan.layout import model
from shardplan.layout.check import Search
from shardplan.render.catalog import catalog
from tests.case_tree import ROOT, Case, cases, run_command

CASES = list(cases())

# Codes that no command line can give, and the test that shows them.
ELSEWHERE: dict[str, str] = {
    "SP520": "tests/test_twin.py::test_a_small_copy_that_stays_large_is_refused",
    "SP521": "tests/test_twin.py::test_own_modules_that_cannot",
    "SP522": "tests/test_twin.py::test_own_modules_that_cannot",
    "SP524": "tests/test_live.py::test_what_cannot_be_carried_over_is_refused_by_name",
    "SP422": "tests/test_proof.py::test_a_sequence_that_tp_does_not_divide_is_refused",
    "SP525": "tests/test_live.py::test_hooks_on_replaced_parameters_are_refused",
    "SP526": "tests/test_live.py::test_another_model_than_the_original_is_refused",
    "SP530": "tests/test_cli_init.py::test_nothing_can_be_split",
    "SP531": "tests/test_cli_init.py::test_no_overlay_is_found",
    "SP532": "tests/test_cli_init.py::test_what_stays_whole_is_said",
    "SP512": "tests/test_models_auto.py::test_several",
    "SP555": "tests/test_check_sections.py::test_gradients_that_megatron_fsdp_would_not_sum_are_refused",
    "SP556": "tests/test_check_sections.py::test_what_megatron_fsdp_takes",
    "SP557": "tests/test_check_sections.py::test_what_megatron_fsdp_takes",
    "SP560": "tests/test_estimate.py::test_a_model_that_looks_at_values_is_refused",
    "SP550": "tests/test_check_sections.py::test_axes_that_are_not_supported_are_refused",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, monkeypatch: pytest.MonkeyPatch):
    searches: list[Search] = []
    monkeypatch.setattr(model, "Search", lambda: searches.append(Search(seconds=math.inf)) or searches[-1])
    code, output = run_command(case.words)
    assert not any(search.over for search in searches), "a search that ends early finds what the machine had time for"
    again = f"look at it, then run `python tests/update_cases.py {case.name}`"
    assert case.out.exists(), f"{case.name} has no expected text: {again}"
    assert output == case.out.read_text("utf-8"), f"the output of {case.name} has changed: {again}"
    assert code == case.expected_exit


@pytest.mark.parametrize("case", [case for case in CASES if case.code], ids=lambda case: case.name)
def test_a_case_shows_the_code_that_it_is_named_after(case: Case):
    assert f"[{case.code}]" in case.out.read_text("utf-8")


def test_every_code_has_a_case():
    shown = "".join(case.out.read_text("utf-8") for case in CASES if case.out.exists())
    missing = [code for code in catalog() if f"[{code}]" not in shown and code not in ELSEWHERE]
    assert not missing, f"add tests/cases/err/<CODE>-<slug>.yaml for {', '.join(missing)}"


def test_no_text_is_left_without_its_plan():
    known = {case.out.with_suffix(suffix) for case in CASES for suffix in (".out", ".args")}
    folders = {case.out.parent for case in CASES}
    stray = [path.name for folder in folders for path in folder.glob("*.*") if path.suffix in {".out", ".args"}]
    assert [name for name in stray if name not in {path.name for path in known}] == []


@pytest.mark.parametrize("code", ELSEWHERE)
def test_a_code_that_is_shown_elsewhere_is(code: str):
    path, _, name = ELSEWHERE[code].partition("::")
    assert f"def {name}(" in (ROOT / path).read_text("utf-8")


def test_no_two_cases_share_their_text():
    texts = [case.out for case in CASES]
    assert sorted(texts) == sorted(set(texts))
