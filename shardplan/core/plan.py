"""Plans: as written (`PlanFile`), and bound to one model (`ResolvedPlan`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast, get_args

from .diagnostics import Diagnostic, Location
from .layout import Layout
from .mesh import Axis, MeshSizes
from .module_program import Draws, Exchange
from .sections import ActivationCheckpointing, Compile, DataParallel, PipelineParallel, SeparateMatrices
from .shares import Share
from .sources import SourceMap
from .stages import HandedOn
from .sum_outputs import SummedOutputs, SumRule
from .tree import ModuleTree

Overlay = Literal["sequence_parallel", "expert_parallel", "context_parallel"]
# A section inside another has both names, joined by a dot, and applies if both do.
Section = Literal["tensor_parallel", Overlay, "expert_parallel.sequence_parallel"]
# Sections that apply together, by `variant_name`.
Variant = Literal[
    Section,
    "context_parallel.sequence_parallel",
    "context_parallel.expert_parallel",
    "context_parallel.expert_parallel.sequence_parallel",
]
SECTIONS: tuple[Section, ...] = get_args(Section)  # for one axis, each overrides those before it
# The axis of a section's rules, if it is not tp: they apply in addition to those of tp, and do not override them.
_AXIS_OF: Mapping[Section, Axis] = {"context_parallel": Axis.CP}

Overlays = frozenset[Overlay]  # a variant of a plan: the sections that apply besides `tensor_parallel`
NO_OVERLAYS: Overlays = frozenset()
BESIDE_TP: Overlays = frozenset({"expert_parallel", "context_parallel"})  # these split something at tp 1 too


def section_path(section: Section) -> tuple[str, ...]:
    """The place of a section in a document."""
    return tuple(section.split("."))


def section_at(path: Sequence[str | int]) -> Section | None:
    """The section that contains a place in a document."""
    return next(
        (section for section in reversed(SECTIONS) if tuple(path[: section.count(".") + 1]) == section_path(section)),
        None,
    )


def axis_of(section: Section) -> Axis:
    """The mesh axis of a section's rules."""
    return _AXIS_OF.get(section, Axis.TP)


def overlays_of(sequence_parallel: bool, sizes: MeshSizes | None = None, *, context: bool = False) -> Overlays:
    """The variant that a user asks for.

    Args:
        sizes: the mesh; with several ranks on its ep axis, experts are distributed.
        context: whether the plan has rules for the axis cp; they apply with several ranks on it.
    """
    asked: dict[Overlay, bool] = {
        "sequence_parallel": sequence_parallel,
        "expert_parallel": sizes is not None and sizes.ep > 1,
        "context_parallel": context and sizes is not None and sizes.cp > 1,
    }
    return frozenset(overlay for overlay, on in asked.items() if on)


def sections_of(overlays: Overlays, axis: Axis = Axis.TP) -> tuple[Section, ...]:
    """The sections of a variant for an axis; each overrides those before it."""
    applying = (section for section in SECTIONS if set(section_path(section)) <= {"tensor_parallel", *overlays})
    return tuple(section for section in applying if axis_of(section) is axis)


def variant_name(overlays: Overlays) -> Variant:
    """A variant's name: its sections in alphabetical order."""
    return cast(Variant, ".".join(sorted(overlays)) or "tensor_parallel")


def variant_words(variant: Variant) -> str:
    """ "expert and sequence parallel"."""
    *others, last = (section.removesuffix("_parallel") for section in variant.split("."))
    return f"{', '.join(others)} and {last} parallel" if others else f"{last} parallel"


def without_sequence(overlays: Overlays) -> Overlays:
    """The variant for sequences that are not split, over tp or over cp."""
    return overlays - {"sequence_parallel", "context_parallel"}


