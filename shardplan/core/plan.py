"""Plans: as written (`PlanFile`), and bound to one model (`ResolvedPlan`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, get_args

from .diagnostics import Diagnostic, Location
from .layout import Layout
from .mesh import MeshSizes
from .sources import SourceMap
from .sums import SummedOutputs, SumRule
from .tree import ModuleTree

Overlay = Literal["sequence_parallel"]
OVERLAYS: tuple[Overlay, ...] = get_args(Overlay)  # sections that are laid over tensor_parallel, in this order
Section = Literal["tensor_parallel", Overlay]
SECTIONS: tuple[Section, ...] = ("tensor_parallel", *OVERLAYS)

Overlays = frozenset[Overlay]  # a variant of a plan: the overlays that are laid over it
NO_OVERLAYS: Overlays = frozenset()


def overlays_of(sequence_parallel: bool) -> Overlays:
    """The variant that a user asks for."""
    return frozenset({"sequence_parallel"}) if sequence_parallel else NO_OVERLAYS


def variant_name(overlays: Overlays) -> Section:
    """The section that is laid over the others last."""
    return max((section for section in SECTIONS if section in overlays), key=SECTIONS.index, default="tensor_parallel")


Output = Literal["gather", "all_reduce", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of a section: a glob and what to do with the modules or parameters that it matches.

    Args:
        pattern: the glob.
        style: the canonical name of a style (an alias is resolved while parsing), or "none" (remove an inherited rule).
        location: where it stands.
        optional: matching nothing is no error.
        override: may differ from an earlier rule of the same section for the same module.
        argument: the argument of `forward` that a door moves; None is its first.
        grad: what the readers of a gathered value hand back: "partial" (R) or "complete" (I); None is decided from the
            structure (a head that takes R follows, or not).
        output: what the module's output goes through: "gather", "all_reduce", "reduce_scatter".
        packed: the sizes of the parts of a packed dimension, as expressions over config numbers, or the number of equal parts.
        divide: attributes of the module instance to divide by tp (`num_heads`, `config.num_attention_heads`).
        divides: numbers (expressions over config numbers) that tp must divide.
        seq_dim: the sequence dimension of what the rule moves.
        read_outside: positions in the module's output that are read outside the tensor-parallel region by something
            every rank computes in full (router logits of an auxiliary loss).
        regather: what is gathered along the sequence is not kept for backward: its shard is, which is gathered again there.
    """

    pattern: str
    style: str
    location: Location
    optional: bool = False
    override: bool = False
    argument: str | None = None
    grad: Literal["partial", "complete"] | None = None
    output: Output | None = None
    packed: tuple[str, ...] | int | None = None
    divide: tuple[str, ...] = ()
    divides: tuple[str, ...] = ()
    seq_dim: int = 1
    read_outside: tuple[int, ...] = ()
    regather: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What two rules must agree on, besides the style, to say the same thing."""
        return {
            "argument": self.argument,
            "grad": self.grad,
            "output": self.output,
            "packed": self.packed,
            "divide": self.divide,
            "divides": self.divides,
            "seq_dim": self.seq_dim,
            "read_outside": self.read_outside,
            "regather": self.regather,
        }


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """FSDP2's MixedPrecisionPolicy.

    Args:
        param, reduce, output: dtypes by name ("bfloat16", "float16", "float32"); None keeps the model's.
        given: the fields that the document sets, with the place of each; the others have their defaults. What a
            child plan inherits is decided by them (`core.inherit`).
    """

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    cast_forward_inputs: bool = True
    given: Mapping[str, Location] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class MegatronFSDP:
    """The options of Megatron-FSDP, with the defaults of the package.

    Args:
        zero_dp_strategy: what is sharded: 0 or "no_shard", 1 or "optim", 2 or "optim_grads", 3 or "optim_grads_params".
        outer_dp_sharding_strategy: the same over dp_replicate: 0 or "no_shard", 1 or "optim".
        init_model_with_meta_device: None is whether the model is on the meta device.
        grad_reduce_in_fp32, preserve_fp32_weights: dtypes of main gradients and weights.
        overlap_grad_reduce, overlap_param_gather, check_for_nan_in_grad, average_in_collective, disable_bucketing,
            calculate_per_token_loss, keep_fp8_transpose_cache, nccl_ub, fsdp_double_buffer: the package's own.
        given: the fields that the document sets, with the place of each; the others have their defaults. What a
            child plan inherits is decided by them (`core.inherit`).
    """

    zero_dp_strategy: int | Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = 3
    outer_dp_sharding_strategy: int | Literal["no_shard", "optim"] = 0
    init_model_with_meta_device: bool | None = None
    grad_reduce_in_fp32: bool = False
    preserve_fp32_weights: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    check_for_nan_in_grad: bool = False
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    given: Mapping[str, Location] = field(default_factory=dict, compare=False, repr=False)

    @property
    def values(self) -> dict[str, Any]:
        """All options by name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "given"}


