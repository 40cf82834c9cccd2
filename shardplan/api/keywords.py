"""The keyword arguments of several functions that describe a model and a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Union

from shardplan.compiler.user_inputs import AnyInputs, AnyModel, AnyReduced, Model
from shardplan.core.mesh import MeshSizes, named_sizes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AnyMesh = Union[Mapping[str, int], MeshSizes, "DeviceMesh"]


class ModelOptions(TypedDict, total=False):
    """The fields of `Model` beside its name, as keyword arguments of the functions that take a model."""

    settings: Mapping[str, Any] | None
    inputs: AnyInputs | None
    reduced: AnyReduced | None
    trust_remote_code: bool


class PlanOptions(TypedDict, total=False):
    """How PLAN `auto` is read, as keyword arguments of the functions that take a plan."""

    derive: bool


class MeshOptions(TypedDict, total=False):
    """The sizes of a mesh as keyword arguments of the functions that take one."""

    tp: int | None
    dp_shard: int
    dp_replicate: int
    cp: int
    ep: int
    pp: int


def split_options(function: str, options: Mapping[str, Any], *kinds: type) -> list[Any]:
    """The keyword arguments of a function by the TypedDict that has them.

    Raises:
        TypeError: an unknown name.
    """
    known = {name for kind in kinds for name in kind.__annotations__}
    for name in options:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return [{name: options[name] for name in kind.__annotations__ if name in options} for kind in kinds]


def model_of(model: AnyModel, options: ModelOptions) -> Model:
    """What a function was called with, as one record.

    Raises:
        TypeError: a `Model`, and options that belong to it.
    """
    if not isinstance(model, Model):
        return Model(model, **options)
    if given := [name for name, value in options.items() if value]:
        raise TypeError(f"{', '.join(given)}: set it in the Model, not as a keyword argument")
    return model


def sizes_of(mesh: AnyMesh | None, options: MeshOptions) -> MeshSizes:
    """The sizes that a function was called with: of a mesh, a mapping from axes, or by keywords.

    Raises:
        ValueError: an unknown axis, two names of one axis, a size that is not a positive integer or that no mesh has.
        TypeError: both a mesh and sizes.
    """
    if mesh is None:
        mesh = MeshSizes(**options)
        mesh.check_world()
        return mesh
    if options:
        raise TypeError(f"{', '.join(options)}: give the sizes in the mesh or as keyword arguments, not both")
    if isinstance(mesh, MeshSizes):
        mesh.check_world()
        return mesh
    if isinstance(mesh, Mapping):
        return named_sizes(mesh)
    from shardplan.runtime.apply.plan_mesh import read_mesh

    return read_mesh(mesh).sizes
