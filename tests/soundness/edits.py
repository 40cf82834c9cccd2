"""Edits of a plan, by kind. A plan is first written out with one rule per kind of module, so that one rule is one edit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardplan.compiler.bind import bind
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, ResolvedPlan, Rule, overlays_of, sections_of, stated_options
from shardplan.core.tree import ModuleTree
from shardplan.styles import NONE, STYLES

Rules = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Document:
    """A plan, written out.

    Args:
        sections: section -> pattern -> style and options.
        kinds: pattern -> the kind of the module; "parameter" for a parameter.
        unruled: patterns of modules that no rule names -> their kind.
    """

    sections: Mapping[str, Rules]
    kinds: Mapping[str, str]
    unruled: Mapping[str, str]

    def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = {"version": "1", "name": "edited"}
        for section, rules in self.sections.items():
            *around, name = section.split(".")
            within = plan.setdefault(around[0], {}) if around else plan
            if rules:
                within[name] = dict(rules)
        return {name: part for name, part in plan.items() if part}


@dataclass(frozen=True)
class Edit:
    """One edit.

    Args:
        kind: for the table.
        what: in words.
        targets: the patterns that it changes.
        document: the edited plan.
    """

    kind: str
    what: str
    targets: tuple[str, ...]
    document: Mapping[str, Any] = field(repr=False)


def pattern_of(name: str) -> str:
    """`model.layers.*.mlp` for `model.layers.3.mlp`; the first block keeps its name where only it has a rule."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _written(rule: Rule) -> dict[str, Any]:
    return {"style": rule.style, **stated_options(rule)}


def _rules(resolved: ResolvedPlan) -> Rules:
    everything = [*resolved.tree.modules, *resolved.tree.parameters]
    rules: Rules = {}
    for name, assignment in resolved.assignments.items():
        pattern = pattern_of(name)
        same = [other for other in everything if pattern_of(other) == pattern]
        alike = all(
            other in resolved.assignments and resolved.assignments[other].rule is assignment.rule for other in same
        )
        rules[pattern if alike else name] = _written(assignment.rule)
    return rules


def written_out(plan: PlanFile, tree: ModuleTree, *, experts: bool = False) -> Document:
    """The plan with one rule per kind of module or parameter, as it is bound to the model.

    Args:
        experts: with its expert-parallel sections.
    """
    ways = [overlays_of(on, mesh) for mesh in (None, MeshSizes(ep=2))[: 1 + experts] for on in (False, True)]
    tensor, both, *distributed = (_rules(bind(plan, tree, MeshSizes(), on)[0]) for on in ways)
    overlay = {pattern: rule for pattern, rule in both.items() if tensor.get(pattern) != rule}
    sections = {"tensor_parallel": tensor, "sequence_parallel": overlay}
    if experts:
        whole, sliced = distributed
        sections["expert_parallel"] = over = _over(tensor, whole)
        sections["expert_parallel.sequence_parallel"] = _over({**tensor, **overlay, **over}, sliced)
    kinds = {pattern_of(name): module.kind for name, module in tree.modules.items()}
    kinds |= {name: module.kind for name, module in tree.modules.items()}
    kinds |= dict.fromkeys((*map(pattern_of, tree.parameters), *tree.parameters), "parameter")
    ruled = {pattern for rules in sections.values() for pattern in rules}
    unruled = {
        pattern_of(name): module.kind
        for name, module in tree.modules.items()
        if name and module.kind not in ("list", "dropout") and pattern_of(name) not in ruled
    }
    return Document(sections, kinds, unruled)


def _over(below: Rules, above: Rules) -> Rules:
    """The rules that make `above` of what lies below."""
    gone = {pattern: {"style": NONE} for pattern in below if below[pattern]["style"] != NONE and pattern not in above}
    return {**gone, **{pattern: rule for pattern, rule in above.items() if below.get(pattern) != rule}}


def fitting(kind: str, *, experts: bool = False) -> list[str]:
    """The styles that a rule of a section may say of a module of that kind.

    Args:
        experts: of an expert-parallel section.
    """
    return [
        style.name
        for style in STYLES.values()
        if (style.on_parameters if kind == "parameter" else style.kinds is None or kind in style.kinds)
        and style.name not in ("local_params", "mla_kv_a_proj")
        and (experts or style.experts is None)
    ]


