"""What two plans do differently: data, which `report` renders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .diagnostics import Location
from .estimates import Estimate
from .mesh import MeshSizes
from .plan import Variant

Collectives = Mapping[str, Mapping[str, int]]  # forward or backward -> collective -> how many


@dataclass(frozen=True, slots=True)
class Said:
    """What a plan says of a module or parameter.

    Args:
        text: its style and options, as a plan would have them.
        location: where.
    """

    text: str
    location: Location = field(compare=False)


@dataclass(frozen=True, slots=True)
class RuleChange:
    """Modules or parameters that two plans have different rules for.

    Args:
        section: the section that the rules stand in; with a model, the variant whose modules are compared.
        names: full names of modules and parameters; without a model, patterns without alternatives.
        old, new: what the rules say; empty where there is none.
    """

    section: Variant
    names: tuple[str, ...]
    old: tuple[Said, ...]
    new: tuple[Said, ...]


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field of a section that two plans set to different values, or modules that it names.

    Args:
        name: `data_parallel.backend`.
        old, new: as a plan would have it, "-" where it is not there; or the modules that it names.
    """

    name: str
    old: str | tuple[str, ...]
    new: str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """Modules that are stored or run differently.

    Args:
        section: the variant.
        names: full names, of modules with the same change.
        gone, added: facts as `Program.describe` has them, of the first of the modules.
    """

    section: Variant
    names: tuple[str, ...]
    gone: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VariantCost:
    """What one variant of a plan costs a rank.

    Args:
        parameters: that it stores of the model split over tp (and ep), before data parallelism.
        size: of these, bytes.
        collectives: of a step on the tp axis.
        estimate: of a step, where one was asked for.
    """

    parameters: int
    size: int
    collectives: Collectives
    estimate: Estimate | None = None


@dataclass(frozen=True, slots=True)
class CostChange:
    """What a variant costs with each of two plans; None where a plan does not have it."""

    section: Variant
    old: VariantCost | None
    new: VariantCost | None


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Whether what was saved with one plan can be read with the other.

    Args:
        weights: Hugging Face folders.
        states: training states, with the optimizer's.
        reason: why not, or why so.
    """

    weights: bool
    states: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """What `diff_plans` returns.

    Args:
        old, new: the plans' names, as the user wrote them.
        rules: that say different things; for each variant of which they are bound, or without a model as text.
        fields: of the sections besides the rules; without a model also `models` and `for`.
        modules: that are stored or run differently; needs a model.
        costs: of each variant; needs a model.
        model: the model's name; None where plans were compared without one.
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
        """Whether training would differ: what a rank stores, computes, sends or keeps. Of plans without a model, whether their
        rules or sections do."""
        variants = any((cost.old is None) != (cost.new is None) for cost in self.costs)
        return bool(self.fields or self.modules or variants or (self.model is None and self.rules))
