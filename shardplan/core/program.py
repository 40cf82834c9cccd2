"""What a plan becomes for one model and one size of the tp axis: per module, what to store and what to move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .layout import I, Layout, R

Gradient = Literal["shard", "complete", "partial", "divided"]
StandIn = Literal["none", "zeros"]  # what a module's forward sees in the place of a bias


@dataclass(frozen=True, slots=True)
class ParameterProgram:
    """How one parameter is stored and read.

    Args:
        name: its name in its module, dotted where it is a part of an adapted layer (`lora_A.default.weight`).
        dim: the dim (from 0) that is split over tp, or None for a whole copy.
        gradient: how the gradient of the local tensor arrives: "shard", "complete" or "partial" (core/layout.py); "divided"
            is complete, and the module's forward reads 1/tp of the value.
        parts: sizes of the packed parts along `dim`; empty where the dim is one part. Every rank holds its share of
            each part, in the order of the parts.
        withheld: the parameter (a bias) takes no part in the module's own forward, which sees None or zeros instead;
            it is added after the output's reduction.
    """

    name: str
    dim: int | None
    gradient: Gradient
    parts: tuple[int, ...] = ()
    withheld: StandIn | None = None


@dataclass(frozen=True, slots=True)
class InputMove:
    """A move of arguments on the way into a module.

    Args:
        src: what arrives. At a module whose `link` is "door" a P is what the plan's own embedding hands on; where a
            complete value comes instead (`inputs_embeds`) it is moved as I.
        dst: what the module's forward gets.
        argument: the argument's name; None is the first; "*" every floating-point tensor.
        regather: what is gathered is not kept for backward, but gathered again there.
        shared_with: the module that was seen to move the same tensor before: what it moved is taken, which costs nothing.
            For counting; when the model runs, the tensors themselves are compared.
    """

    src: Layout
    dst: Layout
    argument: str | None = None
    regather: bool = False
    shared_with: str | None = None

    @property
    def once(self) -> bool:
        """Whether it is done once for all that read one tensor in the same block (I -> R)."""
        return self.src == I and self.dst == R


@dataclass(frozen=True, slots=True)
class OutputMove:
    """A move of the module's output (of the first element, if it is a tuple).

    Args:
        size: the length of the whole dim where `src` is a V that may be uneven.
    """

    src: Layout
    dst: Layout
    size: int | None = None


@dataclass(frozen=True, slots=True)
class ModuleProgram:
    """What happens at one module.

    Args:
        name: its full name.
        style: the style that its rule names, or None where no rule does.
        parameters: every parameter that it owns.
        enter: moves of arguments, in order.
        leave: the move of the output.
        vocabulary: the number of rows of the whole table, where rows are looked up by id.
        features: the number of features of which each rank has some, where a mean over them is that over all.
        link: the module's part in an embedding that stays a partial sum until the `split_seq_input` door: "source" is
            an embedding, "door" the module where the value is reduced and split, "scope" the module whose forward
            holds both.
        joins: the module at which the output, a partial sum, is reduced together with that module's; zeros are handed on
            in its place.
        joined: the modules whose outputs are reduced with this one's.
        collects: those of the modules below this block at which others join: nothing waits once its forward is over.
        sum_rule: at a module at which others join, the words of the plan that say so.
        reads_in: the module around this one in each call of which a tensor is moved I -> R once for all that read it.
        logits: the length of the whole vocabulary, where the output is handed on as a DTensor Shard(-1).
        tail: how many trailing output features alone pass a move I -> R.
        outside: positions in the output that are read outside (R -> I).
        divide: attributes of the instance to divide by tp; `config.x` divides what this instance's config says.
        layer: the path to the layer itself inside this module, where adapters wrap it.
        group: parameters (module name relative to this one, parameter name) below this module, itself included, whose
            partial gradients are summed by one all-reduce.
        also_reads: parameters of modules below this one that its own forward reads directly (as nn.MultiheadAttention
            reads its out_proj): (module name relative to this one, parameter).
    """

    name: str
    style: str | None = None
    parameters: tuple[ParameterProgram, ...] = ()
    enter: tuple[InputMove, ...] = ()
    leave: OutputMove | None = None
    vocabulary: int | None = None
    features: int | None = None
    link: Literal["source", "door", "scope"] | None = None
    joins: str | None = None
    joined: tuple[str, ...] = ()
    collects: tuple[str, ...] = ()
    sum_rule: str = ""
    reads_in: str | None = None
    logits: int | None = None
    tail: int = 0
    outside: tuple[int, ...] = ()
    divide: tuple[str, ...] = ()
    layer: str = ""
    group: tuple[tuple[str, str], ...] = ()
    also_reads: tuple[tuple[str, ParameterProgram], ...] = ()
