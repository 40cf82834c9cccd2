"""`arguments` of a block input: what is read, refused, and what it becomes."""

from __future__ import annotations

from typing import Any

import pytest

from shardplan.core.layout import SEQ, I, R, V
from shardplan.core.plan import stated_options
from shardplan.language import parse_plan
from shardplan.styles.boundary import InputBoundary, boundary
from tests.adversaries.cases import CASES
from tests.adversaries.said import as_expected, validate

NAMES = {case.name: case for case in CASES}
TEXT = {"text": "input_with_grad_allreduce"}


def read(rule: dict[str, Any]) -> Any:
    return parse_plan({"version": "1", "name": "mine", "tensor_parallel": {"layers.*.attn": rule}})


def test_each_argument_has_the_layouts_of_its_style() -> None:
    rule = read({"style": "gather_seq_input", "arguments": TEXT, "regather": True}).plan.tensor_parallel[0]
    assert boundary(rule).inputs == (
        InputBoundary(None, (V(SEQ),), R, regather=True),
        InputBoundary("text", (I,), R),
    )
    assert stated_options(rule) == {"arguments": TEXT, "regather": True}


def test_a_complete_gradient_is_that_of_all_that_is_gathered() -> None:
    arguments = {"other": "gather_seq_input", **TEXT}
    rule = read({"style": "gather_seq_input", "grad": "complete", "arguments": arguments}).plan.tensor_parallel[0]
    assert [one.destination for one in boundary(rule).inputs] == [I, I, R]


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ({"style": "gather_seq_input", "arguments": {"text": "colwise"}}, "SP106"),
        ({"style": "gather_seq_input", "arguments": {"text": "replicate_seq"}}, "SP106"),
        ({"style": "gather_seq_input", "argument": "text", "arguments": TEXT}, "SP107"),
        ({"style": "colwise", "arguments": TEXT}, "SP107"),
        ({"style": "gather_seq_input", "arguments": {}}, "SP105"),
        ({"style": "gather_seq_input", "arguments": ["text"]}, "SP105"),
        ({"style": "gather_seq_input", "arguments": {"text": 1}}, "SP105"),
        ({"style": "gather_seq_input", "arguments": {"a b": "gather_seq_input"}}, "SP105"),
    ],
)
def test_what_is_no_further_argument_is_refused(rule: dict[str, Any], code: str) -> None:
    assert [d.code for d in read(rule).diagnostics] == [code]


@pytest.mark.parametrize(
    "name", ["joint/both_doors", "joint/same_door", "ending/right", "ending/bare_norm", "ending/alone"]
)
def test_streams_are_judged(name: str) -> None:
    said = validate(NAMES[name])
    assert as_expected(NAMES[name], said), said
