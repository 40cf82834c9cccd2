"""The models that a plan is for, and its conditions (`for`, `when`), decided for a model's configuration before the plan is bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, PlanError, Rewrite, Severity
from shardplan.core.expressions import EvaluationError, holds, names, parse_condition
from shardplan.core.plan import SECTIONS, PlanFile, Rule, Section
from shardplan.core.suggest import closest, did_you_mean
from shardplan.core.sum_outputs import SumRule
from shardplan.core.tree import LIST_OF_WORDS, ModuleTree
from shardplan.language.globs import parse_glob
from shardplan.language.limits import MAX_FINDINGS
from shardplan.styles import NONE

from .matching import Names

OTHER_MODEL = Code("SP205")
NO_VALUE = Code("SP209")
OTHER_CONFIGURATION = Code("SP210")

_parse = lru_cache(maxsize=1024)(parse_condition)


def applies(rule: Rule | SumRule) -> bool:
    """Whether a rule of a decided plan applies."""
    assert isinstance(rule.when, bool), f"{rule.location} is not decided"
    return rule.when


def admits(plan: PlanFile, tree: ModuleTree) -> bool:
    """Whether a plan is for a model's configuration; nothing else of the plan is read.

    Raises:
        PlanError: SP209: its `for` has no value.
    """
    if plan.configurations is None:
        return True
    conditions = _Conditions(tree)
    holds = conditions.value(plan.configurations, Location(plan.file, ("for",), "value"))
    if conditions.findings:
        raise PlanError(tuple(conditions.findings.values()))
    return bool(holds)


def decided(plan: PlanFile, tree: ModuleTree) -> tuple[PlanFile, tuple[Diagnostic, ...]]:
    """The plan, with each condition decided, and the conditions that have no value. The model's own configuration
    decides, also for its reduced model.
    """
    conditions = _Conditions(tree)
    if plan.configurations is not None:
        conditions.check_plan(plan, plan.configurations)
    return conditions.decide(plan, frozenset()), tuple(conditions.findings.values())


class _Conditions:
    """The conditions of a plan and its ancestors, over the configuration of a model."""

    def __init__(self, tree: ModuleTree) -> None:
        self.tree = tree
        self.findings: dict[Location, Diagnostic] = {}  # a rule with `sum_outputs` has its condition twice

    def decide(self, plan: PlanFile, restated: frozenset[tuple[Section, str]]) -> PlanFile:
        """The plan and its ancestors with their conditions decided.

        Args:
            restated: the keys of applying rules in plans that extend this one. An inherited rule of such a key is
                replaced, so it is no finding if its condition reads a field that the child's models lack.
        """

        def when(rule: Rule | SumRule, section: Section) -> bool:
            if isinstance(rule.when, bool):
                return rule.when
            path = rule.location.path
            path = path[:-1] if path[-1] == "sum_outputs" else path
            location = Location(plan.file, (*path, "when"), "value")
            value = self.value(rule.when, location)
            if value is None and (section, rule.pattern) in restated:
                self.findings.pop(location, None)
            return bool(value)

        own = replace(
            plan.with_rules(lambda section, rule: replace(rule, when=when(rule, section))),
            sums={on: tuple(replace(r, when=when(r, on)) for r in sums) for on, sums in plan.sums.items()},
        )
        if own.parent is None:
            return own
        restated |= {(section, rule.pattern) for section in SECTIONS for rule in own.rules(section) if applies(rule)}
        return replace(own, parent=self.decide(own.parent, restated))

    def check_plan(self, plan: PlanFile, condition: str) -> None:
        """Refuses a plan that is not for this configuration."""
        location = Location(plan.file, ("for",), "value")
        if self.value(condition, location) is False:
            read = dict.fromkeys(names(_parse(condition)))
            values = self.values(*read)
            fields = ", ".join(f"{name} is {values[name]}" for name in read)
            self.findings[location] = Diagnostic(
                code=OTHER_CONFIGURATION,
                severity=Severity.ERROR,
                message=f"the plan is for configurations with `{condition}`, and {fields} in this one",
                primary=Label(location, "does not hold"),
                help="use a plan for this configuration",
            )

    def values(self, *read: str) -> Mapping[str, int | float | str | None]:
        """The fields of the configuration, with 0 for the missing words of a list of words."""
        fields = self.tree.fields
        lists = {name: name.rpartition(".")[0] for name in read if name not in fields}
        return dict(fields) | {
            name: 0 for name, of in lists.items() if of in fields and fields[of] in (LIST_OF_WORDS, None)
        }

    def value(self, condition: str, location: Location) -> bool | None:
        """Whether a condition holds; None, and a finding, where it has no value. After many findings no more are made."""
        if len(self.findings) >= MAX_FINDINGS:
            return None
        try:
            parsed = _parse(condition)
            return holds(parsed, self.values(*names(parsed)))
        except EvaluationError as error:
            near = closest(error.unknown[0], self.tree.fields) if error.unknown else None
            self.findings[location] = Diagnostic(
                code=NO_VALUE,
                severity=Severity.ERROR,
                message=f"the condition `{condition}` has no value: {error.reason}",
                primary=Label(location),
                help=did_you_mean(error.unknown[0], near)
                if near
                else "name numbers, booleans or fields that may be None",
                proposals=(Rewrite(location, condition.replace(error.unknown[0], near)),) if near else (),
            )
            return None


def names_any(plan: PlanFile, tree: ModuleTree) -> bool:
    """Whether some rule for layers, of a plan or of one that it extends, matches something; True for one without such rules."""
    globs = [
        parse_glob(rule.pattern)
        for one in plan.lineage
        for rule in one.tensor_parallel
        if "*" in rule.pattern and rule.style != NONE
    ]
    names = Names(tree)
    return not globs or any(names.reach(glob) for glob in globs)


def other_model(plan: PlanFile, tree: ModuleTree) -> Iterator[Diagnostic]:
    """A warning where the plan names models, but neither this model's type nor its class."""
    if not plan.models or tree.model_type in plan.models or set(tree.class_names) & set(plan.models):
        return
    model = tree.class_names[0] if tree.class_names else "this model"
    typed = f" (model type {tree.model_type})" if tree.model_type else ""
    yield Diagnostic(
        code=OTHER_MODEL,
        severity=Severity.WARNING,
        message=f"the plan is for {', '.join(plan.models)}, not for {model}{typed}",
        primary=Label(Location(plan.file, ("models",), "value"), "names other models"),
        help=f"use a plan for this model, or add `{tree.model_type or model}` to `models` once it is verified",
    )
