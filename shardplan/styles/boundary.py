"""The meaning of a rule at its module's boundary: the layouts of its inputs, of its result and of its output.

It is derived only here, from the style's record and the rule's options. The checks, the layout check and the lowering
read it, and take layouts from nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardplan.core.layout import SEQ, I, Layout, P, R, V
from shardplan.core.mesh import Axis
from shardplan.core.plan import Output, ResolvedPlan, Rule
from shardplan.core.tree import ancestors

from . import STYLES
from .style_record import Style

# `output:` -> (source, destination). For a gathered value, `grad:` or its readers decide between R and I.
OUTPUTS: Mapping[Output, tuple[Layout, Layout]] = {
    "gather": (V(SEQ), R),
    "all_reduce": (P, I),
    "reduce_scatter": (P, V(SEQ)),
}


@dataclass(frozen=True, slots=True)
class InputBoundary:
    """An argument, or several alike, on its way into a module.

    Args:
        argument: its name; None: the first; "*": every floating-point tensor.
        sources: the layouts that it accepts.
        destination: the layout that the module's forward reads.
        regather: whether gathered values are not kept for backward but gathered again there.
    """

    argument: str | None
    sources: tuple[Layout, ...]
    destination: Layout
    regather: bool = False


@dataclass(frozen=True, slots=True)
class OutputBoundary:
    """A module's output (the first element, if it is a tuple) on its way out.

    Args:
        source: the layout that the module's forward returns.
        destination: the layout of the output.
        gathers: whether the rule has `output: gather`: the destination may be R or I.
        unresolved_gradient: whether the structure decides between these; `destination` is then R.
        until_block_input: inside the module around it and the `split_seq_input` rule, the output is a partial sum (P)
            instead of `destination`.
        dtensor: whether the value stays as computed, and is output as a DTensor that its readers read as `destination`.
    """

    source: Layout
    destination: Layout
    gathers: bool = False
    unresolved_gradient: bool = False
    until_block_input: bool = False
    dtensor: bool = False

    @property
    def moves(self) -> bool:
        """Whether the output differs from what the forward returns."""
        return self.until_block_input or self.source != self.destination


@dataclass(frozen=True, slots=True)
class Boundary:
    """The moves of the values that cross a module's boundary.

    Args:
        inputs: the arguments that it moves; others are read as they arrive.
        output: None if the output layout follows from the inputs.
        outside: positions in the output that are read outside (R -> I).
        is_block_input: whether the modules inside have their own rules and read what the block input moved.
    """

    inputs: tuple[InputBoundary, ...] = ()
    output: OutputBoundary | None = None
    outside: tuple[int, ...] = ()
    is_block_input: bool = False

    @property
    def within(self) -> Layout | None:
        """The layout of a block input's argument inside its module; None if there is no block input."""
        return self.inputs[0].destination if self.is_block_input and self.inputs else None

    @property
    def output_destinations(self) -> tuple[Layout, ...]:
        """The possible output layouts, as far as the rule determines them; empty if they follow from the inputs."""
        if self.output is None:
            return ()
        kept = self.output.until_block_input or self.output.dtensor
        return (R, I) if self.output.gathers else (self.output.source if kept else self.output.destination,)

    def at(self, seq_dim: int) -> Boundary:
        """The same boundary with SEQ replaced by a number."""
        inputs = tuple(
            replace(one, sources=tuple(src.at(seq_dim) for src in one.sources), destination=one.destination.at(seq_dim))
            for one in self.inputs
        )
        output = self.output and replace(
            self.output, source=self.output.source.at(seq_dim), destination=self.output.destination.at(seq_dim)
        )
        return replace(self, inputs=inputs, output=output)

    def on(self, axis: Axis) -> Boundary:
        """The same boundary on another axis than tp. Parameters are whole there and their gradients are partial sums,
        so I on tp becomes R. Where a block's heads are split, its partial sums become slices of the sequence. Layouts
        keep the axis tp: code that types or lowers a single axis knows which one it is."""
        if axis is Axis.TP:
            return self

        def of(layout: Layout) -> Layout:
            return R if layout == I else layout

        inputs = tuple(
            replace(one, sources=tuple(dict.fromkeys(map(of, one.sources))), destination=of(one.destination))
            for one in self.inputs
        )
        output = self.output and replace(
            self.output,
            source=of(self.output.source),
            destination=of(self.output.destination),
            unresolved_gradient=False,
        )
        if self.output and output and (self.output.source, self.output.destination) == (P, I):
            output = replace(output, destination=V(SEQ))
        return replace(self, inputs=inputs, output=output)

    def of_heads(self, copies: int) -> Boundary:
        """The same boundary where several ranks have the same features: V(-1) is V(-1)/r, or R where all ranks have them.

        Args:
            copies: r; 1 where all ranks have them.
        """
        heads = R if copies == 1 else replace(V(-1), copies=copies)

        def of(layout: Layout) -> Layout:
            return heads if layout == V(-1) else layout

        inputs = tuple(
            replace(one, sources=tuple(map(of, one.sources)), destination=of(one.destination)) for one in self.inputs
        )
        output = self.output and replace(
            self.output, source=of(self.output.source), destination=of(self.output.destination)
        )
        return replace(self, inputs=inputs, output=output)


