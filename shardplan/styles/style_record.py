"""The record of a style. The schema, the checks, the lowering and the table in docs/ are derived from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardplan.core.layout import SEQ, I, Layout, LayoutKind, R, V
from shardplan.core.mesh import Axis
from shardplan.core.plan import Output
from shardplan.core.tree import ModuleKind

Features = Literal["out", "in", "expert", "head"]  # "expert", "head": whole ones, along dim 0 of a stack
TrialKind = ModuleKind | Literal["parameter"]  # "parameter": one that has its own rule

# Kinds of modules in several tables.
MATMUL: frozenset[ModuleKind] = frozenset({"linear", "conv1d"})
EMBEDDING: frozenset[ModuleKind] = frozenset({"embedding"})
DEPTHWISE: frozenset[ModuleKind] = frozenset({"depthwise"})
NORM: frozenset[ModuleKind] = frozenset({"norm"})
OTHER: frozenset[ModuleKind] = frozenset({"other"})
PARAMETER: frozenset[Literal["parameter"]] = frozenset({"parameter"})

# The dims of a parameter that hold its output and its input features, by the kind of its module. Any other is a bare
# parameter or a stack of expert weights [experts, out, in]: counted from the end.
FEATURE_DIMS: dict[tuple[ModuleKind, str], dict[Features, int]] = {
    ("linear", "weight"): {"out": 0, "in": 1},
    ("linear", "bias"): {"out": 0},
    ("conv1d", "weight"): {"out": 1, "in": 0},
    ("conv1d", "bias"): {"out": 0},
    ("depthwise", "weight"): {"out": 0},
    ("depthwise", "bias"): {"out": 0},
    ("embedding", "weight"): {"out": 1, "in": 0},
}


def feature_dim(kind: ModuleKind, parameter: str, features: Features, ndim: int) -> int | None:
    """The dim (from 0) of a parameter that holds the given features; None if it has no such dim (`in` of a bias)."""
    if features in ("expert", "head"):
        return 0
    known = FEATURE_DIMS.get((kind, parameter))
    if known is not None:
        return known.get(features)
    if ndim == 1:
        return 0 if features == "out" else None
    return ndim - 2 if features == "out" else ndim - 1


@dataclass(frozen=True, slots=True)
class ParameterStyle:
    """How a style stores and reads a parameter.

    Args:
        shard: the features by which it is split into shards, or None for a whole copy on every rank.
        computed: the kind of layout that the module's code reads (core/layout.py): V, the shard; I, whole with a complete
            gradient; R, whole with a partial one; P, 1/tp of a whole copy. Shards that are read whole are gathered.
        packed: split each of the rule's `packed` parts, not the dimension as a whole.
        as_input: on the tp axis its gradient follows the module's input: complete if that is I, a partial sum if it is
            R or a slice.
        axis: the axis over which it is split.
    """

    shard: Features | None
    computed: LayoutKind
    packed: bool = False
    as_input: bool = False
    axis: Axis = Axis.TP


WHOLE = ParameterStyle(None, "I")
WHOLE_PARTIAL = ParameterStyle(None, "R")
WHOLE_AS_INPUT = ParameterStyle(None, "I", as_input=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a style's rules that do not follow from its layouts.

    Args:
        output: the values of `output:`.
        grad: whether `grad:` is accepted.
    """

    output: tuple[Output, ...] = ()
    grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A table whose vectors are looked up by id: its inputs are token ids, which are not moved. If its rows are split,
    ids outside of this rank's ceil-chunk give zero.

    Args:
        until_block_input: the vectors stay a partial sum until the plan's `split_seq_input` rule. Without one, or if a
            complete value replaces them, they are reduced at once.
    """

    until_block_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStyle:
    """What a style does along a value's features, its last dim, besides the moves of the whole value.

    Args:
        means: whether a mean in the forward over features that are spread over the ranks covers those of all ranks.
        dtensor: the output, split in its features, is returned to the caller as a DTensor of the full shape.
        later: whether the loss that reads the output computes it, a chunk of tokens at a time, also on one rank.
        tail: the config number for the trailing output features that every rank's heads read (MLA's rotary key): only
            these pass a move I -> R.
    """

    means: bool = False
    dtensor: bool = False
    later: bool = False
    tail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStyle:
    """How the experts of a module are distributed, each whole on one rank.

    Args:
        exchanged: each rank sends its own tokens to the ranks of their experts, over the axis ep. Else every rank of
            the tp axis has all tokens and computes a partial sum with its experts.
    """

    exchanged: bool


REMOVAL = 10  # the rank of removing a rule; likelier changes have smaller ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Where a style is tried in place of a rule that the layout check blames. The fix becomes the finding's help line.

    Args:
        on: kinds of modules.
        whole, sliced: its rank among all trials there, without and with sequence parallelism; the smallest rank is
            the likeliest. None: it is not tried.
        output: the `output:` of the tried rule.
    """

    on: frozenset[TrialKind]
    whole: int | None = None
    sliced: int | None = None
    output: Output | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One style.

    A value passes four layouts at a module. Its input has one of `input_sources` and is moved to `input_destination`.
    The module's own forward returns a value in `output_source`, which is moved to `output_destination`.

    Args:
        name: its name in plans.
        aliases: older spellings of the same style.
        summary: one sentence for the table of styles and the editor's hover text.
        kinds: the module kinds that it fits; None: any.
        on_parameters: whether a rule may name a single parameter: then only `weight` counts, and there are no moves.
        weight: how every parameter except `bias` is stored and read.
        bias: how the parameter `bias` is stored and read; it is then added once, after the reduction. None: as `weight`.
        input_sources: the accepted input layouts; empty: any, without a move.
        input_destination: the layout that the module's forward reads; None: as it arrives.
        output_source: the layout that the forward returns; None: it follows from the inputs, and is not moved.
        output_destination: the layout of the output; None: `output_source`.
        argument: the arguments that are moved: "first" (or the rule's `argument`), "floats" (every floating-point
            tensor).
        options: options of its rules that do not follow from the layouts.
        lookup: for a table of vectors.
        features: its work along the features of a value.
        experts: for a module of distributed whole experts: its rule covers the module's parameters.
        owns_parameters: whether it stores the module's parameters; else other rules do.
        on_cp: whether rules for the axis cp may name it.
        exchanges_heads: whether, on the axis cp, the module has all tokens and a rank's share of heads and channels:
            the share that the tp rules below it would give to a rank of an axis of that size.
        trials: where it is proposed as a repair; empty: nowhere.
        comment: the comment that `init` writes above the first rule of the style in its plan; empty: none.
        source: the origin of the scheme.
    """

    name: str
    summary: str
    aliases: tuple[str, ...] = ()
    kinds: frozenset[ModuleKind] | None = None
    on_parameters: bool = False
    weight: ParameterStyle = WHOLE
    bias: ParameterStyle | None = None
    input_sources: tuple[Layout, ...] = ()
    input_destination: Layout | None = None
    output_source: Layout | None = None
    output_destination: Layout | None = None
    argument: Literal["first", "floats"] = "first"
    options: Options = Options()
    lookup: Lookup | None = None
    features: FeatureStyle = FeatureStyle()
    experts: ExpertStyle | None = None
    owns_parameters: bool = True
    on_cp: bool = False
    exchanges_heads: bool = False
    trials: tuple[Trial, ...] = ()
    comment: str = ""
    source: str = ""

    def parameter(self, name: str) -> ParameterStyle:
        """How it stores the parameter with that short name."""
        return self.bias if name == "bias" and self.bias is not None else self.weight

    @property
    def shards_parameters(self) -> bool:
        """Whether each rank computes with its shard; a parameter that is gathered where it is read does not count."""
        return self.weight.computed == "V" and self.weight.axis is Axis.TP

    @property
    def exchanges(self) -> bool:
        """Whether tokens are sent to the ranks of their experts."""
        return self.experts is not None and self.experts.exchanged

    @property
    def as_input(self) -> bool:
        """Whether the tp layout of the module's input determines its parameters' gradients."""
        return self.weight.as_input or self.exchanges

    @property
    def splits_rows(self) -> bool:
        """Whether each rank has some rows of a table, so that its look-ups are a partial sum."""
        return self.lookup is not None and self.weight.shard == "in"

    @property
    def until_block_input(self) -> bool:
        """Whether looked-up vectors stay a partial sum until the block input of the sequence-parallel region."""
        return self.lookup is not None and self.lookup.until_block_input

    @property
    def gathers_features(self) -> bool:
        """Whether the output features of a matrix are split, and the output is gathered."""
        return self.lookup is None and self.output_source == V(-1) and self.output_destination == I

    @property
    def gathers_sequence(self) -> bool:
        """Whether the output is a slice of the sequence and is gathered, as with `output: gather`; the structure decides between R and I."""
        return self.output_source == V(SEQ) and self.output_destination == R

    @property
    def along_sequence(self) -> bool:
        """Whether something is split along the sequence."""
        layouts = (*self.input_sources, self.input_destination, self.output_source, self.output_destination)
        return any(layout is not None and layout.dim == SEQ for layout in layouts)

    @property
    def packed_option(self) -> bool:
        """Whether `packed:` is accepted: the parts of a dimension are split."""
        return self.weight.packed

    @property
    def heads_option(self) -> bool:
        """Whether `heads:` is accepted: output features or channels are split, and stay so."""
        return (
            self.weight.shard == "out"
            and self.shards_parameters
            and self.output_destination is None
            and not self.features.means
        )

    @property
    def argument_option(self) -> bool:
        """Whether `argument:` is accepted: the style moves one argument of a module that may have several."""
        return bool(self.input_sources) and self.argument == "first" and self.kinds is None

    @property
    def moves_one_argument(self) -> bool:
        """Whether it moves an argument and does nothing else; then it may be the style of a further one (`arguments:`)."""
        return self.argument_option and self.is_block_input and self.output_source is None and not self.exchanges_heads

    @property
    def seq_option(self) -> bool:
        """Whether `seq_dim:` is accepted: something is split along the sequence, or may be by `output:`."""
        return bool(self.options.output) or self.along_sequence

    @property
    def read_outside_option(self) -> bool:
        """Whether `read_outside:` is accepted: outputs that the style does not move are equal on all ranks (R), or
        follow slices of the sequence, as its input does."""
        return self.input_destination == self.output_source == V(SEQ) or (
            self.kinds is None
            and self.output_source is None
            and not self.exchanges_heads
            and (self.input_destination is None or self.input_destination.kind == "R")
        )

    @property
    def exchange_option(self) -> bool:
        """Whether `exchange:` is accepted."""
        return self.exchanges

    @property
    def regather_option(self) -> bool:
        """Whether `regather:` is accepted: the input is gathered along the sequence."""
        gathered = self.input_sources == (V(SEQ),) and self.input_destination in (R, I)
        return gathered and not self.exchanges_heads

    @property
    def is_block_input(self) -> bool:
        """Whether the style only moves values and owns no parameters: the module's parameters may then have rules too."""
        return not self.owns_parameters
