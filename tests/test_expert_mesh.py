"""The ep axis: a view of dp_shard x cp x tp, what does not fit it, and what FSDP2 is told about experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from shardplan import build_mesh
from shardplan.core.mesh import MeshSizes
from shardplan.core.module_program import ModuleProgram, ParameterProgram
from shardplan.core.sections import DataParallel, MixedPrecision
from shardplan.runtime.apply import expert_mesh, fsdp2
from shardplan.runtime.apply.applied import was_touched
from shardplan.runtime.apply.expert_units import check_experts, placement_over
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import read_mesh
from shardplan.runtime.apply.wrapped import Wrapped
from shardplan.runtime.parallel import make_styles
from shardplan.runtime.parallel.regime import Regime, Shared
from shardplan.runtime.parallel.style import ModuleStyle
from shardplan.styles.backends import BACKENDS
from shardplan.torchlib.private import private
from tests.expert_stacks import OVER_EP, Case, Experts, build, program, sharded

FSDP2 = BACKENDS["fsdp2"]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of that many ranks, without the other processes. This one is the last rank but two."""
    private("fake_pg")
    dist.init_process_group("fake", rank=request.param - 3, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def worlds(*sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("world", sizes, indirect=True)


def ranks_of(mesh: DeviceMesh | None) -> list[int]:
    assert mesh is not None
    return dist.get_process_group_ranks(mesh.get_group())


# Sizes


@worlds(24)
@pytest.mark.parametrize(
    "sizes",
    [
        {"ep": 4},
        {"ep": 24},
        {"tp": 4, "ep": 2},
        {"tp": 4, "ep": 4},
        {"tp": 4, "ep": 8},
        {"tp": 2, "cp": 3, "ep": 6},
        {"tp": 3, "dp_replicate": 2, "ep": 12},
        {"tp": 1, "dp_replicate": 4, "ep": 3},
    ],
)
def test_ep_is_the_innermost_ranks_of_a_replica(world: int, sizes: dict[str, int]) -> None:
    mesh, without = build_mesh(**sizes), build_mesh(**{**sizes, "ep": 1})
    assert mesh == without, "the mesh itself has no axis ep"
    read, ep = read_mesh(mesh), sizes["ep"]
    assert read.sizes == replace(read_mesh(without).sizes, ep=ep) and read.sizes.world_size == world
    rank, viewed = dist.get_rank(), read.sizes.viewed
    assert read.ep is not None and read.ep.mesh_dim_names == ("ep",)
    assert ranks_of(read.ep) == [r for r in range(world) if r // ep == rank // ep]
    over = read.experts_data_parallel(FSDP2)
    assert over is not None
    names = ("dp_replicate", "ep_shard") if "dp_replicate" in sizes else ("ep_shard",)
    assert over.mesh_dim_names == names
    replica = [r for r in range(world) if r // viewed == rank // viewed]
    assert ranks_of(over["ep_shard"]) == [r for r in replica if r % ep == rank % ep]
    if "dp_replicate" in sizes:
        assert ranks_of(over["dp_replicate"]) == [r for r in range(world) if r % viewed == rank % viewed]


@worlds(8)
def test_without_ep_there_is_no_mesh_for_it(world: int) -> None:
    read = read_mesh(build_mesh(tp=2, ep=None))
    assert (read.ep_size, read.ep, read.experts_data_parallel(FSDP2)) == (1, None, None)


@worlds(8)
def test_a_mesh_without_dp_shard_has_nothing_for_fsdp(world: int) -> None:
    read = read_mesh(init_device_mesh("cpu", (8,), mesh_dim_names=("tp",)), ep=8)
    assert ranks_of(read.ep) == list(range(8)) and read.experts_data_parallel(FSDP2) is None


@worlds(24)
@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"ep": 5}, "ep 5 does not divide dp_shard x cp x tp = 24"),
        ({"dp_replicate": 4, "ep": 8}, "ep 8 does not divide dp_shard x cp x tp = 6"),
        ({"tp": 6, "ep": 4}, "neither of ep 4 and tp 6 divides the other"),
    ],
)
def test_what_does_not_fit_is_told(world: int, sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build_mesh(**sizes)
    ep = sizes.pop("ep")
    with pytest.raises(ValueError, match=text):
        read_mesh(build_mesh(**sizes), ep=ep)


@worlds(8)
@pytest.mark.parametrize("ep", [True, 2.0, "2"])
def test_ep_is_a_whole_number(world: int, ep: Any) -> None:
    with pytest.raises(TypeError, match="the size of ep must be a whole number or None"):
        build_mesh(ep=ep)
    with pytest.raises(ValueError, match="the size of mesh axis ep must be a positive integer"):
        read_mesh(build_mesh(), ep=ep)


@pytest.mark.parametrize(("tp", "ep", "share"), [(2, 2, 1.0), (2, 4, 0.5), (4, 2, 2.0), (1, 8, 0.125), (None, 2, 0.5)])
def test_the_share_makes_every_average_one_over_all_batches(tp: int | None, ep: int, share: float) -> None:
    sizes = MeshSizes(tp=tp, dp_shard=4, dp_replicate=3, cp=2, ep=ep)
    assert sizes.expert_share == share
    assert share / (sizes.dp_replicate * sizes.ep_shard) == pytest.approx(1 / (3 * 4 * 2))


# Who says it


@worlds(8)
def test_equal_meshes_may_have_another_ep(world: int) -> None:
    two, four, none = build_mesh(ep=2), build_mesh(ep=4), build_mesh()
    assert two == four == none and hash(two) == hash(four)
    assert [read_mesh(mesh).ep_size for mesh in (two, four, none)] == [2, 4, 1]
    assert read_mesh(none, ep=8).ep_size == 8 and read_mesh(none).ep_size == 1


@worlds(8)
def test_ep_is_said_once_or_alike(world: int) -> None:
    mesh = build_mesh(tp=2, ep=4)
    assert read_mesh(mesh, ep=4).ep_size == 4
    for wrong in (1, 2):
        with pytest.raises(ValueError, match=f"the argument ep is {wrong}, but build_mesh made the mesh for ep 4"):
            read_mesh(mesh, ep=wrong)


@worlds(8)
def test_ep_is_no_axis_of_the_mesh(world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_shard", "expert_parallel", "tp"))
    with pytest.raises(ValueError, match="'expert_parallel', but ep is no axis of its own"):
        read_mesh(mesh)
    one = init_device_mesh("cpu", (4, 1, 2), mesh_dim_names=("dp_shard", "ep", "tp"))
    assert read_mesh(one, ep=4).sizes == MeshSizes(tp=2, dp_shard=4, ep=4)


@worlds(8)
def test_its_groups_are_made_once(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = expert_mesh.unflatten
    monkeypatch.setattr(expert_mesh, "unflatten", lambda *args: made.append(args) or real(*args))
    mesh = build_mesh(tp=2, ep=4)
    for read in (read_mesh(mesh), read_mesh(mesh)):
        assert read.ep == read.ep and read.experts_data_parallel(FSDP2) is not None
    assert len(made) == 1
    assert read_mesh(build_mesh(tp=2, ep=4)).ep is not None and len(made) == 2, "of another mesh"
    assert read_mesh(init_device_mesh("cpu", (8,), mesh_dim_names=("dp_shard",)), ep=4).ep is not None
    assert made[-1][1] == {"ep_shard": 2, "ep": 4, "tp": 1}, "experts see a tp axis where the mesh has none"


# What cannot be


REFUSED: dict[str, tuple[dict[str, int], Any, str]] = {
    "nobody to average": ({"tp": 4, "dp_shard": 1, "ep": 2}, False, "ep 2 leaves 2 ranks with the same experts"),
    "a number of ranks": ({"ep": 2}, {"reshard_after_forward": 2}, "reshard_after_forward is 2: experts .* cannot"),
    "ignored": ({"ep": 2}, {"ignored": ["layers.0.experts"]}, r"ignores layers.\*.experts.{bias,.* must be averaged"),
}


@worlds(4)
@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_would_not_be_averaged_are_refused_untouched(world: int, name: str) -> None:
    sizes, section, text = REFUSED[name]
    mesh, model = read_mesh(build_mesh(**sizes)), build()
    with pytest.raises(ValueError, match=text):
        check_experts(mesh, program(model, mesh.tp_size, section))
    with pytest.raises(ValueError, match=text):
        apply_program(model, mesh, program(model, mesh.tp_size, section), src_data_rank=0)
    assert not any(isinstance(p, DTensor) for p in model.parameters()) and not was_touched(model)


@worlds(4)
@pytest.mark.parametrize("backend", ["ddp", "megatron_fsdp"])
def test_other_backends_are_refused(world: int, backend: str) -> None:
    mesh, found = read_mesh(build_mesh(dp_replicate=2, dp_shard=1, tp=2, ep=2)), program(build(), 2, {})
    found = replace(found, resolved=replace(found.resolved, data_parallel=DataParallel(backend)))
    with pytest.raises(ValueError, match=f"expert parallelism needs the backend fsdp2, not {backend}"):
        check_experts(mesh, found)


@worlds(4)
def test_a_mesh_without_dp_shard_cannot_average_experts(world: int) -> None:
    mesh, model = read_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), ep=2), build()
    with pytest.raises(ValueError, match="an axis dp_shard .of size 1 is enough"):
        check_experts(mesh, program(model, 4, {}))


@worlds(4)
def test_a_module_is_distributed_whole(world: int) -> None:
    mesh, found = read_mesh(build_mesh(ep=2)), program(build(), 1, {})
    some = ModuleProgram("layers.0.experts", "experts", (ParameterProgram("up", OVER_EP, OVER_EP),))
    variants = {key: {**modules, "layers.0.experts": some} for key, modules in found.variants.items()}
    with pytest.raises(ValueError, match=r"experts.{down,bias} would stay whole"):
        check_experts(mesh, replace(found, variants=variants))


@worlds(4)
def test_frozen_experts_may_be_ignored(world: int) -> None:
    frozen = tuple(f"layers.0.experts.{name}" for name in ("up", "down", "bias"))
    model, _ = sharded(Case({"dp_shard": 4, "ep": 2}, {"frozen": "replicated"}, frozen=frozen))
    assert {model.get_parameter(name).device_mesh.mesh_dim_names for name in frozen} == {("ep",)}


# What FSDP2 is told


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [((4, 6, 8), 1, 0), ((4, 6, 8), 4, 0), ((2, 8, 6), 4, 1), ((3, 8, 6), 2, 1), ((1, 5, 6), 2, 2), ((6,), 3, 0)],
)
def test_the_dim_that_a_stack_is_sharded_along(shape: tuple[int, ...], ranks: int, dim: int) -> None:
    assert placement_over(ranks)(nn.Parameter(torch.zeros(shape))) == Shard(dim)


