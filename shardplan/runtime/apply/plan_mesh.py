"""The mesh that a plan is applied on: its axes under our names, its tp part and its data-parallel part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.mesh import APPLIED, AXES, BATCHES, DATA_PARALLEL, Axis, MeshSizes, canonical_axis, duplicate_axes
from shardplan.core.plan import ResolvedPlan
from shardplan.runtime.parallel.process_groups import flatten, root_of
from shardplan.styles.backends import BACKENDS, Backend

from .expert_mesh import EP, EP_SHARD, ep_of, expert_view


@dataclass(frozen=True)
class PlanMesh:
    """A DeviceMesh read as a plan's axes.

    Args:
        mesh: the mesh as given.
        names: our axis name -> the mesh's own name.
        ep_size: the number of ranks over which experts are distributed: the innermost ones of dp_shard x cp x tp.
    """

    mesh: DeviceMesh
    names: Mapping[Axis, str]
    ep_size: int = 1

    @cached_property
    def axes(self) -> Mapping[Axis, DeviceMesh]:
        """The one-dimensional mesh of each axis. They are kept because torch makes another mesh at each look-up, which takes as long as
        to distribute a parameter."""
        return {axis: self.mesh[name] for axis, name in self.names.items()}

    @property
    def sizes(self) -> MeshSizes:
        sizes = {axis: mesh.size() for axis, mesh in self.axes.items()} | self._no_tp()
        shards = sum(axis in self.names for axis in (Axis.DP_SHARD, Axis.CP))
        return MeshSizes(**sizes, ep=self.ep_size, shards=shards)

    def _no_tp(self) -> dict[str, int]:
        return {} if Axis.TP in self.names else {"tp": 1}

    @property
    def tp_size(self) -> int:
        """The number of ranks on the tp axis; 1 where the mesh has no such axis."""
        return self.tp.size() if self.tp is not None else 1

    @property
    def tp(self) -> DeviceMesh | None:
        """The one-dimensional tp mesh; None where the mesh has no such axis."""
        return self.axes.get(Axis.TP)

    @property
    def tp_name(self) -> str | None:
        """The mesh's own name for its tp axis."""
        return self.names.get(Axis.TP)

    @property
    def pp(self) -> DeviceMesh | None:
        """The one-dimensional pp mesh; None where the mesh has no such axis."""
        return self.axes.get(Axis.PP)

    @property
    def within_stage(self) -> PlanMesh:
        """The same mesh without its pp axis: the ranks that have the same stages as this one.

        Raises:
            ValueError: pp is its only axis.
        """
        if Axis.PP not in self.names:
            return self
        others: dict[Axis, str] = {axis: name for axis, name in self.names.items() if axis is not Axis.PP}
        inner = tuple(name for name in self.mesh.mesh_dim_names or () if name in others.values())
        if not inner:
            raise ValueError(
                f"the mesh has no axis but {self.names[Axis.PP]!r}: make it with build_mesh, or with a tp axis of size 1"
            )
        return PlanMesh(self.mesh[inner], others, self.ep_size)

    @property
    def cp(self) -> DeviceMesh | None:
        """The one-dimensional cp mesh; None where the mesh has no such axis."""
        return self.axes.get(Axis.CP)

    @property
    def ep(self) -> DeviceMesh | None:
        """The one-dimensional mesh over which experts are distributed; None where that is one rank. The first read makes process
        groups, so all ranks must do it."""
        return self._experts[EP] if self.ep_size > 1 else None

    @property
    def _experts(self) -> DeviceMesh:
        return expert_view(self.mesh, self.names, self.sizes)

    @property
    def expert_axes(self) -> Mapping[Axis, DeviceMesh]:
        """The axes of the experts' mesh: ep, and the axis over which FSDP2 shards experts; empty where they are not distributed."""
        if self.ep_size == 1:
            return {}
        names = {Axis.DP_SHARD: EP_SHARD, Axis.EP: EP}
        if (replicate := self.names.get(Axis.DP_REPLICATE)) is not None:
            names[Axis.DP_REPLICATE] = replicate
        return {axis: self._experts[name] for axis, name in names.items()}

    @property
    def tp_or_one(self) -> DeviceMesh:
        """The tp mesh; a mesh of this rank alone where there is no tp axis."""
        tp = self.tp
        return tp if tp is not None else self._experts[Axis.TP.value]

    def experts_data_parallel(self, backend: Backend) -> DeviceMesh | None:
        """A backend's mesh for the experts of one ep rank: [dp_replicate,] ep_shard. None where experts are not
        distributed, or the backend wraps nothing. The first call makes process groups, so all ranks must call it."""
        if self.ep_size == 1 or self.data_parallel(backend) is None:
            return None
        assert backend.experts, backend.name  # `check_experts` refused it
        replicate = self.names.get(Axis.DP_REPLICATE)
        return self._experts[(replicate, EP_SHARD)] if replicate else self._experts[EP_SHARD]

    @property
    def data_parallel_ranks(self) -> int:
        """The number of ranks that see other batches or other tokens."""
        return self.sizes.data_parallel_ranks

    @property
    def batch_groups(self) -> list[ProcessGroup]:
        """The groups whose ranks have different batches: one for each such axis with several ranks. Ranks of cp share a batch."""
        axes = [self.axes[axis] for axis in BATCHES if axis in self.names]
        return [axis.get_group() for axis in axes if axis.size() > 1]

    def data_parallel(self, backend: Backend) -> DeviceMesh | None:
        """A backend's mesh: [dp_replicate,] dp_shard x cp flattened for a hybrid backend, else all data-parallel axes
        flattened. None where the mesh does not have them.
        """
        replicate = (
            self.names.get(Axis.DP_REPLICATE) if backend.hybrid and Axis.DP_REPLICATE in backend.splits else None
        )
        over = DATA_PARALLEL[1:] if backend.hybrid else DATA_PARALLEL
        axes = [axis for axis in over if axis in self.names and axis in backend.splits]
        flat = tuple(self.names[axis] for axis in axes)
        if not flat:
            return None
        name, mesh = "_".join(flat), self.mesh
        if len(flat) > 1:
            flatten(mesh, flat, name)
            mesh = root_of(mesh)  # a slice of a mesh, such as a stage's, does not know the name
        return mesh[(replicate, name)] if replicate else mesh[name]

    def joint(self, mesh: DeviceMesh) -> ProcessGroup | None:
        """The process group over both axes of a data-parallel mesh; None where it has one axis."""
        if mesh.ndim == 1:
            return None
        assert mesh.mesh_dim_names is not None  # it is part of this mesh, whose axes have names
        name = "_".join(mesh.mesh_dim_names)
        flatten(self.mesh, tuple(self.names[a] for a in DATA_PARALLEL if a in self.names), name)
        return root_of(self.mesh)[name].get_group()

    def check_sections(self, resolved: ResolvedPlan) -> None:
        """Raise ValueError where the mesh has data-parallel ranks, but the plan has no section for them, or its backend
        would not wrap the model over all of them: an axis or a device is missing."""
        ranks = self.data_parallel_ranks
        if ranks > 1 and resolved.data_parallel is None:
            raise ValueError(
                f"the mesh has {ranks} data-parallel ranks, but plan {resolved.plan.name!r} has no data_parallel "
                'section: add one, or pass data_parallel={"backend": "fsdp2", "units": [...]}'
            )
        if resolved.data_parallel is None:
            return
        backend = BACKENDS[resolved.data_parallel.backend]
        mesh = self.data_parallel(backend)
        if mesh is not None and backend.device not in (None, self.mesh.device_type):
            raise ValueError(
                f"the backend {backend.name} needs a mesh of {backend.device} devices, not of {self.mesh.device_type}"
            )
        if ranks == 1:
            return
        if mesh is None and backend.hybrid and Axis.DP_REPLICATE in self.names:
            raise ValueError(
                f"the mesh has the axis {self.names[Axis.DP_REPLICATE]!r} but no dp_shard axis: hybrid sharding with "
                f"{backend.name} needs both (a dp_shard axis of size 1 is enough)"
            )
        if mesh is None or mesh.size() != ranks:
            raise ValueError(
                f"the mesh has {ranks} data-parallel ranks, but the backend {backend.name} would wrap the model over "
                f"{mesh.size() if mesh is not None else 'none'} of them: it works with {', '.join(sorted(backend.splits))}"
            )


