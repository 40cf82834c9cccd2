"""A module's rule and its parameters' rules: where both apply to a parameter, they must agree."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import ResolvedPlan, Rule
from shardplan.core.tree import named
from shardplan.styles import STYLES, ParameterStyle

CONTRADICTION = Code("SP206")


def contradictions(resolved: ResolvedPlan) -> Iterator[Diagnostic]:
    """One finding for each pair of rules that contradict each other."""
    around = {name: resolved.modules.get(resolved.tree.owner(name)) for name in resolved.parameters}
    pairs = (((a.rule, resolved.parameters[name].rule), name) for name, a in around.items() if a is not None)
    for (module_rule, rule), names in by_key(one for one in pairs if _contradict(*one)).items():
        yield _finding(module_rule, rule, tuple(names))


def _contradict(rules: tuple[Rule, Rule], name: str) -> bool:
    """Whether the rule of a parameter's module and its own store it differently."""
    of_module, own = (STYLES[rule.style] for rule in rules)
    stored = _storage(rules[0], of_module.parameter(name.rpartition(".")[2])), _storage(rules[1], own.weight)
    return not of_module.is_block_input and stored[0] != stored[1]


def _storage(rule: Rule, style: ParameterStyle) -> tuple[object, ...]:
    return (style, rule.packed if style.packed else None)


def _finding(module_rule: Rule, rule: Rule, names: tuple[str, ...]) -> Diagnostic:
    module_style = STYLES[module_rule.style].parameter(names[0].rpartition(".")[2])
    return Diagnostic(
        code=CONTRADICTION,
        severity=Severity.ERROR,
        message=f"`{module_rule.style}` stores {named(names)} {_words(module_style)}, "
        f"but the parameter's own rule `{rule.style}` stores it {_words(STYLES[rule.style].weight)}",
        primary=Label(rule.location, f"stores it {_words(STYLES[rule.style].weight)}"),
        related=(Label(module_rule.location, f"stores it {_words(module_style)}"),),
        help="remove one of the two rules, or give the module a block input and each of its parameters a rule",
        modules=names,
    )


def _words(style: ParameterStyle) -> str:
    if style.shard == "expert":
        return "by whole experts"
    if style.shard is not None:
        return f"split by its {style.shard}put features" + (" in packed parts" if style.packed else "")
    return "whole" if style.computed == "I" else "whole with a partial gradient"