@pytest.mark.parametrize("shape", [(3,), (3, 5)])
def test_a_stack_without_such_a_dim_is_told(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"has the shape \(3.*ep_shard = 2 divides no dim of it"):
        placement_over(2)(nn.Parameter(torch.zeros(shape)))


def told(monkeypatch: pytest.MonkeyPatch, units: tuple[str, ...], section: DataParallel) -> dict[str, dict[str, Any]]:
    """What `fully_shard` is called with, by module, in its order."""
    mesh, model = read_mesh(build_mesh(dp_shard=4, ep=2)), build()
    names, calls = {id(module): name for name, module in model.named_modules()}, {}
    monkeypatch.setattr(fsdp2, "fully_shard", lambda module, **given: calls.update({names[id(module)]: given}))
    experts = tuple(f"layers.{i}.experts" for i in range(2))
    over, rest = mesh.experts_data_parallel(FSDP2), mesh.data_parallel(FSDP2)
    assert over is not None and rest is not None
    fsdp2.apply_fsdp2(model, rest, section, Wrapped(units, experts=experts, experts_mesh=over))
    for name, given in calls.items():
        assert given["mesh"] == (over if name in experts else rest) and ("shard_placement_fn" in given) == (
            name in experts
        )
    return calls


LAYERS = ("layers.0", "layers.1")


