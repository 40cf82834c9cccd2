"""The sizes of a mesh on a command line, the same for every command: `--tp 8 --dp-shard 4`, `--mesh dp_shard=4,tp=8`, or
both. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shardplan.core.mesh import AXES, Axis, MeshSizes, canonical_axis
from shardplan.core.suggest import closest

from .argument_parts import Parser, ranks
from .exits import UsageError

AXIS_HELP = {
    Axis.PP: "pipeline stages that the blocks are cut into, as the plan's section pipeline_parallel says",
    Axis.DP_REPLICATE: "ranks that hold copies (HSDP, DDP)",
    Axis.DP_SHARD: "ranks that parameters and batches are split over (FSDP)",
    Axis.CP: "ranks that share a sequence's context",
    Axis.EP: "ranks that experts are distributed over; they are among those of dp_shard, cp and tp",
    Axis.TP: "tensor-parallel ranks",
}
Pairs = tuple[tuple[Axis, Any], ...]


def mesh_options(
    parser: Parser,
    axes: Collection[Axis] = AXES,
    *,
    help: Mapping[Axis, str],
    types: Mapping[Axis, Callable[[str], Any]] | None = None,
) -> None:
    """Add an option for each axis, and `--mesh` for several at once.

    Args:
        axes: the axes of this command.
        help: this command's help for an axis, instead of `AXIS_HELP`.
        types: the types of an axis's sizes, where they are not positive integers.
    """
    types = dict.fromkeys(axes, ranks) | dict(types or {})
    text = f"sizes of several axes in one word, as the options of axes give them: {', '.join(axes)}"
    parser.add_argument(
        "--mesh", action=_Sizes, dest="mesh", type=_pairs_of(types), default=None, metavar="AXIS=N,...", help=text
    )
    for axis in reversed(AXES):
        if axis in axes:
            shown = (AXIS_HELP | dict(help))[axis]
            parser.add_argument(
                axis_option(axis), action=_Sizes, dest=axis.value, type=types[axis], metavar="N", help=shown
            )


def axis_option(axis: Axis) -> str:
    """`--dp-shard`."""
    return f"--{axis.replace('_', '-')}"


def mesh_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sizes on a command line, by axis; axes that it does not name are left out.

    Raises:
        UsageError: the mesh has too many ranks.
    """
    values = vars(args)
    sizes = {axis.value: values[axis] for axis in AXES if values.get(axis) is not None}
    try:
        MeshSizes(**{axis: size for axis, size in sizes.items() if isinstance(size, int)}).check_world()
    except ValueError as error:
        raise UsageError(str(error)) from None
    return sizes


class _Sizes(argparse.Action):
    """Stores sizes by axis, whichever option gives them."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *rest: Any) -> None:
        pairs = values if self.dest == "mesh" else ((self.dest, values),)
        for axis, number in pairs:
            before = getattr(namespace, axis)
            if before not in (None, number):
                raise argparse.ArgumentError(self, f"two sizes of {axis}: {before} and {number}")
            setattr(namespace, axis, number)


def _pairs_of(types: Mapping[Axis, Callable[[str], Any]]) -> Callable[[str], Pairs]:
    """A function that reads `dp_shard=64,tp=8` as pairs of canonical axes and sizes."""

    def mesh(text: str) -> Pairs:
        return tuple(_pair(part, types) for part in text.split(","))

    return mesh


def _pair(part: str, types: Mapping[Axis, Callable[[str], Any]]) -> tuple[Axis, Any]:
    name, equals, number = (one.strip() for one in part.partition("="))
    axis = canonical_axis(name)
    if not equals:
        raise argparse.ArgumentTypeError(f"{part!r} is not of the form AXIS=N: write dp_shard=8,tp=8")
    if axis is None:
        near = closest(name, AXES)
        raise argparse.ArgumentTypeError(
            f"there is no axis {name!r}" + (f": did you mean {near}?" if near else f": the axes are {_listed(types)}")
        )
    if axis not in types:
        raise argparse.ArgumentTypeError(f"no axis {axis} here: the axes are {_listed(types)}")
    return axis, types[axis](number)


def _listed(axes: Collection[Axis]) -> str:
    return ", ".join(axis for axis in AXES if axis in axes)
