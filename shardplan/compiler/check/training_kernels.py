"""Kernels that in training compute a module and those below it together; they skip the moves of those below."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import Assignment, Rule
from shardplan.core.tree import full_name

from .check_words import join
from .facts import Facts

KERNEL = Code("SP315")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each rule of such modules, or of modules below them."""
    groups: dict[int, tuple[Rule, str, tuple[str, ...], list[str]]] = {}
    for name, module in facts.resolved.tree.modules.items():
        own = facts.resolved.modules.get(name)
        if not module.training_reads or (own is not None and not own.rule.fused):
            continue
        found = {child: rule for child in module.training_reads if (rule := _rule(facts, full_name(name, child)))}
        if found:
            rule = own.rule if own is not None else next(iter(found.values()))
            groups.setdefault(id(rule), (rule, module.class_name, tuple(found), []))[3].append(name)
    for rule, class_name, children, names in groups.values():
        own_rule = facts.resolved.modules.get(names[0])
        yield Diagnostic(
            code=KERNEL,
            severity=Severity.ERROR,
            message=f"{class_name} may compute {facts.resolved.tree.named(names)} in one kernel in training, with the parameters of "
            f"{join(children, 'and')}: the kernel would skip what the plan does there",
            primary=Label(rule.location, "does not say `fused: false`" if own_rule is not None else "is skipped"),
            help=f"write `fused: false` in {'this rule' if own_rule is not None else f'a rule for {facts.resolved.tree.named(names)}'}",
            modules=tuple(names),
        )


def _rule(facts: Facts, name: str) -> Rule | None:
    """The rule that splits a module or its parameter, or moves what crosses its boundary."""
    module = facts.resolved.tree.modules.get(name)
    if module is None:
        return None
    assigned = [facts.resolved.modules.get(name)]
    assigned += [facts.resolved.parameters.get(full_name(name, one.name)) for one in module.parameters]
    rules = (one for one in assigned if one is not None)
    return next((one.rule for one in rules if _acts(facts, one)), None)


def _acts(facts: Facts, assignment: Assignment) -> bool:
    if facts.style(assignment).shards_parameters:
        return True
    one = facts.boundaries.get(assignment.name)
    if one is None:  # a parameter's rule
        return False
    moves = any(source != move.destination for move in one.inputs for source in move.sources)
    return moves or (one.output is not None and one.output.moves)