@dataclass(frozen=True, slots=True)
class DDP:
    """The options of DistributedDataParallel, with torch's defaults.

    Args:
        broadcast_buffers: buffers are those of the first rank, sent before each forward.
        find_unused_parameters: trained parameters may be without a gradient.
        static_graph: which parameters are used is the same in every step.
        bucket_cap_mb: the size of a bucket of gradients in MiB; None is torch's own.
        gradient_as_bucket_view: gradients are views of the buckets.
        given: the fields that the document sets, with the place of each; the others have their defaults. What a
            child plan inherits is decided by them (`core.inherit`).
    """

    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: int | None = None
    gradient_as_bucket_view: bool = False
    given: Mapping[str, Location] = field(default_factory=dict, compare=False, repr=False)

    @property
    def values(self) -> dict[str, Any]:
        """All options by name, as DistributedDataParallel takes them."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "given"}


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The data-parallel wrapping pass.

    Args:
        backend: the name of a record of `shardplan.backends`.
        units: globs of the modules that are gathered together; a list of modules stands for its elements.
        reshard_after_forward: FSDP2's argument; "all_but_last" keeps the last unit gathered.
        mixed_precision: None keeps the model's dtypes.
        cpu_offload: parameters, gradients and optimizer state live on the host: False, True, or "pinned".
        forward_prefetch: how many following units to gather ahead; None leaves FSDP2's own choice.
        backward_prefetch: the same in backward.
        frozen: where modules go that are frozen altogether: "own" (a unit each, if no unit holds them), "root" (with the
            root, even if they are named as units), "replicated" (every data-parallel rank holds them whole, as all frozen
            parameters); None treats them as all others.
        ignored: globs of modules and parameters that the backend leaves alone: every data-parallel rank holds them whole,
            and their gradients are not reduced.
        megatron_fsdp, ddp: the options of that backend; None is its defaults.
        given: the fields that the document sets, with the place of each; the others have their defaults. What a
            child plan inherits is decided by them (`core.inherit`).
    """

    backend: str = "fsdp2"
    units: tuple[str, ...] = ()
    reshard_after_forward: bool | int | Literal["all_but_last"] = "all_but_last"
    mixed_precision: MixedPrecision | None = None
    cpu_offload: bool | Literal["pinned"] = False
    forward_prefetch: int | None = None
    backward_prefetch: int | None = None
    frozen: Literal["own", "root", "replicated"] | None = None
    ignored: tuple[str, ...] = ()
    megatron_fsdp: MegatronFSDP | None = None
    ddp: DDP | None = None
    location: Location | None = None
    given: Mapping[str, Location] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """Modules whose activations are recomputed in backward.

    Args:
        modules: globs; without the field, the data-parallel units.
        mode: "full": everything inside is computed again; "selective": all but matrix products and collectives.
        every: of the modules that each glob matches, each n-th alone.
        given: the fields that the document sets, with the place of each; the others have their defaults. What a
            child plan inherits is decided by them (`core.inherit`).
    """

    modules: tuple[str, ...] = ()
    mode: Literal["full", "selective"] = "full"
    every: int = 1
    location: Location | None = None
    given: Mapping[str, Location] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Compile:
    """Modules whose forward is compiled on its own (torch.compile).

    Args:
        modules: globs; without the field, the data-parallel units.
        fullgraph, backend: torch.compile's arguments.
        async_tensor_parallel: matrix products run while the sequence is gathered and scattered.
        given: the fields that the document sets, with the place of each; the others have their defaults. What a
            child plan inherits is decided by them (`core.inherit`).
    """

    modules: tuple[str, ...] = ()
    fullgraph: bool = True
    backend: str = "inductor"
    async_tensor_parallel: bool = False
    location: Location | None = None
    given: Mapping[str, Location] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan as written, after validation of its form, before it meets a model.

    Args:
        name: as the plan calls itself, else its file's name without the ending.
        file: the document's display name, as in `Location.file`.
        data_parallel, activation_checkpointing, compile: as this document has them; `core.inherit` gives what holds.
        parent: what it extends.
        lenient_dead_rules: a rule that matches nothing is a warning (a plan that another project wrote for a family
            of models).
        sums: by section, what `sum_outputs` of its rules says.
    """

    name: str
    file: str
    version: str = "1"
    description: str = ""
    models: tuple[str, ...] = ()
    tensor_parallel: tuple[Rule, ...] = ()
    sequence_parallel: tuple[Rule, ...] = ()
    data_parallel: DataParallel | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    compile: Compile | None = None
    parent: PlanFile | None = None
    lenient_dead_rules: bool = False
    sums: Mapping[Section, tuple[SumRule, ...]] = field(default_factory=dict)

    @property
    def lineage(self) -> tuple[PlanFile, ...]:
        """The plan and what it extends, the oldest ancestor first."""
        return (*(self.parent.lineage if self.parent else ()), self)

    def rules(self, section: Section) -> tuple[Rule, ...]:
        return self.sequence_parallel if section == "sequence_parallel" else self.tensor_parallel

    @property
    def has_overlay(self) -> bool:
        return any(plan.sequence_parallel for plan in self.lineage)


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
    """The rule that holds for one module or parameter, after layering.

    Args:
        name: the full dotted name in the model (without the base prefix).
        is_parameter: whether the rule names a parameter rather than a module.
        rule: the rule.
        section: the section that the rule stands in.
    """

    name: str
    is_parameter: bool
    rule: Rule
    section: Section


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan bound to a model: one assignment for each module or parameter that a rule reaches.

    Args:
        overlays: the variant: the sections that are laid over the tensor-parallel rules.
        assignments: by full name, in the tree's order; rules removed with `none` are gone.
        data_parallel, activation_checkpointing, compile: the sections that hold after `extends`.
        dp_units, ac_modules, compile_modules: their globs expanded to module names, in the tree's order.
        dp_parts: modules that are FSDP units of their own beside the plan's: frozen ones, and those of a dtype of their own.
        dp_ignored: the parameters that data parallelism leaves alone, by full name.
        arrivals: what the layout check saw arrive (I or R) at each module that takes both, and what a module with
            `output: gather` hands on; None where it did not run.
        elsewhere: each module that was seen to run -> the parameters of modules below it that its own code reads, by full
            name.
        sums: the outputs that are added up before they are reduced.
        shared_reads: module that moves an argument I -> R -> the module that moved the same tensor before, in every call of
            the block around both that the layout check saw. What is moved when the model runs does not depend on it
            (the tensors themselves are compared then); the number of collectives that is stated does.
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
    dp_ignored: frozenset[str] = frozenset()
    arrivals: Mapping[str, Layout] | None = None
    elsewhere: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sums: tuple[SummedOutputs, ...] = ()
    shared_reads: Mapping[str, str] = field(default_factory=dict)

    @property
    def sequence_parallel(self) -> bool:
        return "sequence_parallel" in self.overlays

    @cached_property
    def fsdp_units(self) -> tuple[str, ...]:
        """All modules that FSDP2 gathers on their own: the plan's units and those that follow from the model."""
        return (*self.dp_units, *self.dp_parts)

    @cached_property
    def modules(self) -> Mapping[str, Assignment]:
        """The assignments of modules."""
        return {n: a for n, a in self.assignments.items() if not a.is_parameter}

    @cached_property
    def parameters(self) -> Mapping[str, Assignment]:
        """The assignments of single parameters."""
        return {n: a for n, a in self.assignments.items() if a.is_parameter}
