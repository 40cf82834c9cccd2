"""What `lint` says beyond reading: contradictions, repetitions, parts without meaning."""

from pathlib import Path

import pytest

from shardplan.language import builtin_plans, lint_plan


def findings(rules: str, tmp_path: Path) -> list[tuple[str, str, int]]:
    """(code, message, line in the section) of a plan's findings."""
    path = tmp_path / "p.yaml"
    path.write_text(f'version: "1"\ntensor_parallel:\n{rules}')
    parsed = lint_plan(path)
    assert parsed.plan is not None
    return [(d.code, d.message, parsed.sources.span(d.primary.location).line - 2) for d in parsed.diagnostics]


@pytest.mark.parametrize("name", builtin_plans())
def test_builtin_plans_are_clean(name: str) -> None:
    assert lint_plan(name).diagnostics == ()


@pytest.mark.parametrize(
    "rules",
    [
        "  a.{q,k}: colwise\n  a.{v,o}: rowwise\n",
        "  a.*: replicate\n  a.b: {style: colwise, override: true}\n",
        "  a.*: replicate\n  a.b: colwise\n",  # what both match is seen in a model
        "  a.{b,c}: replicate\n  a.b: {style: colwise, override: true}\n",
        "  a: {style: colwise, optional: true}\n  a.**: replicate\n",
    ],
)
def test_nothing_to_say(rules: str, tmp_path: Path) -> None:
    assert findings(rules, tmp_path) == []


def test_one_finding_for_each_pair_of_contradicting_rules(tmp_path: Path) -> None:
    rules = "  a.{q,k,v}: colwise\n  a.{k,v,o}: rowwise\n  a.{o,q}: replicate\n"
    assert findings(rules, tmp_path) == [
        ("SP116", "two rules give `a.k` the styles `colwise` and `rowwise`", 2),
        ("SP116", "two rules give `a.o` the styles `rowwise` and `replicate`", 3),
        ("SP116", "two rules give `a.q` the styles `colwise` and `replicate`", 3),
    ]


def test_an_alias_is_the_same_style_and_options_count(tmp_path: Path) -> None:
    assert findings("  a.{b,c}: colwise_rep\n  a.b: colwise_gather_output\n", tmp_path) == [
        ("SP117", "`a.b` has the style `colwise_gather_output` already", 2)
    ]
    assert findings("  a.{b,c}: packed_colwise\n  a.b: {style: packed_colwise, packed: 3}\n", tmp_path) == [
        ("SP116", "two rules give `a.b` the style `packed_colwise` with different options", 2)
    ]


def test_rules_and_words_without_effect(tmp_path: Path) -> None:
    assert findings("  a: {style: colwise, override: true}\n", tmp_path) == [
        ("SP117", "`override` has no effect on the first rule of a section", 1)
    ]
    replaced = (
        "  a.{b,c}: colwise\n  a.b: {style: rowwise, override: true}\n  a.{c,d}: {style: rowwise, override: true}\n"
    )
    assert findings(replaced, tmp_path) == [
        ("SP117", "later rules override `a.{b,c}` for everything that it matches", 1)
    ]


def test_sections_do_not_meet(tmp_path: Path) -> None:
    assert findings("  a: colwise\nsequence_parallel:\n  a: colwise_seq\n", tmp_path) == []


def said(text: str, tmp_path: Path) -> list[str]:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    return [d.message for d in lint_plan(path).diagnostics]


def test_parts_that_say_nothing(tmp_path: Path) -> None:
    nothing = "the plan has no rules and no data_parallel section"
    assert said('version: "1"\n', tmp_path) == [nothing]
    assert said('version: "1"\nextends: llama\n', tmp_path) == []
    assert said('version: "1"\ndata_parallel: {backend: ddp}\n', tmp_path) == []
    assert said('version: "1"\nextends: llama\nsequence_parallel: {}\n', tmp_path) == [
        "`sequence_parallel` has no rules"
    ]
    assert said('version: "1"\nextends: llama\ndata_parallel: {}\n', tmp_path) == ["`data_parallel` is empty"]
    assert said('version: "1"\nextends: llama\nseparate_matrices: {parts: []}\n', tmp_path) == [
        "`separate_matrices` names no matrices"
    ]
    empty = 'version: "1"\nextends: llama\ncompile: {backend: eager}\nactivation_checkpointing: {modules: []}\n'
    assert said(empty, tmp_path) == ["`activation_checkpointing` names no modules"], "compile takes the units"
    empty = empty.replace("extends: llama", "tensor_parallel: {a: colwise}")
    assert said(empty, tmp_path) == ["`activation_checkpointing` names no modules", "`compile` names no modules"]


def test_a_plan_with_errors_is_not_linted_further(tmp_path: Path) -> None:
    assert said('version: "1"\ntensor_parallel: {a: colwize}\ncompile: {}\n', tmp_path) == [
        "there is no style `colwize`"
    ]


@pytest.mark.parametrize(
    ("rules", "help"),
    [
        ("  a.q: ColwiseParallel\n", "did you mean `colwise`?"),
        ("  a.o: RowwiseParallel\n", "did you mean `rowwise`?"),
        ("  a.norm: SequenceParallel\n", "did you mean `sequence_parallel`?"),
        ("  a.o: qqq\n", "most plans need colwise, rowwise, packed_colwise"),
        ("data_parallel: {mixed_precision: bf16}\n", "write `{param: bfloat16, reduce: float32}`"),
    ],
)
def test_the_words_of_others_are_known(rules: str, help: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f'version: "1"\n{"tensor_parallel:" if rules[0] == " " else ""}\n{rules}')
    (found,) = lint_plan(path).diagnostics
    assert (found.help or "").startswith(help)
