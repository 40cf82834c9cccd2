"""Conditions of plans (`for`, `when`) over a model's configuration."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedConfig

from shardplan.compiler.bind import admits, bind, decided
from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.expressions import EvaluationError, ExpressionError, holds, names, parse_condition
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ModuleTree
from shardplan.language import lint_plan
from shardplan.model.config_numbers import config_fields
from tests.examples import plan
from tests.sampling import examples
from tests.trees import llama_8b

FIELDS: dict[str, int | float | str | None] = {
    "heads": 32,
    "text_config.heads": 8,
    "eps": 1e-5,
    "tied": True,
    "biased": False,
    "rank": None,
    "none": 0,
    "layers": "a list",
}
SMALL = llama_8b(layers=2)
LLAMA = replace(SMALL, fields=SMALL.numbers | FIELDS)
Q, K = "model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.k_proj"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("tied", True),
        ("biased", False),
        ("rank", False),
        ("not rank", True),
        ("rank == 0", True),
        ("heads", True),
        ("none", False),
        ("heads == 32 and text_config.heads == 8", True),
        ("not heads == 32 or biased", False),
        ("not (biased and rank) and not none", True),
        ("heads // text_config.heads >= 4", True),
        ("heads - 32", False),
        ("eps < 1", True),
        ("tied + tied == 2", True),
        ("biased or rank or tied", True),
        ("heads != 32", False),
        ("not not tied", True),
    ],
)
def test_value(text: str, value: bool) -> None:
    assert holds(parse_condition(text), FIELDS) is value


@pytest.mark.parametrize(
    ("text", "reason", "meant"),
    [
        ("heads = 32", "`=` has no meaning here; write `==` to compare", "="),
        ("not", "the end is found where a number or a name is expected", ""),
        ("and heads", "`and` is found where a number or a name is expected", "and"),
        ("heads + not tied", "`not` is found where a number or a name is expected", "not"),
        ("heads not tied", "`not` is found where an operator (+ - * // == != < <= > >= and or) is expected", "not"),
        ("(heads", "the end is found where an operator or `)` is expected", ""),
        ("1 < heads < 8", "comparisons are not chained; join them with `and`", "1 < heads < 8"),
        ("heads is 8", "`is` is found where an operator (+ - * // == != < <= > >= and or) is expected", "is"),
        ("'a' == heads", "`'` has no meaning here", "'"),
    ],
)
def test_refused(text: str, reason: str, meant: str) -> None:
    with pytest.raises(ExpressionError) as raised:
        parse_condition(text)
    assert (raised.value.reason, text[raised.value.start : raised.value.end]) == (reason, meant)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("qk_norm or heads and width", "the configuration has no field qk_norm and no field width"),
        ("not layers", "layers is a list, not a number, a boolean or None"),
        ("heads // rank == 1", "32 // 0 is a division by zero"),
    ],
)
def test_no_value(text: str, reason: str) -> None:
    with pytest.raises(EvaluationError) as raised:
        holds(parse_condition(text), FIELDS)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("layer_types.full_attention == 2", True),
        ("layer_types.linear_attention", True),
        ("layer_types.sliding_attention", False),
        ("no_types.full_attention", False),
        ("text_config.layer_types.full_attention == 2", True),
        ("sizes.full_attention", None),
        ("model_type.full_attention", None),
    ],
)
def test_words_of_a_list_are_counted(text: str, value: bool | None) -> None:
    types = ["full_attention", "linear_attention", "full_attention"]
    config = {"layer_types": types, "no_types": None, "sizes": [1, 2], "model_type": "full_attention"}
    found, nested = config_fields(config), config_fields(PreTrainedConfig(layer_types=types))
    fields = found | {f"text_config.{name}": value for name, value in nested.items()}
    wanted = replace(plan('version: "1"\nname: mine\n'), configurations=text)
    tree = replace(LLAMA, fields=fields)
    if value is None:
        with pytest.raises(PlanError) as raised:
            admits(wanted, tree)
        assert [d.code for d in raised.value.diagnostics] == ["SP209"]
    else:
        assert admits(wanted, tree) is value
        codes = [d.code for d in decided(wanted, tree)[1]]
        assert codes == ([] if value else ["SP210"])


conditions = st.recursive(
    st.integers(0, 99).map(str) | st.sampled_from(["heads", "tied", "biased", "none"]),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+ - * // == != < <= > >= and or".split()), inner).map(" ".join)
        | inner.map(lambda text: f"not {text}")
        | inner.map(lambda text: f"({text})")
    ),
    max_leaves=8,
)


class Truth(ast.NodeTransformer):
    """`and` and `or` that are 1 or 0, as the language has them; Python's are one of their operands."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        return ast.Call(ast.Name("bool", ast.Load()), [node], [])