def read_mesh(
    mesh: DeviceMesh,
    axes: Mapping[str, str] | None = None,
    ep: int | None = None,
) -> PlanMesh:
    """Read a mesh's axes.

    Args:
        mesh: a DeviceMesh with dim names; any of pp, dp_replicate, dp_shard, cp and tp, or their other spellings.
        axes: our axis name -> the mesh's name, for names that are not known spellings.
        ep: the number of ranks over which experts are distributed; None: the value of `build_mesh`, else 1.

    Raises:
        TypeError: it is not a DeviceMesh.
        ValueError: an axis has no name, or an unknown one; two axes have one meaning; the axes have an order that torch's
            mesh slices cannot express; ep does not fit the mesh, or is an axis of it; two different sizes of ep are given.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch DeviceMesh, not {type(mesh).__name__}")
    if not mesh.mesh_dim_names:
        raise ValueError("the mesh has no axis names: pass mesh_dim_names=(..., 'tp') to init_device_mesh")
    for axis, name in (axes or {}).items():
        if axis not in AXES or name not in mesh.mesh_dim_names:
            raise ValueError(
                f"axes={{{axis!r}: {name!r}}}: the axes are {', '.join(AXES)}, the mesh has {mesh.mesh_dim_names}"
            )
    given = {name: Axis(axis) for axis, name in (axes or {}).items()}
    canonical: dict[str, Axis] = {}
    for name in mesh.mesh_dim_names:
        meant = given.get(name) or canonical_axis(name)
        if meant is None:
            raise ValueError(f"unknown mesh axis {name!r}: name the axis with axes={{'tp': {name!r}}}")
        canonical[name] = meant
    twice = duplicate_axes(canonical.values())
    if twice:
        raise ValueError(f"two axes of the mesh {mesh.mesh_dim_names} mean {twice[0]}")
    _check_order(canonical)
    names = {axis: name for name, axis in canonical.items()}
    own = names.pop(Axis.EP, None)
    if own is not None and mesh[own].size() > 1:
        raise ValueError(
            f"the mesh has the axis {own!r}, but ep is no axis of its own: it is taken from dp_shard x cp x tp. Make the mesh "
            "without it, and pass ep"
        )
    experts = ep_of(mesh, ep)
    read = PlanMesh(mesh, names, experts)
    read.sizes.check_ep()
    return read


def _check_order(canonical: Mapping[str, Axis]) -> None:
    """Refuse other orders of axes: FSDP2 puts its axes before tp in every parameter's mesh; where the mesh itself has
    another order, torch (2.13) fails when such a parameter is reduced over both, as clip_grad_norm_ does."""
    given = {axis: name for name, axis in canonical.items() if axis is not Axis.EP}
    expected = [given[axis] for axis in (Axis.PP, *APPLIED) if axis in given]
    if list(given.values()) != expected:
        raise ValueError(
            f"the mesh's axes are in the order {tuple(given.values())}, but must be in the order {tuple(expected)}: "
            "pass them to init_device_mesh in that order"
        )
