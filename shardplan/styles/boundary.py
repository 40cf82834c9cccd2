"""What a rule means at the boundary of its module: the layouts of what arrives, what is computed and what is handed on.

It is derived here once, from the style's record and the rule's options. The checks, the layout check and the lowering
read it. Types come from nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardplan.core.layout import SEQ, I, Layout, P, R, V
from shardplan.core.plan import Output, Rule

from . import STYLES
from .style_record import Style

# What `output:` says: (source, destination). Of what is gathered, `grad:` or the readers say whether it is R or I.
OUTPUTS: Mapping[Output, tuple[Layout, Layout]] = {
    "gather": (V(SEQ), R),
    "all_reduce": (P, I),
    "reduce_scatter": (P, V(SEQ)),
}


@dataclass(frozen=True, slots=True)
class InputBoundary:
    """An argument, or several alike, on the way into a module.

    Args:
        argument: its name; None is the first; "*" every floating-point tensor.
        sources: the layouts that may arrive.
        destination: the layout in which the module's forward gets it.
        regather: what is gathered is not kept for backward, but gathered again there.
    """

    argument: str | None
    sources: tuple[Layout, ...]
    destination: Layout
    regather: bool = False


@dataclass(frozen=True, slots=True)
class OutputBoundary:
    """A module's output (the first element, if it is a tuple) on the way out.

    Args:
        source: the layout of what the module's forward returns.
        destination: the layout handed on.
        gathers: whether `output: gather` says so: R or I may be handed on.
        unresolved_gradient: whether the rule leaves it to the structure which of them; `destination` is R then.
        until_door: inside the module around it and the `split_seq_input` rule, a partial sum (P) is handed on in place of
            `destination`.
        dtensor: the value stays as it is computed, and is handed on as a DTensor that its readers take as `destination`.
    """

    source: Layout
    destination: Layout
    gathers: bool = False
    unresolved_gradient: bool = False
    until_block_input: bool = False
    dtensor: bool = False

    @property
    def moves(self) -> bool:
        """Whether what is handed on is more than what is computed."""
        return self.until_block_input or self.source != self.destination


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a rule says of the values that cross its module's boundary.

    Args:
        inputs: the arguments that it speaks of; what else arrives is taken as it comes.
        output: None where what is handed on follows from what arrived.
        outside: positions in the output that are read outside (R -> I).
        is_door: whether the module's inside has rules of its own, which find what the block input has moved.
    """

    inputs: tuple[InputBoundary, ...] = ()
    output: OutputBoundary | None = None
    outside: tuple[int, ...] = ()
    is_block_input: bool = False

    @property
    def within(self) -> Layout | None:
        """The layout of a block input's argument inside its module; None of what is no block input."""
        return self.inputs[0].destination if self.is_block_input and self.inputs else None

    @property
    def output_destinations(self) -> tuple[Layout, ...]:
        """The layouts of the tensors that may be handed on, as far as the rule tells; empty where they follow from what
        arrived."""
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


def boundary(rule: Rule) -> Boundary:
    """What a rule means at its module's boundary; a slice of the sequence is V(SEQ)."""
    style = STYLES[rule.style]
    return Boundary(_inputs(style, rule), _output(style, rule), rule.read_outside, style.is_block_input)


def _inputs(style: Style, rule: Rule) -> tuple[InputBoundary, ...]:
    if style.input_destination is None or not style.input_sources:
        return ()
    destination = I if style.input_destination == R and rule.grad == "complete" else style.input_destination
    argument = "*" if style.argument == "floats" else rule.argument
    return (InputBoundary(argument, style.input_sources, destination, rule.regather),)


def _output(style: Style, rule: Rule) -> OutputBoundary | None:
    if rule.output is not None:
        source, destination = OUTPUTS[rule.output]
        gathers = rule.output == "gather"
        complete = gathers and rule.grad == "complete"
        return OutputBoundary(source, I if complete else destination, gathers, gathers and rule.grad is None)
    if style.output_source is None:
        return None
    completed = style.until_block_input or style.features.dtensor
    return OutputBoundary(
        style.output_source,
        I if completed else style.output_destination or style.output_source,
        until_block_input=style.until_block_input,
        dtensor=style.features.dtensor,
    )
