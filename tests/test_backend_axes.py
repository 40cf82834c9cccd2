"""Every data-parallel backend on every set of mesh axes: the model is wrapped over all data-parallel ranks, or the mesh is
refused, or there is one such rank. A backend that is only a record obeys the same rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.compiler.lowering_stage import program_of as lowered
from shardplan.compiler.variants import bind_variants
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import NO_OVERLAYS, ResolvedPlan
from shardplan.core.sections import DataParallel
from shardplan.language import parse_plan
from shardplan.model import tree_of
from shardplan.runtime.apply import phases
from shardplan.runtime.apply.backends import FUNCTIONS, Functions
from shardplan.runtime.apply.plan_mesh import PlanMesh, read_mesh
from shardplan.runtime.apply.wrapped import Wrapped
from shardplan.styles.backends import BACKENDS, Backend
from tests.proofs import fake_mesh

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
PLAN = {
    "version": "1",
    "name": "mine",
    "tensor_parallel": {"0": "colwise", "2": "rowwise"},
    "context_parallel": {"0": "split_seq_input", "2": "gather_seq_output"},
}
# Written down as somebody would who adds a backend: one dim over two axes, and hybrid without replicas.
FLAT = Backend(name="flat", summary="", splits=frozenset({"dp_replicate", "dp_shard"}))
SHARDS = Backend(name="shards", summary="", splits=frozenset({"dp_shard", "cp", "tp"}), hybrid=True)
MADE_UP = {backend.name: backend for backend in (FLAT, SHARDS)}


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, backend in MADE_UP.items():
        monkeypatch.setitem(BACKENDS, name, backend)
        monkeypatch.setitem(FUNCTIONS, name, Functions(_wrap))


def _wrap(model: nn.Module, mesh: DeviceMesh, section: DataParallel, names: Wrapped) -> nn.Module:
    seen.append(mesh)
    return model


seen: list[DeviceMesh] = []


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def resolved(backend: str, sizes: MeshSizes) -> ResolvedPlan:
    plan = parse_plan(PLAN).plan
    bound, about = bind(plan, tree_of(model()), sizes)
    assert not about
    return replace(bound, data_parallel=DataParallel(backend))


def meshes() -> list[dict[str, int]]:
    found = []
    for sizes in product((None, 1, 2), repeat=len(AXES)):
        axes = {axis: size for axis, size in zip(AXES, sizes, strict=True) if size is not None}
        if axes:
            found.append(axes)
    return found


def outcome(backend: str, axes: dict[str, int]) -> str:
    """ "refused", "wrapped", or "one rank"."""
    with fake_mesh(*axes.values(), names=tuple(axes)) as mesh:
        plan_mesh = read_mesh(mesh)
        plan = resolved(backend, plan_mesh.sizes)
        errors = {d.code for d in check(plan) if d.is_error} - {"SP551"}  # that a package is missing says nothing here
        if errors:
            assert errors == {"SP552"}
            return "refused"
        try:
            plan_mesh.check_sections(plan)
        except ValueError:
            return "refused"
        return wrapped(backend, plan_mesh, plan)


def wrapped(backend: str, mesh: PlanMesh, plan: ResolvedPlan) -> str:
    variants = bind_variants(parse_plan(PLAN).plan, plan.tree, plan.sizes, {NO_OVERLAYS})
    program = replace(lowered(variants, NO_OVERLAYS, logits="plan", regather=None, sections={}), resolved=plan)
    seen.clear()
    one = model()
    result = phases.apply_program(one, mesh, program, src_data_rank=None)
    over = mesh.data_parallel(BACKENDS[backend])
    ranks = mesh.data_parallel_ranks
    acted = isinstance(one, FSDPModule) or isinstance(result, DistributedDataParallel) or bool(seen)
    assert acted == (over is not None)
    if acted:
        assert over.size() == ranks
        return "wrapped" if ranks > 1 else "one rank"
    assert ranks == 1
    return "one rank"


@pytest.mark.parametrize("backend", [*BACKENDS, *MADE_UP])
def test_every_set_of_axes_is_wrapped_or_refused_or_one_rank(backend: str) -> None:
    outcomes = {}
    for axes in meshes():
        sizes = MeshSizes(**axes)
        ranks = sizes.dp_replicate * sizes.dp_shard * sizes.cp
        told = outcome(backend, axes)
        outcomes[tuple(axes.items())] = told
        assert (told == "one rank") <= (ranks == 1), axes
        record = BACKENDS[backend]
        if record.device is None and ranks > 1 and all(axis in record.splits for axis, n in axes.items() if n > 1):
            lacks = record.hybrid and not {"dp_shard", "cp"} & axes.keys()
            assert told == ("refused" if lacks else "wrapped"), axes
    assert set(outcomes.values()) >= {"refused", "one rank"}
    assert ("wrapped" in outcomes.values()) == (BACKENDS[backend].device is None)


def test_megatron_fsdp_needs_a_shard_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """On replicas alone it would wrap nothing, and every rank would train for itself."""
    monkeypatch.setitem(BACKENDS, "megatron_fsdp", replace(BACKENDS["megatron_fsdp"], device=None))
    with fake_mesh(2, 2, names=("dp_replicate", "tp")) as mesh:
        plan_mesh = read_mesh(mesh)
        with pytest.raises(ValueError, match="megatron_fsdp needs both"):
            plan_mesh.check_sections(resolved("megatron_fsdp", plan_mesh.sizes))


def test_a_device_that_is_not_there_is_told_before_anything_is_changed() -> None:
    with fake_mesh(2, names=("dp_shard",)) as mesh:
        plan_mesh = read_mesh(mesh)
        with pytest.raises(ValueError, match="needs a mesh of cuda devices, not of cpu"):
            plan_mesh.check_sections(resolved("megatron_fsdp", plan_mesh.sizes))


def test_the_net_below_the_checks() -> None:
    """A backend whose record does not know an axis of the mesh never leaves ranks on their own, whoever asks."""
    with fake_mesh(2, 2, names=("dp_replicate", "dp_shard")) as mesh:
        plan_mesh = read_mesh(mesh)
        with pytest.raises(
            ValueError, match="4 data-parallel ranks, but the backend shards would wrap the model over 2"
        ):
            plan_mesh.check_sections(resolved("shards", plan_mesh.sizes))