Output = Literal["gather", "all_reduce", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of a section: a glob, and what to do with the modules or parameters that it matches.

    Args:
        pattern: the glob.
        style: the canonical name of a style (an alias is resolved while parsing), or "none" (remove an inherited rule).
        location: its place in the document.
        optional: whether it may match nothing.
        override: whether it may differ from an earlier rule of the same section for the same module.
        argument: the argument of `forward` that a block input moves; None: the first.
        arguments: further arguments that it moves, and the style of each.
        grad: the gradient that the readers of a gathered value return: "partial" (R) or "complete" (I); None: the
            structure decides (R if a head that accepts R follows).
        output: the move of the module's output: "gather", "all_reduce", "reduce_scatter".
        packed: the sizes of the parts of a packed dimension, as expressions over config numbers; or the number of equal
            parts, as a number or such an expression.
        heads: the number of heads in each part (in the dimension, if it is one part), as expressions over config
            numbers; empty: the structure decides.
        shares: numbers, arguments and buffers of the module; each rank has, or reads, its share of them.
        fused: whether the module may take a path for training that computes modules below it in one kernel.
        divides: numbers (expressions over config numbers) that tp must divide.
        seq_dim: the sequence dimension of the values that the rule moves.
        read_outside: positions in the module's output (a router's logits) that code outside of the tensor-parallel
            region reads (an auxiliary loss); every rank runs that code in full.
        exchange: how tokens are sent to the ranks of their experts; None: the style's default.
        regather: whether backward keeps only the shard of values gathered along the sequence, and gathers it again.
        having: only for modules that have a number of this name, or a module or parameter of this name below them; None: for all.
        when: a condition over the configuration: if it fails, there is no such rule. A bool: whether it holds.
        stated: the names of the options in the document.
        under: the rule that this one overrides, and keeps options of.
    """

    pattern: str
    style: str
    location: Location
    optional: bool = False
    override: bool = False
    argument: str | None = None
    arguments: tuple[tuple[str, str], ...] = ()
    grad: Literal["partial", "complete"] | None = None
    output: Output | None = None
    packed: tuple[str, ...] | int | str | None = None
    heads: tuple[str, ...] = ()
    shares: tuple[Share, ...] = ()
    fused: bool = True
    divides: tuple[str, ...] = ()
    seq_dim: int = 1
    read_outside: tuple[int, ...] = ()
    exchange: Exchange | None = None
    regather: bool = False
    having: str | None = None
    when: str | bool = True
    stated: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    under: Rule | None = field(default=None, compare=False, repr=False)

    def stating(self, option: str) -> Rule:
        """The rule with the line of an option: this one, or the rule under it."""
        return self if self.under is None or option in self.stated else self.under

    @property
    def options(self) -> dict[str, Any]:
        """The options, besides the style, that two rules must agree on to declare the same."""
        return {
            "argument": self.argument,
            "arguments": self.arguments,
            "grad": self.grad,
            "output": self.output,
            "packed": self.packed,
            "heads": self.heads,
            "shares": self.shares,
            "fused": self.fused,
            "divides": self.divides,
            "seq_dim": self.seq_dim,
            "read_outside": self.read_outside,
            "exchange": self.exchange,
            "regather": self.regather,
            "having": self.having,
        }

    @property
    def divided(self) -> tuple[str, ...]:
        """The numbers of the module that are divided."""
        return tuple(one.name for one in self.shares if one.even)

    @property
    def groups(self) -> str | None:
        """The number of groups of a norm's split features, each with its own mean; None: one."""
        return next((one.groups for one in self.shares if one.groups is not None), None)


def as_written(option: str, value: object) -> Any:
    """The value of a rule's option, as written in a document."""
    if option == "arguments":
        return dict(cast(tuple[tuple[str, str], ...], value))
    if option == "shares":
        shares = [one.written for one in cast(tuple[Share, ...], value)]
        named: dict[str, Any] = {name: said for one in shares if isinstance(one, dict) for name, said in one.items()}
        return named if len(named) == len(shares) else shares
    if isinstance(value, tuple):
        return [int(one) if isinstance(one, str) and one.isdecimal() else one for one in value]
    return value


def stated_options(rule: Rule) -> dict[str, Any]:
    """The options of a rule that differ from their defaults, as written in a document."""
    return {name: as_written(name, value) for name, value in rule.options.items() if value != getattr(PLAIN, name)}


PLAIN = Rule("", "", Location(""))

