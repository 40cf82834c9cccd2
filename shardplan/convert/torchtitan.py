"""torchtitan's `ShardingConfig` (0.3): placements of a module's parameters, inputs and output on each mesh axis. Only the
axis tp is read. torchtitan is not imported: its classes are recognised by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .entries import NO_LAYOUTS, Meaning, NotConvertible, Spread

CONFIG = "ShardingConfig"
WHOLE = ("R", "I")  # whole on every rank; its gradient is a partial sum (R) or complete (I)
SPREAD: dict[str, Spread] = {
    "R": "whole",
    "I": "whole",
    "P": "partial",
    "S(-1)": "features",
    "S(0)": "sequence",
    "S(1)": "sequence",
}


def is_sharding(style: object) -> bool:
    """Whether the object is a `ShardingConfig` of torchtitan."""
    return type(style).__name__ == CONFIG and hasattr(style, "state_shardings")


def meaning_of_sharding(config: Any) -> Meaning:
    """The meaning of a module's `ShardingConfig`.

    Raises:
        NotConvertible: SP542: a layout without a counterpart.
    """
    states = {name: _word(layout) for name, layout in config.state_shardings.items()}
    enters = {name: (_word(layout), _word(layout)) for name, layout in (config.in_src_shardings or {}).items()}
    for name, layout in (config.in_dst_shardings or {}).items():
        enters[name] = (enters.get(name, (_word(layout),))[0], _word(layout))
    out = None if config.out_src_shardings is None else _word(config.out_src_shardings)
    leaves = out if config.out_dst_shardings is None else _word(config.out_dst_shardings)
    label = f"{CONFIG}({', '.join([f'{name}: {word}' for name, word in states.items()] + [f'{out} -> {leaves}'] * (out is not None))})"
    split = states.get("weight", "")
    if any(
        word not in WHOLE
        for name, word in states.items()
        if name != "weight" and not (name == "bias" and word == split == "S(0)")
    ):
        raise _refused(label, "the parameters are split otherwise than a linear layer's or an embedding's")
    if split == "S(0)" and out == "P":  # an embedding: rows of the vocabulary
        return Meaning("rowwise", label, "whole", _spread(leaves, label), dtensor=True)
    if split == "S(0)":
        into = next((pair[1] for pair in enters.values()), "R")
        return Meaning("colwise", label, _spread(into, label), _spread(leaves, label), dtensor=True)
    if split == "S(1)" and out == "P":
        return Meaning("rowwise", label, "features", _spread(leaves, label), dtensor=True)
    if split not in ("", *WHOLE) or getattr(config, "local_map", None) is not None:
        raise _refused(
            label,
            "it runs on local tensors" if split in ("", *WHOLE) else "no layer of ours has such a weight and output",
        )
    return _of_a_module_that_is_whole(label, states, enters, out, leaves)


def _of_a_module_that_is_whole(
    label: str, states: Mapping[str, str], enters: Mapping[str, tuple[str, str]], out: str | None, leaves: str | None
) -> Meaning:
    if states and out in ("S(0)", "S(1)"):
        return Meaning("sequence", label, "sequence", _spread(leaves, label), True, int(out[2]))
    if states and out is not None and out.startswith("S("):  # heads are split, or features
        return Meaning("style", label, options={"style": "replicated_with_grad_allreduce"})
    if states and out is None and "R" in states.values() and not enters:
        raise _refused(
            label,
            "a parameter with R has a partial gradient there wherever a split value reads it, which the config does not say",
        )
    moved = {name: pair for name, pair in enters.items() if _spread(pair[0], label) != _spread(pair[1], label)}
    if len(moved) > 1 or (moved and out is not None and _spread(out, label) != _spread(leaves, label)):
        raise _refused(label, "it moves several values, a rule moves one")
    for name, (source, destination) in moved.items():
        dims = {int(word[2]) for word in (source, destination) if word in ("S(0)", "S(1)")}
        return Meaning(
            "input", label, _spread(source, label), _spread(destination, label), True, dims.pop(), argument=name
        )
    if out is not None and _spread(out, label) != _spread(leaves, label):
        return Meaning("output", label, _spread(out, label), _spread(leaves, label), True)
    return Meaning("nothing", label, why="it is whole on every rank, and moves nothing")


def _word(layout: Any) -> str:
    """A layout's placement on the axis tp: R, I, P, V, or S with its dim.

    Raises:
        NotConvertible: SP542: the layout is a tuple for several outputs, or has no axis tp.
    """
    axes = getattr(layout, "per_axis_spmd_types", None)
    found = {str(getattr(axis, "value", axis)): one for axis, one in axes().items()} if callable(axes) else {}
    if "tp" not in found:
        raise NotConvertible(NO_LAYOUTS, f"{CONFIG}: a layout says nothing of the axis tp: {layout!r:.200}")
    one = found["tp"]
    return f"S({one.dim})" if hasattr(one, "dim") else str(getattr(one, "name", one))


def _spread(word: str | None, label: str) -> Spread:
    if word is None or word not in SPREAD:
        raise _refused(label, f"{word} is not a layout of a value here")
    return SPREAD[word]


def _refused(label: str, why: str) -> NotConvertible:
    return NotConvertible(NO_LAYOUTS, f"{label}: {why}", help="write a rule for these modules by hand")
