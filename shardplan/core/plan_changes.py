"""The differences between two plans: data, which `report` renders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .diagnostics import Location
from .estimates import Estimate
from .mesh import MeshSizes
from .plan import Variant

Collectives = Mapping[str, Mapping[str, int]]  # forward or backward -> collective -> number


@dataclass(frozen=True, slots=True)
class Said:
    """A plan's rule for a module or parameter.

    Args:
        text: its style and options, as written in a plan.
        location: its place.
    """

    text: str
    location: Location = field(compare=False)


@dataclass(frozen=True, slots=True)
class RuleChange:
    """Modules or parameters with different rules in two plans.

    Args:
        section: the section that contains the rules; with a model, the variant whose modules are compared.
        names: full names of modules and parameters; without a model, patterns without alternatives.
        old, new: the text of the rules; empty if there is none.
    """

    section: Variant
    names: tuple[str, ...]
    old: tuple[Said, ...]
    new: tuple[Said, ...]


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field of a section that two plans set to different values, or to other modules.

    Args:
        name: `data_parallel.backend`.
        old, new: the value as written in a plan, "-" if it is missing; or the modules that it names.
    """

    name: str
    old: str | tuple[str, ...]
    new: str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """Modules that are stored or run differently.

    Args:
        section: the variant.
        names: full names of modules with the same change.
        gone, added: facts as `Program.describe` has them, about the first of the modules.
    """

    section: Variant
    names: tuple[str, ...]
    gone: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VariantCost:
    """The cost of one variant of a plan for a rank.

    Args:
        parameters: the number it stores of the model split over tp (and ep), before data parallelism.
        size: their bytes.
        collectives: the collectives of a step on the tp axis.
        estimate: the estimate of a step, if one was requested.
    """

    parameters: int
    size: int
    collectives: Collectives
    estimate: Estimate | None = None


@dataclass(frozen=True, slots=True)
class CostChange:
    """The cost of a variant with each of two plans; None if a plan lacks the variant."""

    section: Variant
    old: VariantCost | None
    new: VariantCost | None


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Whether what was saved with one plan can be read with the other.

    Args:
        weights: whether Hugging Face folders can be read.
        states: whether training states can be read, the optimizer's included.
        reason: the reason for the answer.
    """

    weights: bool
    states: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """What `diff_plans` returns.

    Args:
        old, new: the plans' names, as the user wrote them.
        rules: the rules that differ; for each variant as bound, or without a model as text.
        fields: the fields of sections that differ, besides the rules; without a model also `models` and `for`.
        modules: the modules that are stored or run differently; needs a model.
        costs: the costs of each variant; needs a model.
        model: the model's name; None if the plans were compared without one.
        sizes: the mesh for which they were bound.
        checkpoints: needs a model.
    """

    old: str
    new: str
    rules: tuple[RuleChange, ...] = ()
    fields: tuple[FieldChange, ...] = ()
    modules: tuple[ModuleChange, ...] = ()
    costs: tuple[CostChange, ...] = ()
    model: str | None = None
    sizes: MeshSizes | None = None
    checkpoints: Checkpoints | None = None

    @property
    def differs(self) -> bool:
        """Whether training would differ: what a rank stores, computes, sends or keeps. Without a model: whether rules
        or sections differ."""
        variants = any((cost.old is None) != (cost.new is None) for cost in self.costs)
        return bool(self.fields or self.modules or variants or (self.model is None and self.rules))
