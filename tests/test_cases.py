"""Each case of the tree prints exactly its text, and each code has a case."""

from pathlib import Path
from typing import Any

import pytest

from shardplan.compiler.layout import model
from shardplan.compiler.layout.layout_check import Search
from shardplan.compiler.layout.solver import block_rules
from shardplan.report.pages import pages
from tests.case_tree import CASES, EXIT_CODES, ROOT, Case, cases, read, run_case, write_expected

ALL = list(cases())

# Codes that no command line can give, and the test that shows them.
ELSEWHERE: dict[str, str] = {
    "SP520": "tests/test_reduced_model.py::test_a_small_copy_that_stays_large_is_refused",
    "SP521": "tests/test_reduced_model.py::test_own_modules_that_cannot",
    "SP522": "tests/test_reduced_model.py::test_own_modules_that_cannot",
    "SP524": "tests/test_live.py::test_what_cannot_be_carried_over_is_refused_by_name",
    "SP422": "tests/test_proof.py::test_a_sequence_that_tp_does_not_divide_is_refused",
    "SP423": "tests/test_other_sides.py::test_a_branch_that_does_not_run_is_a_warning_with_the_line",
    "SP424": "tests/test_section_dtype.py::test_what_breaks_in_the_dtype_is_refused",
    "SP425": "tests/test_distributed_code.py::test_what_asks_is_not_proven",
    "SP525": "tests/test_live.py::test_hooks_on_replaced_parameters_are_refused",
    "SP526": "tests/test_live.py::test_another_model_than_the_original_is_refused",
    "SP530": "tests/test_cli_init.py::test_nothing_can_be_split",
    "SP531": "tests/test_cli_init.py::test_no_overlay_is_found",
    "SP532": "tests/test_cli_init.py::test_what_stays_whole_is_said",
    "SP534": "tests/test_init_structures.py::test_the_line_that_forbids_is_named",
    "SP535": "tests/test_refused_arguments.py::test_init_refuses_what_is_wrong_alone_and_says_so",
    "SP512": "tests/test_models_auto.py::test_several",
    "SP555": "tests/test_check_sections.py::test_gradients_that_megatron_fsdp_would_not_sum_are_refused",
    "SP556": "tests/test_check_sections.py::test_what_megatron_fsdp_takes",
    "SP557": "tests/test_check_sections.py::test_what_megatron_fsdp_takes",
    "SP560": "tests/test_estimate.py::test_a_model_that_looks_at_values_is_refused",
}


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_case(case: Case, monkeypatch: pytest.MonkeyPatch):
    searches: list[Search] = []

    def noted(*args: Any, **given: Any) -> Search:
        searches.append(Search(*args, **given))
        return searches[-1]

    for module in (model, block_rules):
        monkeypatch.setattr(module, "Search", noted)
    code, output = run_case(case)
    assert not any(search.over for search in searches), "a search that ends early finds what the machine had time for"
    again = f"look at it, then run `python tests/update_cases.py {case.name}`"
    assert case.expected is not None, f"{case.name} has no expected text: {again}"
    assert output == case.expected, f"the output of {case.name} has changed: {again}"
    assert code == case.exit_code


@pytest.mark.parametrize("case", [case for case in ALL if case.code], ids=lambda case: case.name)
def test_a_case_shows_the_code_that_it_is_named_after(case: Case):
    assert f"[{case.code}]" in (case.expected or "")


def test_every_code_has_a_case():
    shown = "".join(case.expected or "" for case in ALL)
    missing = [code for code in pages() if f"[{code}]" not in shown and code not in ELSEWHERE]
    assert not missing, f"add tests/cases/err/<CODE>-<slug>.case for {', '.join(missing)}"


def test_the_tree_holds_nothing_else():
    files = {path for folder in EXIT_CODES for path in (CASES / folder).iterdir()}
    assert files == {case.path for case in ALL}


def test_the_expected_text_is_written_under_what_stays(tmp_path: Path):
    above = b"# run: lint plan.yaml\n-- plan.yaml --\nname: caf\xe9\r\n\n\n"
    path = tmp_path / "odd.case"
    path.write_bytes(above)
    for text in ("first\n", "second\n\n"):
        write_expected(read(path), text)
        assert path.read_bytes() == above + b"-- expected --\n" + text.encode()
    case = read(path)
    assert (case.expected, case.files) == ("second\n\n", {"plan.yaml": b"name: caf\xe9\r\n\n\n"})


@pytest.mark.parametrize("code", ELSEWHERE)
def test_a_code_that_is_shown_elsewhere_is(code: str):
    path, _, name = ELSEWHERE[code].partition("::")
    assert f"def {name}(" in (ROOT / path).read_text("utf-8")
