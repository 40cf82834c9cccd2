"""What an estimate is asked for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from shardplan.core.estimate import OptimizerName, Precision, Question
from shardplan.core.mesh import AXES, MeshSizes, canonical_axis

from .ranks import AXES as MODELLED


def read_sizes(mesh: Mapping[str, int] | MeshSizes) -> MeshSizes:
    """The sizes of a mesh, tp 1 where it is not said.

    Raises:
        ValueError: an axis that is none or that estimates leave out, two names of one axis, a size that is no positive
            integer.
    """
    if isinstance(mesh, MeshSizes):
        given = {axis: getattr(mesh, axis) for axis in AXES}
    else:
        given = {}
        for name, size in mesh.items():
            axis = canonical_axis(name)
            if axis is None:
                raise ValueError(f"there is no mesh axis {name!r}: an estimate knows {', '.join(MODELLED)}")
            if axis in given:
                raise ValueError(f"two sizes of the mesh mean {axis}")
            given[axis] = size
    sizes = MeshSizes(**{"tp": 1} | {axis: size for axis, size in given.items() if size is not None})
    for axis in AXES:
        if axis not in MODELLED and getattr(sizes, axis) > 1:
            raise ValueError(f"an estimate knows {', '.join(MODELLED)}, not {axis}")
    return sizes


def check_question(asked: Question) -> None:
    """Raise ValueError for a size that is no positive integer, and for unknown words."""
    for name in ("seq_len", "micro_batch"):
        value = getattr(asked, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, not {value!r}")
    for name, words in (("precision", get_args(Precision)), ("optimizer", get_args(OptimizerName))):
        if getattr(asked, name) not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}, not {getattr(asked, name)!r}")