# The field of `PlanFile` with a section's rules.
FIELD_OF: Mapping[Section, str] = {
    "tensor_parallel": "tensor_parallel",
    "sequence_parallel": "sequence_parallel",
    "expert_parallel": "expert_parallel",
    "context_parallel": "context_parallel",
    "expert_parallel.sequence_parallel": "expert_sequence_parallel",
}


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan as written, after validation of its form, before it meets a model.

    Args:
        name: its own name, else its file's name without the ending.
        file: the document's display name, as in `Location.file`.
        data_parallel, activation_checkpointing, compile, pipeline_parallel, separate_matrices: as in this document; `language` gives what
            applies after `extends`.
        parent: the plan that it extends.
        configurations: a condition over the configuration of models that the plan is for.
        expert_sequence_parallel: the rules of the section `sequence_parallel` inside `expert_parallel`.
        lenient_dead_rules: a rule that matches nothing is a warning (for a plan that another project wrote for a family
            of models).
        sums: by section, the `sum_outputs` of its rules.
        built_in: whether it comes with shardplan: its users do not edit it.
        refused_arguments: arguments of the model's forward that keep their defaults: the plan is not for other calls.
    """

    name: str
    file: str
    version: str = "1"
    description: str = ""
    models: tuple[str, ...] = ()
    tensor_parallel: tuple[Rule, ...] = ()
    sequence_parallel: tuple[Rule, ...] = ()
    expert_parallel: tuple[Rule, ...] = ()
    context_parallel: tuple[Rule, ...] = ()
    expert_sequence_parallel: tuple[Rule, ...] = ()
    data_parallel: DataParallel | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    compile: Compile | None = None
    pipeline_parallel: PipelineParallel | None = None
    separate_matrices: SeparateMatrices | None = None
    parent: PlanFile | None = None
    configurations: str | None = None
    lenient_dead_rules: bool = False
    sums: Mapping[Section, tuple[SumRule, ...]] = field(default_factory=dict)
    built_in: bool = False
    refused_arguments: tuple[str, ...] = ()

    @property
    def lineage(self) -> tuple[PlanFile, ...]:
        """The plan and its ancestors, the oldest first."""
        return (*(self.parent.lineage if self.parent else ()), self)

    def rules(self, section: Section) -> tuple[Rule, ...]:
        return getattr(self, FIELD_OF[section])

    def with_rules(self, change: Callable[[Section, Rule], Rule]) -> PlanFile:
        """The same with a change to each of its own rules."""
        changed: dict[str, Any] = {
            FIELD_OF[section]: tuple(change(section, rule) for rule in self.rules(section)) for section in SECTIONS
        }
        return replace(self, **changed)

    @property
    def has_overlay(self) -> bool:
        return any(plan.sequence_parallel for plan in self.lineage)

    @property
    def refused(self) -> Mapping[str, Location]:
        """The arguments that keep their defaults, those that its ancestors name too -> where the nearest plan names them."""
        own = {n: Location(self.file, ("refused_arguments", i), "value") for i, n in enumerate(self.refused_arguments)}
        return {**(self.parent.refused if self.parent else {}), **own}

    @property
    def has_context(self) -> bool:
        """Whether it has rules for the axis cp."""
        return any(plan.context_parallel for plan in self.lineage)


@dataclass(frozen=True, slots=True)
class Plan:
    """What `load_plan` returns: the plan, the text that its findings point into, and the warnings met while reading."""

    file: PlanFile
    sources: SourceMap = field(default_factory=SourceMap)
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def name(self) -> str:
        return self.file.name

    def __repr__(self) -> str:
        return f"<Plan {self.file.name!r} from {self.file.file}>"


@dataclass(frozen=True, slots=True)
class Assignment:
    """The rule that applies to one module or parameter, after layering.

    Args:
        name: the full dotted name in the model (without the base prefix).
        is_parameter: whether the rule names a parameter rather than a module.
        rule: the rule.
        section: the section that contains the rule.
    """

    name: str
    is_parameter: bool
    rule: Rule
    section: Section


@dataclass(frozen=True, slots=True)
class MatrixParts:
    """The matrices that lie next to each other in a parameter, in the order of the unsharded model.

    Args:
        by: the field of `separate_matrices` that names the parameter.
        dim: the dim along which they lie, from 0.
        sizes: their lengths along it; they add up to the parameter's.
    """

    by: Literal["parts", "heads"]
    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan bound to a model: one assignment for each module or parameter that a rule reaches.

    Args:
        overlays: the variant: the sections that override the tensor-parallel rules.
        assignments: by full name, in the tree's order; rules removed with `none` are gone.
        data_parallel, activation_checkpointing, compile, pipeline_parallel, separate_matrices: the sections that apply after `extends`.
        dp_units, ac_modules, compile_modules: their globs expanded to module names, in the tree's order.
        dp_parts: further modules that are FSDP units of their own: frozen ones, and those with a dtype of their own.
        dp_experts: the modules of experts distributed over the axis ep: FSDP units of their own, over other ranks.
        dp_ignored: the parameters that data parallelism leaves alone, by full name.
        incoming: the incoming layout (I or R) of each module that accepts both, and the output layout of each module
            with `output: gather`, as the layout check saw them; None if it did not run.
        cross_module_reads: each module that was seen to run -> the parameters of modules below it that its own code
            reads, by full name.
        sums: the outputs that are added up before they are reduced.
        shared_reads: module with a move I -> R of an argument -> the module that moved the same tensor before it.
            This held in every call of the block around both that the layout check saw. The moves at run time do not
            depend on it (the tensors themselves are compared then); the expected number of collectives does.
        same_arguments: module -> argument that its rule moves -> others that were the same tensor in each call that the
            layout check saw, "" for the first argument: they move together. For counting, like `shared_reads`.
        read_results: module that was seen to run -> positions of its results that code of the model was seen to read.
        draws: module whose own code draws random numbers in training -> whose numbers.
        pp_blocks: the repeated blocks that pipeline stages divide, in order.
        pp_first, pp_last: modules and parameters outside of the blocks that belong to the first and last stage. First those
            that the plan names; once a recorded run was examined (`compiler.layout.stage_plan`), all with parameters.
        pp_carried: the modules whose output later stages get too.
        pp_handed: the parts of that output, as that run shows.
        pp_results: the length of a block's result tuple; 0: one tensor. Seen in that run.
        pp_written: as `PipelineCut.written`, from that run.
        matrices: the matrices in each parameter that `separate_matrices` names, by the parameter's full name.
        axis: the mesh axis of the rules. For an axis other than tp, `sizes.tp` is its size.
        on_cp: the same plan with its rules for the axis cp, if they apply: a module has several assignments, one per axis.
    """

    plan: PlanFile
    tree: ModuleTree
    sizes: MeshSizes
    overlays: Overlays
    assignments: Mapping[str, Assignment]
    data_parallel: DataParallel | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    compile: Compile | None = None
    dp_units: tuple[str, ...] = ()
    ac_modules: tuple[str, ...] = ()
    compile_modules: tuple[str, ...] = ()
    dp_parts: tuple[str, ...] = ()
    dp_experts: tuple[str, ...] = ()
    dp_ignored: frozenset[str] = frozenset()
    incoming: Mapping[str, Layout] | None = None
    cross_module_reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sums: tuple[SummedOutputs, ...] = ()
    shared_reads: Mapping[str, str] = field(default_factory=dict)
    same_arguments: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    read_results: Mapping[str, frozenset[int]] = field(default_factory=dict)
    draws: Mapping[str, Draws] = field(default_factory=dict)
    pipeline_parallel: PipelineParallel | None = None
    pp_blocks: tuple[str, ...] = ()
    pp_first: tuple[str, ...] = ()
    pp_last: tuple[str, ...] = ()
    pp_carried: tuple[str, ...] = ()
    pp_handed: tuple[HandedOn, ...] = ()
    pp_results: int = 0
    pp_written: tuple[str, ...] = ()
    separate_matrices: SeparateMatrices | None = None
    matrices: Mapping[str, MatrixParts] = field(default_factory=dict)
    axis: Axis = Axis.TP
    on_cp: ResolvedPlan | None = None

    @property
    def sequence_parallel(self) -> bool:
        return "sequence_parallel" in self.overlays

    def only_hooks_read(self, module: str, positions: Sequence[int]) -> bool:
        """Whether a module was seen to run, and no code of the model to read these results."""
        return self.read_results.get(module, frozenset(positions)).isdisjoint(positions)

    @property
    def context_parallel(self) -> bool:
        return "context_parallel" in self.overlays

    @cached_property
    def fsdp_units(self) -> tuple[str, ...]:
        """All modules that FSDP2 gathers separately: the plan's units and those that follow from the model."""
        return (*self.dp_units, *self.dp_parts, *(name for name in self.dp_experts if name not in self.dp_units))

    @cached_property
    def modules(self) -> Mapping[str, Assignment]:
        """The assignments of modules."""
        return {n: a for n, a in self.assignments.items() if not a.is_parameter}

    @cached_property
    def parameters(self) -> Mapping[str, Assignment]:
        """The assignments of single parameters."""
        return {n: a for n, a in self.assignments.items() if a.is_parameter}
