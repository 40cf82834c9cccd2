"""The meaning of torch's ParallelStyle objects, and of their known subclasses, by their layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shardplan.runtime.parallel.single_style import OwnStyle

from .entries import NO_LAYOUTS, NO_STYLE, Meaning, NotConvertible, Spread
from .foreign_names import meaning_of_name
from .torchtitan import is_sharding, meaning_of_sharding


def meaning_of_style(style: object) -> Meaning:
    """The meaning of a style object or a style's name.

    Raises:
        NotConvertible: SP541, SP542.
    """
    if isinstance(style, str):
        return meaning_of_name(style)
    if is_sharding(style):
        return meaning_of_sharding(style)
    label = type(style).__name__
    if not isinstance(style, ParallelStyle):
        raise NotConvertible(
            NO_STYLE,
            f"an object of class {label} is not a style",
            help="a style is a ParallelStyle of torch, or a name",
        )
    if type(style) in TORCH:
        return TORCH[type(style)](style)
    known = KNOWN.get(label)
    if known is None or not isinstance(style, known[0]):
        raise NotConvertible(
            NO_STYLE,
            f"{label} is an unknown class: its layouts do not show what its code does",
            help="use torch's class instead, or write a rule for these modules by hand",
        )
    return known[1](style)


def _matrix(kind: Literal["colwise", "rowwise"]) -> Callable[[Any], Meaning]:
    def read(style: ColwiseParallel | RowwiseParallel) -> Meaning:
        (incoming,), (outgoing,) = style.input_layouts, style.output_layouts
        label = f"{type(style).__name__}({_word(incoming)} -> {_word(outgoing)})"
        source, in_dim = _spread(incoming, label)
        destination, out_dim = _spread(outgoing, label)
        return Meaning(
            kind,
            label,
            source,
            destination,
            dtensor=not style.use_local_output,
            seq_dim=_one({in_dim, out_dim}, label),
            unsure=kind == "rowwise" and (source, destination) == ("whole", "whole"),
        )

    return read


def _sequence(style: SequenceParallel) -> Meaning:
    label = type(style).__name__
    (sharding,) = style.sequence_sharding
    spread, dim = _spread(sharding, label)
    if spread != "sequence":
        raise NotConvertible(
            NO_LAYOUTS, f"{label}({_word(sharding)}): a norm runs on slices of the sequence, dim 0 or 1"
        )
    return Meaning("sequence", label, "sequence", "sequence", not style.use_local_output, _one({dim}, label))


def _gathered(style: SequenceParallel) -> Meaning:
    return replace(_sequence(style), destination="whole")


def _rotary(style: SequenceParallel) -> Meaning:
    why = "positions and rotary tables are computed from the whole sequence, so that they need no style"
    return Meaning("nothing", type(style).__name__, why=why)


def _head_norm(style: ParallelStyle) -> Meaning:
    return Meaning("style", type(style).__name__, options={"style": "replicated_with_grad_allreduce"})


def _input(style: PrepareModuleInput) -> Meaning:
    label = type(style).__name__
    pairs: list[tuple[str | int, Any, Any]] = []
    if style.input_layouts is not None and style.desired_input_layouts is not None:  # torch pairs them
        pairs += [
            (i, *pair) for i, pair in enumerate(zip(style.input_layouts, style.desired_input_layouts, strict=True))
        ]
    for name, layout in style.input_kwarg_layouts.items():
        pairs.append((name, layout, style.desired_input_kwarg_layouts.get(name)))
    moved = [(key, a, b) for key, a, b in pairs if a is not None and b is not None and a != b]
    if not moved:
        return Meaning("nothing", label, why="it moves nothing, and values need no DTensor here")
    if len(moved) > 1:
        raise NotConvertible(NO_LAYOUTS, f"{label} moves {len(moved)} arguments, a rule moves one")
    (key, a, b), text = moved[0], f"{label}({_word(moved[0][1])} -> {_word(moved[0][2])})"
    (source, in_dim), (destination, out_dim) = _spread(a, text), _spread(b, text)
    return Meaning(
        "input",
        text,
        source,
        destination,
        dtensor=not style.use_local_output,
        seq_dim=_one({in_dim, out_dim}, text),
        argument=key if isinstance(key, str) else None,
        position=key if isinstance(key, int) else 0,
    )


def _output(style: PrepareModuleOutput) -> Meaning:
    label = type(style).__name__
    pairs = zip(style.output_layouts, style.desired_output_layouts, strict=True)
    moved = [(i, a, b) for i, (a, b) in enumerate(pairs) if a is not None and a != b]
    if not moved:
        return Meaning("nothing", label, why="it moves nothing, and values need no DTensor here")
    if len(moved) > 1 or moved[0][0] > 0:
        raise NotConvertible(NO_LAYOUTS, f"{label} moves more than the first output, a rule moves that one")
    _, a, b = moved[0]
    text = f"{label}({_word(a)} -> {_word(b)})"
    (source, in_dim), (destination, out_dim) = _spread(a, text), _spread(b, text)
    dim = _one({in_dim, out_dim}, text)
    return Meaning("output", text, source, destination, dtensor=not style.use_local_output, seq_dim=dim)


def _both(style: PrepareModuleInputOutput) -> Meaning:
    enters, leaves = _input(style.prepare_module_input), _output(style.prepare_module_output)
    if leaves.kind == "nothing":
        return enters
    if enters.kind == "nothing":
        return leaves
    return replace(
        enters,
        label=f"{enters.label}, {leaves.label}",
        output=(leaves.source, leaves.destination),
        dtensor=leaves.dtensor,
        seq_dim=_one({enters.seq_dim, leaves.seq_dim}, enters.label),
    )


def _spread(placement: object, label: str) -> tuple[Spread, int | None]:
    """How a value is laid out, and the dim of the sequence.

    Raises:
        NotConvertible: SP542: a placement that is in no table.
    """
    match placement:
        case Replicate():
            return "whole", None
        case Shard(dim=-1):
            return "features", None
        case Shard(dim=0 | 1 as dim):
            return "sequence", dim
        case Partial(reduce_op="sum"):
            return "partial", None
    raise NotConvertible(
        NO_LAYOUTS,
        f"{label}: {_word(placement)} is not a layout of a value here",
        help="values are whole, partial sums, or split in the last dim (Shard(-1)) or the sequence (Shard(0), Shard(1))",
    )


def _one(dims: set[int | None], label: str) -> int:
    found = {dim for dim in dims if dim is not None}
    if len(found) > 1:
        raise NotConvertible(NO_LAYOUTS, f"{label}: two different dims of the sequence")
    return next(iter(found), 1)


def _word(placement: object) -> str:
    match placement:
        case Replicate():
            return "Replicate()"
        case Shard(dim=dim) if type(placement) is Shard:
            return f"Shard({dim})"
    return str(placement)


TORCH: dict[type, Callable[[Any], Meaning]] = {
    ColwiseParallel: _matrix("colwise"),
    RowwiseParallel: _matrix("rowwise"),
    SequenceParallel: _sequence,
    PrepareModuleInput: _input,
    PrepareModuleOutput: _output,
    PrepareModuleInputOutput: _both,
    OwnStyle: lambda style: meaning_of_name(style.style),
}
# Classes of NeMo Automodel (0.7.0 and older releases) and NeMo-RL, by name: their base class and their meaning. Those for
# adapters have the meaning of their base: adapters belong to the layer that they adapt.
KNOWN: dict[str, tuple[type, Callable[[Any], Meaning]]] = {
    "SequenceParallelAllGatherActivation": (SequenceParallel, _gathered),
    "RotaryEmbedParallel": (SequenceParallel, _rotary),
    "Qwen3QKNorm": (SequenceParallel, _head_norm),
    "ReplicatedWithGradAllReduce": (ParallelStyle, _head_norm),
    "VocabParallelEmbedding": (RowwiseParallel, _matrix("rowwise")),
    "ColwiseParallelLora": (ColwiseParallel, _matrix("colwise")),
    "RowwiseParallelLora": (RowwiseParallel, _matrix("rowwise")),
    "SequenceParallelLora": (SequenceParallel, _sequence),
}
