"""PLAN `auto` where tp may be above 1: the built-in plan for the model, else a derived one. The choice checks nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from shardplan.core.derived_plan import DerivedPlan
from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.plan import PlanFile
from shardplan.core.sources import SourceMap
from shardplan.core.tree import ModuleTree

if TYPE_CHECKING:
    from shardplan.language import Parsed
    from shardplan.model import FoundModel


@dataclass(frozen=True)
class ReadPlan:
    """A plan as it was read.

    Args:
        plan: None where there are errors, or where the plan depends on a model that was not found.
        sources: its text, and the texts of what it extends.
        findings: why there is no plan, or warnings.
        derived: set where `auto` derived it.
    """

    plan: PlanFile | None = None
    sources: SourceMap = field(default_factory=SourceMap)
    findings: tuple[Diagnostic, ...] = ()
    derived: DerivedPlan | None = None

    @classmethod
    def of(cls, parsed: Parsed, derived: DerivedPlan | None = None) -> ReadPlan:
        return cls(parsed.plan, parsed.sources, parsed.diagnostics, derived)


class Derive(Protocol):
    """Derives for a model what no file has."""

    def __call__(self, found: FoundModel) -> ReadPlan:
        """A plan, if there is no built-in one for the model."""
        ...

    def over_cp(self, found: FoundModel, given: ReadPlan, *, compiled: bool) -> ReadPlan:
        """A plan with rules for the axis cp, where the mesh asks for them.

        Args:
            given: a built-in plan or a derived one, without such rules.
            compiled: whether modules are compiled.

        Raises:
            PlanError: there are none.
        """
        ...


def with_context(given: ReadPlan, found: FoundModel, derive: Derive, compiled: bool | None) -> ReadPlan:
    """A built-in or derived plan with derived rules for the axis cp; any other plan, and one that has such rules, stays as it is.

    Args:
        compiled: whether an argument says that modules are compiled, or are not; None: the plan says it.
    """
    plan = given.plan
    if plan is None or plan.has_context or not (plan.built_in or given.derived is not None):
        return given
    if any(d.is_error for d in given.findings):
        return given
    if compiled is None:
        compiled = any(one.compile is not None for one in plan.lineage)
    try:
        return derive.over_cp(found, given, compiled=compiled)
    except PlanError as error:
        return replace(given, plan=None, findings=(*given.findings, *error.diagnostics))


MODELS = re.compile(r"^models:(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)  # the field of a built-in plan, in its text


def words_of_models(text: str) -> set[str]:
    """The text of a plan's field `models`, and perhaps more: nothing is parsed."""
    return {word for part in MODELS.findall(text) for word in re.findall(r"[\w./-]+", part)}


def auto_plan(tree: ModuleTree, derive: Callable[[], ReadPlan] | None = None) -> ReadPlan:
    """The built-in plan for the model of a tree: its `models` names the model, its `for` holds, and it names modules of this class (some
    heads hold the same model under another name). A `for` without a value (SP209) and several such plans (SP512) are findings.

    Args:
        derive: derives a plan where there is none; None: that is a finding (SP511).
    """
    from shardplan.language import builtin_plans, parse_plan
    from shardplan.model import choose_plan, no_plan

    from .bind import admits, names_any

    wanted = (*tree.class_names, str(tree.model_type))
    texts = {name: path.read_text("utf-8") for name, path in builtin_plans().items()}
    naming = [
        name for name, text in texts.items() if not words_of_models(text).isdisjoint(wanted)
    ]  # few of many are parsed
    parsed = {one.plan.name: one for one in map(parse_plan, naming) if one.plan is not None}
    plans = [one.plan for one in parsed.values() if one.plan is not None]
    try:
        chosen = choose_plan(tree, plans, partial(admits, tree=tree))
    except PlanError as error:
        files = dict(chain.from_iterable(one.sources.files.items() for one in parsed.values()))
        return ReadPlan(sources=SourceMap(files), findings=error.diagnostics)
    if chosen is not None and names_any(chosen, tree):
        return ReadPlan.of(parsed[chosen.name])
    if derive is not None:
        return derive()
    every = [one.plan for one in map(parse_plan, texts) if one.plan is not None]
    return ReadPlan(findings=no_plan(tree, every).diagnostics)
