"""The proof in the dtypes of the data-parallel section: what breaks in them alone is refused, and rounding is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import shardplan
from shardplan.proof.remembered_proofs import _KNOWN
from shardplan.proof.section_dtype import DRAWS, Suspicion
from shardplan.report.text import proven_on
from tests.adversaries.__main__ import row_of
from tests.adversaries.cases import CASES
from tests.adversaries.said import as_expected, validate

NAMES = {case.name: case for case in CASES if case.name.startswith(("section_", "lower_"))}
SAID = {
    "section_hard_float": "expected m1 and m2 to have the same dtype",
    "section_bare_buffer": "mixed dtype",
    "section_centred": "the sharded reduced model differs from the unsharded one, but not in float32",
    "section_clipped": "the sharded reduced model differs from the unsharded one, but not in float32",
    "section_filled": "without overflow",
    "section_infinite": "is not finite, which it is in float32",
}


def report(name: str, section: Mapping[str, Any] | None = None) -> shardplan.Report:
    case = NAMES[name]
    kept = {name: value for name, value in case.plan["data_parallel"].items() if name != "mixed_precision"}
    plan = case.plan if section is None else {**case.plan, "data_parallel": {**kept, **section}}
    return shardplan.validate(shardplan.Model(case.model(), inputs=case.inputs), plan, {"tp": 2})


@pytest.mark.parametrize("name", SAID)
def test_what_breaks_in_the_dtype_is_refused(name: str) -> None:
    (found,) = report(name).errors
    assert found.code == "SP424" and SAID[name] in found.message and found.help
    assert found.primary is not None and found.primary.location.path == ("data_parallel", "mixed_precision")
    assert found.notes or name == "section_infinite"


@pytest.mark.parametrize("name", SAID)
def test_without_the_dtype_it_is_right(name: str) -> None:
    assert report(name, {}).proven


@pytest.mark.parametrize("name", ["section_scaled", "section_attention_sequence", "section_reduced", "section_lowest"])
def test_what_is_right_is_not_refused(name: str) -> None:
    assert as_expected(NAMES[name], validate(NAMES[name])), name


@pytest.mark.parametrize(
    "name",
    [
        "lower_stage_plain/pp_tp",
        "lower_stage_timed/pp_dp",
        "lower_stage_hard_float/pp_dp",
        "lower_stage_clipped/pp_tp",
        "lower_data_plain",
        "lower_data_hard_float",
        "lower_data_infinite",
    ],
)
def test_stages_and_data_parallel_ranks_alone(name: str) -> None:
    said = validate(NAMES[name])
    assert as_expected(NAMES[name], said), said


def test_a_unit_that_casts_the_time_is_the_plan_s() -> None:
    said = validate(NAMES["lower_stage_timed_in_code/pp_dp"])
    assert said.codes == ("SP424",) and "FSDP2's casts make the unsharded reduced model differ" in said.text


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("lower_autocast_normed", "raised"),
        ("lower_autocast_data_parallel", "right"),
        ("lower_autocast_alone", "right"),
        ("lower_autocast_infinite_alone", "raised"),
    ],
)
def test_the_dtype_of_autocast_is_proven_when_a_plan_is_applied(name: str, truth: str) -> None:
    row = row_of(NAMES[name])
    assert row.said.passed and row.problem == "" and row.judgement.truth == truth


def test_nothing_is_suspicious_in_a_right_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[dict[str, float]] = []
    add = Suspicion.add

    def added(self: Suspicion, *args: Any) -> None:
        add(self, *args)
        left.append(self.errors)

    monkeypatch.setattr(Suspicion, "add", added)
    section = {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}}
    plan = {"version": "1", "name": "half", "extends": "llama", "data_parallel": section}
    assert shardplan.validate("llama", plan, {"tp": 2}).proven
    assert left == [{}, {}]  # of both variants, at the first draw


def test_the_report_says_so() -> None:
    proof = report("section_plain").proof
    assert proof is not None and proof.once_in == "bfloat16" and "float32, once in bfloat16" in proven_on(proof)
    plain = report("section_plain", {}).proof
    assert plain is not None and not plain.once_in and "once" not in proven_on(plain)


def test_a_proof_in_another_dtype_is_another_proof() -> None:
    _KNOWN.clear()
    for param in ("bfloat16", "float16"):
        report("section_plain", {"mixed_precision": {"param": param}})
    assert len(_KNOWN) == 2


def test_an_operation_that_the_cpu_does_not_have_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.functional.linear

    def missing(x: torch.Tensor, *args: Any) -> torch.Tensor:
        if x.dtype is torch.bfloat16:
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'BFloat16'")
        return linear(x, *args)

    monkeypatch.setattr(torch.nn.functional, "linear", missing)
    found = report("section_plain")
    assert found.ok and [one.code for one in found.warnings] == ["SP424"]
    assert "nothing is proven in this dtype" in found.warnings[0].notes


def test_a_suspicion_needs_the_same_tensor_in_all_draws() -> None:
    flips, wrong = Suspicion(), Suspicion()
    for draw in range(DRAWS):
        flips.add({"a": 0.9 if draw % 2 else 0.1, "b": 0.5}, {"a": 0.2, "b": 0.1 if draw else 0.6})
        wrong.add({"a": 0.3 + draw / 10, "b": 0.1}, {"a": 0.2, "b": 0.2})
        if not draw:
            assert not wrong.cleared
    assert flips.cleared and not wrong.cleared and wrong.errors == {"a": 0.3}
