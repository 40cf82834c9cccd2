"""Derived plans, for models without a built-in one, and derived rules for the axis cp, for plans that have none."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, TypedDict, TypeVar

from shardplan.compiler.automatic import Derive, ReadPlan
from shardplan.compiler.bind import bind, decided
from shardplan.compiler.check.exchanged_heads import check
from shardplan.compiler.check.facts import Facts
from shardplan.compiler.overrides import with_parent
from shardplan.compiler.user_inputs import Model
from shardplan.compiler.variants import bind_variants
from shardplan.core.derived_plan import DerivedPlan
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import NO_OVERLAYS, PlanFile
from shardplan.language import parse_plan
from shardplan.language.parsing import parse_text
from shardplan.report.errors import raise_errors

if TYPE_CHECKING:
    from shardplan.model import FoundModel

SHOWN = "<derived>"  # the plan's file name in findings
SECTIONS: tuple[Literal["sequence_parallel", "expert_parallel"], ...] = ("sequence_parallel", "expert_parallel")
SMALLEST = 2  # the tp size for which a plan is derived where none is given


class Wanted(TypedDict):
    """The purpose of a derived plan, as for `new_plan`."""

    tp: int
    sequence_parallel: bool
    expert_parallel: bool


Text = tuple[str, str | None]  # a plan, and why it could not be cached
Result = TypeVar("Result")


class Share(Protocol):
    """Calls a function on one of several ranks, and returns its result on all."""

    def __call__(self, make: Callable[[], Result]) -> Result: ...


def alone(make: Callable[[], Result]) -> Result:
    """Call the function, where there is only one process."""
    return make()


def deriving(
    model: Model,
    sizes: MeshSizes,
    *,
    derive: bool,
    sequence_parallel: bool | None,
    progress: Callable[[str], None] = lambda text: None,
    share: Share = alone,
) -> Derive | None:
    """A function that derives a plan for a model, and rules for the axis cp, as `init_plan` does. It does not prove them:
    they are checked and proven afterwards, like any plan. None where deriving is not allowed.

    Args:
        model: as the user named it.
        derive: whether deriving is allowed.
        sizes: those of the mesh. The plan is derived for their tp, or for the smallest size where tp is not above 1. It has an
            expert-parallel section where ep is above 1, and rules for cp where cp is above 1.
        sequence_parallel: whether the plan has a sequence-parallel section.
        progress: called with what is being done.
        share: calls a function on one of several ranks, and returns its result on all.
    """
    return _Deriving(model, sizes, bool(sequence_parallel), progress, share) if derive else None


@dataclass(frozen=True)
class _Deriving:
    """Args: as for `deriving`."""

    model: Model
    sizes: MeshSizes
    sequence_parallel: bool
    progress: Callable[[str], None]
    share: Share

    def __call__(self, found: FoundModel) -> ReadPlan:
        sizes = self.sizes
        wanted = Wanted(
            tp=max(sizes.tp or 1, SMALLEST),
            sequence_parallel=self.sequence_parallel or sizes.cp > 1,  # rules for cp follow from that section
            expert_parallel=sizes.ep > 1,
        )
        text, unkept = self.share(partial(_text, found, wanted, self.progress))
        read = _read(text)
        return replace(read, derived=_derived(found, read, text, unkept, _command(self.model, wanted, sizes)))

    def over_cp(self, found: FoundModel, given: ReadPlan, *, compiled: bool) -> ReadPlan:
        if self.sizes.cp == 1:
            return given
        assert given.plan is not None
        name = given.plan.name
        before = f'version: "1"\nname: {name}\nextends: {name}\n' if given.derived is None else given.derived.text
        self.progress("splitting the sequence over cp")
        text = self.share(partial(_with_context, found, before, given.plan, self.sizes, compiled))
        read = _read(text)
        if given.derived is not None:
            return replace(read, derived=replace(given.derived, text=text))
        section = text.removeprefix(before).split("\n", 2)[2]
        rules = ", ".join(line.strip() for line in section.splitlines() if not line.strip().startswith("#"))
        derived = _derived(
            found, read, text, None, f"write them under `context_parallel` in a plan that extends {name}"
        )
        return replace(read, derived=replace(derived, description=rules, extends=name))


def _read(text: str) -> ReadPlan:
    parsed = parse_text(text, file=SHOWN)
    assert parsed.plan is not None, text
    return ReadPlan.of(parsed)


def _with_context(found: FoundModel, before: str, plan: PlanFile, sizes: MeshSizes, compiled: bool) -> str:
    """The text of a plan with rules for the axis cp. Heads are exchanged where the cp ranks divide them, and nothing is compiled.

    Args:
        before: the text without them.
    """
    from shardplan.authoring.context_section import HEADS, MIX
    from shardplan.authoring.init.new import rules_over_cp
    from shardplan.authoring.init.write import section_lines

    plan, _ = decided(plan, found.tree)
    rules = rules_over_cp(found, plan)
    child = parse_plan({"version": "1", "name": plan.name, "context_parallel": rules}).plan
    assert child is not None, rules
    resolved, _ = bind(with_parent(child, plan), found.tree, sizes, frozenset({"context_parallel"}))
    undivided = {d.primary.location.path[1] for d in check(Facts(resolved)) if d.primary is not None}
    rules = {
        pattern: {**options, "style": MIX}
        if options["style"] == HEADS and (compiled or pattern in undivided)
        else options
        for pattern, options in rules.items()
    }
    return "\n".join([before, *section_lines("context_parallel", rules, found.tree), ""])


def _text(found: FoundModel, wanted: Wanted, progress: Callable[[str], None]) -> Text:
    """The plan file, from the cache or derived."""
    from shardplan.authoring.init.kept_plans import digest_of, keep, kept
    from shardplan.authoring.init.new import new_plan

    digest = digest_of(found, **wanted)
    if digest is not None and (text := kept(digest)) is not None:
        return text, None
    made = new_plan(found, **wanted, name="derived", progress=progress)
    raise_errors(made.diagnostics, made.sources)
    return made.text, None if digest is None else keep(digest, made.text)


def _derived(found: FoundModel, read: ReadPlan, text: str, kept: str | None, save: str) -> DerivedPlan:
    from shardplan.compiler.lower import split_parameters
    from shardplan.core.coverage import covered

    assert read.plan is not None
    resolved = bind_variants(read.plan, found.tree, MeshSizes(), {NO_OVERLAYS}).resolved[NO_OVERLAYS]
    split, whole = covered(found.tree, split_parameters(resolved))
    return DerivedPlan(text, read.plan.description, save, split, whole, kept)


def _command(model: Model, wanted: Wanted, sizes: MeshSizes) -> str:
    """The command line, or else the call, that writes the plan to a file."""
    sections = [section for section in SECTIONS if wanted[section]] + ["context_parallel"] * (sizes.cp > 1)
    if not isinstance(model.name, str):
        given = [f"{name}={name}" for name in ("inputs", "reduced") if getattr(model, name) is not None]
        named = f"shardplan.Model(model, {', '.join(given)})" if given else "model"
        options = [f"tp={wanted['tp']}", *(f"{section}=True" for section in sections)]
        return f"shardplan.init_plan({named}, {', '.join(options)}).text"
    words = ["shardplan", "init", model.name, "-o", "plan.yaml", "--tp", str(wanted["tp"])]
    words += [f"--{section.replace('_', '-')}" for section in sections]
    words += [word for name, value in (model.settings or {}).items() for word in ("--set", f"{name}={value}")]
    words += ["--inputs", model.inputs] if isinstance(model.inputs, str) else []
    words += ["--reduced", model.reduced] if isinstance(model.reduced, str) else []
    words += ["--trust-remote-code"] if model.trust_remote_code else []
    return shlex.join(words)