@settings(max_examples=examples(300), deadline=None)
@given(conditions)
@example("(1 - (0 or 2))")
def test_agrees_with_python(text: str) -> None:
    try:
        condition = parse_condition(text)
    except ExpressionError:
        return  # `1 + not 2`, chained comparisons, too long
    try:
        said = ast.fix_missing_locations(Truth().visit(ast.parse(text, mode="eval")))
        expected = bool(eval(compile(said, "", "eval"), {}, dict(FIELDS)))
        value = holds(condition, FIELDS)
    except (ZeroDivisionError, EvaluationError):
        return  # Python stops at the first operand that decides
    assert value is expected


@settings(max_examples=examples(200), deadline=None)
@given(st.text("ab1.+-*/()<>=! notdr", max_size=25))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        list(names(parse_condition(text)))
    except ExpressionError as error:
        assert 0 <= error.start <= error.end <= len(text)


def bound(rules: str, tree: ModuleTree = LLAMA, head: str = "") -> tuple[ResolvedPlan, tuple[Diagnostic, ...]]:
    return bind(plan(f'version: "1"\nname: mine\n{head}tensor_parallel:\n{rules}'), tree, MeshSizes())


def styles(resolved: ResolvedPlan) -> dict[str, str]:
    """Of the first layer, by the last two parts of the names."""
    return {
        name.removeprefix("model.layers.0."): one.rule.style
        for name, one in resolved.assignments.items()
        if ".1." not in name
    }


def test_a_rule_whose_condition_is_false_is_neither_applied_nor_dead() -> None:
    rules = f"  {Q}: {{style: colwise, when: tied}}\n  {K}: {{style: colwise, when: biased}}\n"
    resolved, found = bound(rules + "  model.layers.*.q_norm: {style: replicate, when: not tied}\n")
    assert (styles(resolved), found) == ({"self_attn.q_proj": "colwise"}, ())
    _, found = bound("  model.layers.*.q_norm: {style: replicate, when: tied}\n")
    assert [d.code for d in found] == ["SP201"]


def test_rules_of_one_key_for_different_configurations() -> None:
    rules = f"  {Q}:\n    - {{style: colwise, when: rank}}\n    - {{style: replicate, when: not rank}}\n"
    resolved, found = bound(rules)
    assert (styles(resolved), found) == ({"self_attn.q_proj": "replicate"}, ())
    resolved, found = bound(rules, replace(LLAMA, fields={"rank": 8}))
    assert (styles(resolved), found) == ({"self_attn.q_proj": "colwise"}, ())
    _, found = bound(rules.replace("not rank", "not tied or heads"), replace(LLAMA, fields=FIELDS | {"rank": 8}))
    assert [(d.code, d.primary and d.primary.location.path) for d in found] == [("SP203", ("tensor_parallel", Q, 1))]


def test_a_child_removes_an_inherited_rule_that_does_not_apply(tmp_path: Path) -> None:
    key = "model.layers.*.self_attn.{q,k}_norm"
    rule = f'version: "1"\ntensor_parallel:\n  {key}: {{style: replicate, when: WHEN}}\n'
    child = f'version: "1"\nextends: parent.yaml\ntensor_parallel:\n  {key}: none\n'
    for condition in ("biased", "tied", "no_field_of_this_model"):
        (tmp_path / "parent.yaml").write_text(rule.replace("WHEN", condition))
        (tmp_path / "child.yaml").write_text(child)
        parsed = lint_plan(tmp_path / "child.yaml")
        assert parsed.plan is not None
        assert (*parsed.diagnostics, *bind(parsed.plan, LLAMA, MeshSizes())[1]) == ()


def test_an_inherited_rule_that_a_false_one_would_remove_answers_for_itself(tmp_path: Path) -> None:
    rule = "tensor_parallel:\n  model.layers.*.q_norm: "
    (tmp_path / "parent.yaml").write_text(f'version: "1"\n{rule}replicate\n')
    for condition, codes in (("tied", []), ("biased", ["SP201"])):
        child = f'version: "1"\nextends: parent.yaml\n{rule}{{style: none, when: {condition}}}\n'
        (tmp_path / "child.yaml").write_text(child)
        parsed = lint_plan(tmp_path / "child.yaml")
        assert parsed.plan is not None
        assert [d.code for d in bind(parsed.plan, LLAMA, MeshSizes())[1]] == codes