def boundary(rule: Rule) -> Boundary:
    """The meaning of a rule at its module's boundary; a slice of the sequence is V(SEQ)."""
    style = STYLES[rule.style]
    return Boundary(_inputs(style, rule), _output(style, rule), rule.read_outside, style.is_block_input)


def _inputs(style: Style, rule: Rule) -> tuple[InputBoundary, ...]:
    first = "*" if style.argument == "floats" else rule.argument
    moved = ((first, style), *((name, STYLES[other]) for name, other in rule.arguments))
    return tuple(one for name, of in moved if (one := _input(name, of, rule)) is not None)


def _input(argument: str | None, style: Style, rule: Rule) -> InputBoundary | None:
    if style.input_destination is None or not style.input_sources:
        return None
    complete = (
        rule.grad == "complete" and style.options.grad and not style.gathers_features
    )  # there it belongs to the output
    destination = I if style.input_destination == R and complete else style.input_destination
    return InputBoundary(argument, style.input_sources, destination, rule.regather and style.regather_option)


def _output(style: Style, rule: Rule) -> OutputBoundary | None:
    if rule.output is not None:
        source, destination = OUTPUTS[rule.output]
        gathers = rule.output == "gather"
        complete = gathers and rule.grad == "complete"
        return OutputBoundary(source, I if complete else destination, gathers, gathers and rule.grad is None)
    if style.gathers_sequence:
        return OutputBoundary(V(SEQ), I if rule.grad == "complete" else R, True, rule.grad is None)
    if style.output_source is None:
        return None
    completed = style.until_block_input or style.features.dtensor
    destination = I if completed else style.output_destination or style.output_source
    return OutputBoundary(
        style.output_source,
        R if style.gathers_features and rule.grad == "partial" else destination,
        until_block_input=style.until_block_input,
        dtensor=style.features.dtensor,
    )


def returns_tokens(on_cp: ResolvedPlan | None) -> bool:
    """Whether each rank of cp returns the results of its own tokens: a rule for cp splits some sequence, and none
    makes it whole. A gather undoes the split nearest to it: an encoder's, not that of the decoder after it.

    Args:
        on_cp: `ResolvedPlan.on_cp`.
    """
    if on_cp is None:
        return False
    rules = {name: one.rule for name, one in on_cp.modules.items() if one.section == "context_parallel"}
    split = {name: (name, *ancestors(name)) for name, rule in rules.items() if _splits(rule)}
    left = set(split)
    for name in (name for name, rule in rules.items() if _makes_whole(rule)):
        around = (name, *ancestors(name))
        common = {one: len(set(around).intersection(above)) for one, above in split.items() if one not in around}
        left -= {one for one, depth in common.items() if depth == max(common.values())}
    return bool(left)


def _splits(rule: Rule) -> bool:
    """Whether a rule for cp splits a value that is whole before its module."""
    return not STYLES[rule.style].exchanges_heads and any(
        move.destination == V(SEQ) and V(SEQ) not in move.sources for move in boundary(rule).inputs
    )


def _makes_whole(rule: Rule) -> bool:
    """Whether a value that a rule for cp gathers stays whole after its module."""
    crossing = boundary(rule)
    if STYLES[rule.style].exchanges_heads or V(SEQ) not in (
        *(source for one in crossing.inputs for source in one.sources),
        crossing.output and crossing.output.source,
    ):
        return False
    return crossing.output is None or crossing.output.destination.kind != "V"