def edits(document: Document, *, sequence_parallel: bool, experts: bool = False) -> Iterator[Edit]:
    """Every edit of the rules that hold in a variant."""
    sections = sections_of(overlays_of(sequence_parallel, MeshSizes(ep=1 + experts)))
    for i, section in enumerate(sections):
        for pattern, rule in document.sections[section].items():
            if rule["style"] == NONE or any(pattern in document.sections[later] for later in sections[i + 1 :]):
                continue  # a later section has another rule for it
            yield from _of_rule(document, section, pattern, rule)
    section = sections[-1]
    for pattern, kind in document.unruled.items():
        for style in ("replicate", "replicated_with_grad_allreduce", "sequence_parallel", *ADDED.get(kind, ())):
            if style == "sequence_parallel" and not sequence_parallel:
                continue
            yield _edit(document, section, "added", f"{pattern}: {style}", pattern, {"style": style})


ADDED = {
    "other": ("input_with_grad_allreduce", "all_reduce", "gather_seq_input"),
    "linear": ("colwise", "rowwise", "colwise_gather_output"),
    "embedding": ("embedding_rowwise", "embedding_colwise"),
}


def _of_rule(document: Document, section: str, pattern: str, rule: Mapping[str, Any]) -> Iterator[Edit]:
    yield _edit(document, section, "dropped", f"{pattern} without a rule", pattern, None)
    yield _renamed(document, section, pattern)
    kind = document.kinds[pattern]
    for style in fitting(kind, experts=section.startswith("expert_parallel")):
        if style != rule["style"]:
            kept = {k: v for k, v in rule.items() if k in _allowed(style)}
            yield _edit(
                document,
                section,
                "swapped",
                f"{pattern}: {style} for {rule['style']}",
                pattern,
                {**kept, "style": style},
            )
    for option, values in _options(rule).items():
        for value in values:
            changed = {k: v for k, v in rule.items() if k != option}
            if value is not None:
                changed[option] = value
            yield _edit(
                document, section, option, f"{pattern}: {option}={value} for {rule.get(option)}", pattern, changed
            )


def _allowed(style: str) -> set[str]:
    record = STYLES[style]
    allowed = {"style", "shares", "divides", "optional"}
    allowed |= {"packed"} if record.packed_option else set()
    allowed |= {"grad"} if record.options.grad else set()
    allowed |= {"argument", "arguments"} if record.argument_option else set()
    allowed |= {"output"} if record.options.output else set()
    allowed |= {"read_outside"} if record.read_outside_option else set()
    return allowed


def _options(rule: Mapping[str, Any]) -> dict[str, list[Any]]:
    record = STYLES[rule["style"]]
    result: dict[str, list[Any]] = {}
    if record.options.output:
        result["output"] = [v for v in (None, *record.options.output) if v != rule.get("output")]
    if record.options.grad and (rule.get("output") == "gather" or record.is_block_input):
        result["grad"] = [v for v in ("partial", "complete") if v != rule.get("grad")]
    if record.exchange_option:
        result["exchange"] = ["pairs"]
    if record.packed_option:
        result["packed"] = [v for v in (2, 3) if v != rule.get("packed")]
    if rule.get("shares"):
        shares = rule["shares"]
        each = [{name: share} for name, share in shares.items()] if isinstance(shares, Mapping) else shares
        result["shares"] = [None, *([one for one in each if one is not left] for left in each[1:])]
    if rule.get("read_outside"):
        result["read_outside"] = [None]
    return result


def _renamed(document: Document, section: str, pattern: str) -> Edit:
    """The rule under a name that no module has."""
    rules = {f"{name}_" if name == pattern else name: rule for name, rule in document.sections[section].items()}
    sections = {**document.sections, section: rules}
    edited = Document(sections, document.kinds, document.unruled).plan()
    return Edit("renamed", f"{pattern}_ for {pattern}", (pattern,), edited)


def _edit(document: Document, section: str, kind: str, what: str, pattern: str, rule: Mapping[str, Any] | None) -> Edit:
    sections = {name: dict(rules) for name, rules in document.sections.items()}
    if rule is None:
        del sections[section][pattern]  # in the overlay, what lies under it comes to light
    else:
        sections[section] = {**sections[section], pattern: dict(rule)}
    return Edit(kind, what, (pattern,), Document(sections, document.kinds, document.unruled).plan())