def test_the_first_configuration_decides() -> None:
    file, _ = decided(plan(f'version: "1"\ntensor_parallel:\n  {Q}: {{style: colwise, when: heads > 8}}\n'), LLAMA)
    resolved, found = bind(file, replace(LLAMA, fields={"heads": 2}), MeshSizes())  # as of a reduced model
    assert (styles(resolved), found) == ({"self_attn.q_proj": "colwise"}, ())


def test_sums_have_conditions() -> None:
    rules = "  model.layers.*: {sum_outputs: [self_attn.o_proj, mlp.down_proj], when: WHEN}\n"
    assert bound(rules.replace("WHEN", "biased"))[0].sums == ()
    assert len(bound(rules.replace("WHEN", "tied"))[0].sums) == 2


def test_sums_are_for_blocks_that_have_a_module() -> None:
    """With a style, and alone."""
    kinds = replace(LLAMA, modules={n: m for n, m in LLAMA.modules.items() if n != "model.layers.1.mlp.up_proj"})
    for style in ("", "style: replicate, "):
        rules = f"  model.layers.*: {{{style}sum_outputs: [self_attn.o_proj, mlp.down_proj], having: BELOW}}\n"
        assert len(bound(rules.replace("BELOW", "mlp.down_proj"), kinds)[0].sums) == 2
        resolved, found = bound(rules.replace("BELOW", "mlp.up_proj"), kinds)
        assert ([one.block for one in resolved.sums], found) == (["model.layers.0"], ())
        _, found = bound(rules.replace("BELOW", "experts"), kinds)
        assert {d.code for d in found} == {"SP201"}


def test_rules_are_for_modules_that_have_a_number() -> None:
    """As the code of one release has them: a later rule for the same modules, which replaces the first there."""
    norm = "model.layers.1.input_layernorm"
    grouped = replace(LLAMA.modules[norm], numbers={"group_size": 8})
    kinds = replace(LLAMA, modules={**LLAMA.modules, norm: grouped})
    both = "    - {style: sequence_parallel}\n    - {style: replicate, having: group_size, override: true, optional: true}\n"
    rules = f"  model.layers.*.input_layernorm:\n{both}"
    for tree, rule in ((kinds, "replicate"), (LLAMA, "sequence_parallel")):
        resolved, found = bound(rules, tree)
        assert (resolved.assignments[norm].rule.style, found) == (rule, ())
        assert resolved.assignments["model.layers.0.input_layernorm"].rule.style == "sequence_parallel"


def test_a_condition_without_a_value_is_one_finding_with_a_place() -> None:
    _, found = bound("  model.layers.*: {style: replicate, sum_outputs: [self_attn, mlp], when: head}\n")
    (one,) = (d for d in found if d.code == "SP209")
    assert one.primary is not None and one.primary.location.path == ("tensor_parallel", "model.layers.*", "when")
    assert one.help == "did you mean `heads`?"


@pytest.mark.parametrize(("condition", "codes"), [("tied", []), ("rank or biased", ["SP210"]), ("width", ["SP209"])])
def test_a_plan_is_for_configurations(condition: str, codes: list[str]) -> None:
    _, found = bound(f"  {Q}: colwise\n", head=f"for: {condition}\n")
    assert [d.code for d in found] == codes


def test_for_is_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(f'version: "1"\nfor: biased\ntensor_parallel:\n  {Q}: colwise\n')
    (tmp_path / "child.yaml").write_text('version: "1"\nextends: parent.yaml\n')
    parsed = lint_plan(tmp_path / "child.yaml")
    assert parsed.plan is not None and decided(parsed.plan, LLAMA)[1] == ()


@pytest.mark.parametrize(
    ("rules", "codes"),
    [
        ("  a:\n    - {style: colwise, when: x}\n    - {style: rowwise, when: not x}\n", []),
        ("  a:\n    - {style: colwise, when: x}\n    - {style: rowwise, when: x}\n", ["SP116"]),
        ("  a.{b,c}: colwise\n  a.b: {style: rowwise, when: x}\n", ["SP116"]),
        ("  a.{b,c}: colwise\n  a.b: {style: rowwise, when: x, override: true}\n", []),
        ("  a.b: colwise\n  a.{b,c}: {style: rowwise, when: x, override: true}\n", []),
        ("  a.b: {style: colwise, when: x}\n  a.{b,c}: {style: rowwise, override: true}\n", ["SP117"]),
        ("  a.b: {style: colwise, when: x}\n  a.{b,c}: colwise\n", ["SP117"]),
    ],
)
def test_lint(rules: str, codes: list[str], tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f'version: "1"\ntensor_parallel:\n{rules}')
    parsed = lint_plan(path)
    assert parsed.plan is not None and [d.code for d in parsed.diagnostics] == codes
