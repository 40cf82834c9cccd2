"""The model and mesh arguments of the public functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Union

from shardplan.compiler.user_inputs import AnyModel, Model
from shardplan.core.mesh import MeshSizes, named_sizes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AnyMesh = Union[Mapping[str, int], MeshSizes, "DeviceMesh"]  # MeshSizes: those of reports, estimates and rows of a fit


def model_of(model: AnyModel) -> Model:
    """The `Model` that the argument is, or names."""
    return model if isinstance(model, Model) else Model(model)


def sizes_of(mesh: AnyMesh | None) -> MeshSizes:
    """The sizes of a mesh; none for None.

    Raises:
        ValueError: an unknown axis, two names for one axis, a size that is not a positive integer or above its bound.
        TypeError: the mesh is neither a mapping nor a DeviceMesh.
    """
    if mesh is None or isinstance(mesh, Mapping):
        return named_sizes(mesh or {})
    if isinstance(mesh, MeshSizes):
        mesh.check_world()
        return mesh
    if isinstance(mesh, str | int):
        raise TypeError(f'mesh must be sizes by axis, as {{"tp": 8}}, or a DeviceMesh, not {mesh!r}')
    from shardplan.runtime.apply.plan_mesh import read_mesh

    return read_mesh(mesh).sizes