@worlds(4)
def test_experts_are_units_inside_of_the_others(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    section = DataParallel("fsdp2", mixed_precision=MixedPrecision("bfloat16", "float32"), cpu_offload="pinned")
    calls = told(monkeypatch, LAYERS, section)
    assert list(calls) == ["layers.0", "layers.1", "", "layers.0.experts", "layers.1.experts"]
    for layer in LAYERS:
        unit, own = calls[layer], calls[f"{layer}.experts"]
        assert own["reshard_after_forward"] == unit["reshard_after_forward"] == (layer == LAYERS[0])
        assert isinstance(own["offload_policy"], CPUOffloadPolicy)
        assert unit["mp_policy"].cast_forward_inputs and not own["mp_policy"].cast_forward_inputs
        assert replace(own["mp_policy"], cast_forward_inputs=True) == unit["mp_policy"]


@worlds(4)
def test_experts_that_the_plan_names_are_wrapped_once(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    section = DataParallel("fsdp2", mixed_precision=MixedPrecision("bfloat16", "float32"))
    calls = told(monkeypatch, (*LAYERS, *(f"{layer}.experts" for layer in LAYERS)), section)
    assert list(calls) == ["layers.0", "layers.1", "", "layers.0.experts", "layers.1.experts"]
    assert calls["layers.0.experts"]["mp_policy"].cast_forward_inputs


# Where they are read


@worlds(4)
def test_a_block_does_not_read_experts_which_are_a_unit_of_their_own(world: int) -> None:
    found = program(build(), 2, {})
    styles, _ = make_styles.make_styles(found.resolved, found.by_name)
    read = {home: {owner for reads in s.reads.values() for owner, _ in reads} for home, s in styles.items() if s.reads}
    assert read["layers.0"] == {"up", "down"} and read["layers.0.experts"] == {""}


@worlds(4)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_the_share_is_applied_where_a_parameter_is_read(world: int, compiled: bool, together: bool) -> None:
    mesh = read_mesh(build_mesh(dp_shard=2, tp=2, ep=4))
    torch.manual_seed(0)
    module, whole = Experts(4, 6), Experts(1, 6)
    for name, parameter in whole.named_parameters():
        parameter.data = module.get_parameter(name).detach()[dist.get_rank() :][:1].clone()
    parameters = tuple(ParameterProgram(name, OVER_EP, OVER_EP) for name, _ in module.named_parameters())
    regime = Regime("plain", ep=mesh.ep, expert_share=mesh.sizes.expert_share)
    reads = {"plain": [("", parameter) for parameter in parameters]} if together else {}
    style = ModuleStyle({"plain": ModuleProgram("experts", "experts", parameters)}, Shared(regime), reads)
    style.src_data_rank = None
    style._apply(module, mesh.tp_or_one)
    x, ids = torch.randn(5, 8), torch.zeros(5, dtype=torch.long)
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    run(x, ids).square().sum().backward()
    whole(x, ids).square().sum().backward()
    for name, parameter in whole.named_parameters():
        gradient = module.get_parameter(name).grad
        assert isinstance(gradient, DTensor) and gradient.placements == (Shard(0),)
        torch.testing.assert_close(gradient.to_local(), parameter.grad * 0.5)
