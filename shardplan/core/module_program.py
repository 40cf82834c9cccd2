"""A plan compiled for one model and one size of the tp axis: per module, what to store and what to move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from .layout import I, Layout, R
from .mesh import Axis
from .moves import Ranges, move_ops

StandIn = Literal["none", "zeros"]  # a module's forward sees it in place of a bias
# Whose random numbers a module's own code draws: "common" are the same on all tp ranks, "own" are this rank's.
# "unseen": it drew none when the plan was checked, and may draw none. "inside": those of the compiled module around it.
Draws = Literal["common", "own", "unseen", "inside"]
# How tokens are sent to the ranks of their experts: "once" to each rank that has some of them, which adds up their
# weighted results; "pairs": once for each of their experts.
Exchange = Literal["once", "pairs"]


@dataclass(frozen=True, slots=True)
class ParameterProgram:
    """How one parameter is stored and read. The read is a move from the stored layout to the computed one.

    Args:
        name: its name in its module, dotted in an adapted layer (`lora_A.default.weight`).
        stored: the layout for state_dict, optimizer, FSDP2 and checkpoints: I (a whole copy) or V(dim), dim from 0.
        computed: the layout that the module's code reads. Any parameter: `stored`. A whole copy: also R (its gradient
            is a partial sum) or P (1/tp of it on each rank). A split one: also I or R (gathered from all ranks), or
            V(dim)/r (gathered from the r neighbouring ranks of each slice).
        parts: sizes of the packed parts along the split dim; empty if the dim is one part. Every rank holds its share
            of each part, in the order of the parts.
        copies: for each packed part, the number of neighbouring ranks that compute with each slice; empty: one.
        withheld: whether the parameter (a bias) takes no part in the module's own forward, which sees None or zeros
            instead; it is added after the output's reduction.
    """

    name: str
    stored: Layout
    computed: Layout
    parts: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    withheld: StandIn | None = None

    def __post_init__(self) -> None:
        assert self.stored.kind in "IV" and move_ops(self.stored, self.computed) is not None, self
        assert not self.parts or self.stored == self.computed, self  # a packed parameter is gathered part by part
        assert not self.copies or len(self.copies) == len(self.parts), self

    @property
    def dim(self) -> int | None:
        """The dim that is stored in shards."""
        assert not isinstance(self.stored.dim, str)
        return self.stored.dim

    @property
    def gathered(self) -> bool:
        """Whether the shards of all ranks are gathered when it is read."""
        return self.stored.kind == "V" and self.computed.kind != "V"

    @property
    def shared(self) -> bool:
        """Whether several ranks compute with the same slices. The gradient is then a partial sum over these ranks:
        rows are gathered when they are read, and the gradient is reduce-scattered."""
        return (self.gathered and self.computed.kind == "R") or self.computed.copies > 1 or bool(self.copies)

    def pieces(self, ranks: int, size: int) -> tuple[tuple[int, int], ...]:
        """A rank's stored pieces along the split dim, in order: (length, number of ranks from which it is gathered).

        Args:
            ranks: the size of the axis.
            size: the length of this rank's shard.
        """
        if self.parts:
            copies = self.copies or (1,) * len(self.parts)
            return tuple((part // ranks, n) for part, n in zip(self.parts, copies, strict=True))
        return ((size, ranks if self.gathered else self.computed.copies),)

    def gathered_from(self, ranks: int) -> frozenset[int]:
        """The numbers of ranks from which pieces are gathered, on an axis of this size."""
        return frozenset(copies for _, copies in self.pieces(ranks, 0)) - {1}

    def ranges(self, size: int, ranks: int, rank: int) -> tuple[tuple[int, int], ...]:
        """The ranges of the whole split dim that a rank computes with, in order: (start, length).

        Args:
            size: the length of the whole dim, a multiple of the ranks if it is one part.
        """
        parts = self.parts or (size,)
        copies = self.copies or (ranks if self.gathered else self.computed.copies,) * len(parts)
        starts = (0, *accumulate(parts))
        lengths = [part * number // ranks for part, number in zip(parts, copies, strict=True)]
        return tuple(
            (start + length * (rank // number), length)
            for start, length, number in zip(starts, lengths, copies, strict=False)
        )

    @property
    def moved(self) -> bool:
        """Whether its read is a move of its own: it is gathered or divided. (The sums of I -> R, and the moves of
        shared rows, are the block's.)"""
        return self.stored.kind != self.computed.kind and not self.summed and not self.shared

    @property
    def summed(self) -> bool:
        """Whether the ranks' gradients of a whole copy are partial sums, summed by an all-reduce of their block."""
        return self.stored.kind == "I" and self.computed.kind == "R"


@dataclass(frozen=True, slots=True)
class GradientGroup:
    """Parameters of a block whose partial gradients are summed by one all-reduce.

    Args:
        parameters: (module name relative to the block, parameter name).
        axis: the axis over which they are sums.
    """

    parameters: tuple[tuple[str, str], ...]
    axis: Axis = Axis.TP


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Parameters of a block whose shared rows are gathered together.

    Args:
        parameters: (module name relative to the block, parameter name).
        copies: the number of neighbouring ranks to gather from.
        trained: whether some of them are trained: their gradients are reduce-scattered together.
        axis: the axis of these ranks.
    """

    parameters: tuple[tuple[str, str], ...]
    copies: int
    trained: bool
    axis: Axis = Axis.TP


@dataclass(frozen=True, slots=True)
class InputMove:
    """A move of arguments on their way into a module.

    Args:
        src: the input's layout. At a module whose `link` is "block_input" a P is the output of the plan's own
            embedding; a complete value in its place (`inputs_embeds`) is moved as I.
        dst: the layout that the module's forward reads.
        argument: the argument's name; None is the first; "*" every floating-point tensor.
        regather: whether gathered values are not kept for backward but gathered again there.
        shared_with: the module that the layout check saw move the same tensor earlier: its result is reused at no cost.
            For counting; when the model runs, the tensors themselves are compared.
    """

    src: Layout
    dst: Layout
    argument: str | None = None
    regather: bool = False
    shared_with: str | None = None

    @property
    def once(self) -> bool:
        """Whether it is done once for all readers of one tensor in the same block (I -> R)."""
        return self.src == I and self.dst == R


@dataclass(frozen=True, slots=True)
class ArgumentSlice:
    """An argument that is R outside of the module (masks and biases of all heads); its forward reads V(dim) of it.

    Args:
        argument: its name.
        dim: the dim that has the heads.
        heads: the number of consecutive heads in the dim, if it is [batch * heads]; None: all of the dim.
    """

    argument: str
    dim: int
    heads: int | None = None

    def rows(self, shape: Sequence[int], ranks: int) -> tuple[int, int]:
        """The number of times that the dim repeats the heads, and the number of heads.

        Raises:
            ValueError: the argument has no such dim, or its heads cannot be split over the ranks.
        """
        if self.dim >= len(shape):
            raise ValueError(f"`shares` splits dim {self.dim} of {self.argument!r}, which is {list(shape)}")
        length = shape[self.dim]
        heads = self.heads or length
        if length % heads or heads % ranks:
            raise ValueError(
                f"`shares` splits dim {self.dim} of {self.argument!r}, {list(shape)}, by {heads} heads over {ranks} ranks"
            )
        return length // heads, heads


@dataclass(frozen=True, slots=True)
class OutputMove:
    """A move of the module's output (of the first element, if it is a tuple).

    Args:
        size: the length of the whole dim if `src` is a V that may be uneven.
    """

    src: Layout
    dst: Layout
    size: int | None = None


@dataclass(frozen=True, slots=True)
class OutsideReads:
    """Results of a module that are read whole outside of its block: each is moved to I.

    Args:
        positions: their positions in the module's output.
        source: their layout: R; I if every rank has all tokens, and nothing is moved; V(0) if each has a slice of them.
        by_hooks: whether only hooks of the module were seen to read them (a recorder of a router's logits). Slices
            are then gathered while it has hooks.
    """

    positions: tuple[int, ...]
    source: Layout = R
    by_hooks: bool = False


@dataclass(frozen=True, slots=True)
class FeatureMeans:
    """A mean over features that are spread over several ranks.

    Args:
        features: their number; each counts once per rank that has it.
        ranks: the number of neighbouring ranks that have them.
        grouped: whether they are one of several groups, or may be reshaped to one.
    """

    features: int
    ranks: int
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsProgram:
    """How a stack of experts runs; every rank has some experts, whole.

    Args:
        count: the number of experts on all ranks together.
        exchange: how tokens reach the ranks of their experts; None: every rank of the tp axis has all tokens, and its
            result is a partial sum over the axis.
        sliced: with an exchange: tokens are the same on all tp ranks. Each takes its slice of them, and the results are
            gathered.
    """

    count: int
    exchange: Exchange | None = None
    sliced: bool = False


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The features or heads that a rank of cp has out of those of its tp rank.

    Args:
        over_both: how the parameter would be read if it were split over one axis of tp * cp ranks.
        over_tp: how it is read on tp; None if a rank of tp has all of it, as with buffers.
        size: the length of the whole dim.
        tp, cp: the sizes of the axes.
        owner: the module that has it, relative to the module that reads its share.
        buffer: whether it is a buffer.
    """

    over_both: ParameterProgram
    over_tp: ParameterProgram | None
    size: int
    tp: int
    cp: int
    owner: str = ""
    buffer: bool = False

    @property
    def dim(self) -> int:
        """The dim that has them."""
        dim = self.over_both.computed.dim if self.over_both.computed.kind == "V" else self.over_both.dim
        assert isinstance(dim, int), self
        return dim

    def of_ranks(self, tp_rank: int) -> tuple[Ranges, ...]:
        """The ranges that each rank of cp has, by rank, counted within those of the tp rank."""
        held = ((0, self.size),) if self.over_tp is None else self.over_tp.ranges(self.size, self.tp, tp_rank)
        starts = [*accumulate((length for _, length in held), initial=0)]

        def place(start: int, length: int) -> tuple[int, int]:
            at = next(i for i, (first, many) in enumerate(held) if first <= start and start + length <= first + many)
            return starts[at] + start - held[at][0], length

        return tuple(
            tuple(place(*one) for one in self.over_both.ranges(self.size, self.tp * self.cp, tp_rank * self.cp + rank))
            for rank in range(self.cp)
        )


@dataclass(frozen=True, slots=True)
class ContextProgram:
    """The moves of one module on the axis cp, where parameters are whole.

    Args:
        style: the style of its rule, or of the rule of the module around it if that one's moves are placed here.
        enter: moves of arguments, in order.
        leave: the move of the output.
        outside: the positions in the output that are read outside of the block.
        hollow: the argument of a module whose heads are exchanged. The module's code sees the shape of the whole
            sequence, while the modules below with rules read the rank's tokens. None: there is none; "": the first.
        takes: whether the module's heads are exchanged. If its argument has all tokens, it is read as it is: `leave`
            moves nothing, and the module computes the rank's features with its `shares`.
        features: the rank's features in the moves between slices of the sequence and slices of the features.
        shares: parameters and buffers, here and below, that the rank reads its share of.
        slices: arguments that it reads its share of.
        means: for a mean that covers the spread features of all ranks; the ranks of tp take part in it.
    """

    style: str
    enter: tuple[InputMove, ...] = ()
    leave: OutputMove | None = None
    outside: OutsideReads | None = None
    hollow: str | None = None
    takes: bool = False
    features: HeadShare | None = None
    shares: tuple[HeadShare, ...] = ()
    slices: tuple[ArgumentSlice, ...] = ()
    means: FeatureMeans | None = None

    @property
    def enters(self) -> bool:
        """Whether an argument changes on the way in."""
        return bool(self.enter or self.takes or self.slices) or self.hollow is not None


@dataclass(frozen=True, slots=True)
class ModuleProgram:
    """The program of one module.

    Args:
        name: its full name.
        style: the style in its rule, or None if no rule names one.
        parameters: every parameter that it owns.
        enter: moves of arguments, in order.
        leave: the move of the output.
        vocabulary: the number of rows of the whole table, if rows are looked up by id.
        means: for a mean that covers the spread features of all ranks.
        link: the module's part in an embedding that stays a partial sum until the `split_seq_input` rule: "source" is
            an embedding, "block_input" the module where the value is reduced and split, "scope" the module whose
            forward holds both.
        read: for the "scope": the output positions that code of the model reads. In tuples at other positions, parts of the sequence are made whole.
        joins: this output is a partial sum that is reduced together with the output of that module; this module outputs zeros instead.
        joined: the modules whose outputs are reduced with this one's.
        collects: the modules below this block that others join: no sum waits after the block's forward.
        sum_rule: for a module that others join: the plan's text that declares it.
        reads_in: the module around this one that in each call moves a tensor I -> R once for all its readers.
        logits: the length of the whole vocabulary, if the output is a DTensor Shard(-1).
        later: whether the loss that reads the output computes it, a chunk of tokens at a time.
        tail: the number of trailing output features that pass a move I -> R; 0: none.
        outside: the positions in the output that are read outside of the block.
        divide: attributes of the instance, and the divisor of each; `config.x` is a number of this instance's config.
        settings: attributes of the instance, and the value of each on a rank.
        fused: whether its code may compute modules below it in one kernel.
        layer: the path to the layer itself inside this module, if adapters wrap it.
        group: the parameters of this module and those below it whose partial gradients are summed together.
        shared: the parameters whose rows are gathered together.
        also_reads: parameters of modules below this one that its own forward reads directly (as nn.MultiheadAttention
            reads its out_proj): (module name relative to this one, parameter).
        draws: whose random numbers its own code draws in training; None: it draws none.
        experts: how distributed whole experts run, in a module that has them.
        slices: arguments that the rank reads its share of.
        buffers: buffers that the rank reads its share of, each like a parameter stored in these shards; they are stored
            whole.
        on_cp: the program on the axis cp. `core.nesting` gives the order of the moves of both axes.
    """

    name: str
    style: str | None = None
    parameters: tuple[ParameterProgram, ...] = ()
    enter: tuple[InputMove, ...] = ()
    leave: OutputMove | None = None
    vocabulary: int | None = None
    means: FeatureMeans | None = None
    link: Literal["source", "block_input", "scope"] | None = None
    read: frozenset[int] = frozenset()
    joins: str | None = None
    joined: tuple[str, ...] = ()
    collects: tuple[str, ...] = ()
    sum_rule: str = ""
    reads_in: str | None = None
    logits: int | None = None
    later: bool = False
    tail: int = 0
    outside: OutsideReads | None = None
    divide: tuple[tuple[str, int], ...] = ()
    settings: tuple[tuple[str, int], ...] = ()
    fused: bool = True
    layer: str = ""
    group: GradientGroup | None = None
    shared: tuple[SharedGroup, ...] = ()
    also_reads: tuple[tuple[str, ParameterProgram], ...] = ()
    draws: Draws | None = None
    experts: ExpertsProgram | None = None
    slices: tuple[ArgumentSlice, ...] = ()
    buffers: tuple[ParameterProgram, ...] = ()
    on_cp: ContextProgram | None = None

    @property
    def over_ep(self) -> bool:
        """Whether it has parameters that are stored over the ep axis; it is then its own unit for FSDP2."""
        return any(parameter.stored.axis is Axis.EP for parameter in self.parameters)
