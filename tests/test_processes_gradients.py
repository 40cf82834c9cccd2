"""The total norm of gradients and clipping, against torch's own on whole gradients, in four processes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from processes import RanksFailed, on_ranks
from small_models import batch, share_of, small_model, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import shardplan
from shardplan.proof.compare import relative_error
from shardplan.runtime.training import clip_grad_by_total_norm_, clip_grad_norm_, get_grad_norm, to_local_if_dtensor
from tests.collective_counter import CollectiveCounter

ORDERS = (2.0, 1.0, 0.5, 3.0, 8.0, math.inf, -math.inf)
LIMIT = 1e-6  # the norm is a float32


class Built:
    """Parameters with gradients on many meshes, and the whole gradients next to them."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(1)
        self.parameters: list[Tensor] = []
        self.whole: list[Tensor] = []

    def draw(self, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * 10 ** len(self.whole)).to(self.dtype) / 1e3

    def add(self, parameter: Tensor, gradient: Tensor, expected: Tensor) -> None:
        parameter.grad = gradient
        self.parameters.append(parameter)
        self.whole.append(expected)

    def plain(self, *shape: int) -> None:
        gradient = self.draw(*shape)
        self.add(nn.Parameter(torch.zeros_like(gradient)), gradient.clone(), gradient)

    def placed(self, shape: tuple[int, ...], mesh: DeviceMesh, *placements) -> None:
        gradient = self.draw(*shape)
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
        self.add(parameter, distribute_tensor(gradient.clone(), mesh, placements), gradient)

    def partial(self, shape: tuple[int, ...], mesh: DeviceMesh, operation: str, *placements) -> None:
        """A partial sum (or average) on the last axis; each rank's part is another one."""
        parts = [self.draw(*shape) for _ in range(mesh.size(mesh.ndim - 1))]
        total = torch.stack(parts).sum(0) / (len(parts) if operation == "avg" else 1)
        parameter = nn.Parameter(
            distribute_tensor(torch.zeros(shape, dtype=self.dtype), mesh, [*placements, Replicate()])
        )
        own = distribute_tensor(
            parts[mesh.get_local_rank(mesh.ndim - 1)], mesh, [*placements, Replicate()], src_data_rank=None
        )
        gradient = DTensor.from_local(
            own.to_local(),
            mesh,
            [*placements, Partial(operation)],
            shape=total.shape,
            stride=total.stride(),
            run_check=False,
        )
        self.add(parameter, gradient, total)

    def norm(self, order: float) -> float:
        return torch.linalg.vector_norm(torch.cat([g.flatten().double() for g in self.whole]), order).item()


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return both, init_device_mesh("cpu", (4,), mesh_dim_names=("all",))


def mixture(dtype: torch.dtype = torch.float32) -> Built:
    """All placements on all meshes in one model."""
    both, line = meshes()
    built = Built(dtype)
    built.plain(3, 2)
    built.placed((4, 3), both["tp"], Shard(0))
    built.placed((5, 3), both["tp"], Shard(0))
    built.placed((3, 3), both["tp"], Replicate())
    built.placed((4, 6), both, Shard(0), Shard(1))
    built.placed((4, 6), both, Shard(0), Replicate())
    built.placed((2, 2), both, Replicate(), Replicate())
    built.placed((1, 4), both, Replicate(), Shard(0))
    built.placed((5,), line, Shard(0))
    built.placed((2, 3), line, Shard(0))  # empty on two ranks
    built.placed((2,), line, Replicate())
    built.parameters.append(nn.Parameter(distribute_tensor(torch.ones(3), line, [Shard(0)])))  # without a gradient
    built.parameters.append(nn.Parameter(torch.ones(3), requires_grad=False))
    return built


def check_clipping(build: Callable[[], Built], order: float) -> None:
    """Clipped by our own norm, all gradients are the whole ones times one number."""
    built = build()
    expected = built.norm(order)
    limit = 0.3 * expected
    total = clip_grad_norm_(built.parameters, limit, order)
    assert type(total) is Tensor and total.ndim == 0
    assert total.item() == pytest.approx(expected, rel=LIMIT), order
    present = [p for p in built.parameters if p.grad is not None]
    for parameter, gradient in zip(present, built.whole, strict=True):
        scaled = gradient.double() * (limit / (expected + 1e-6))
        assert relative_error(whole(parameter.grad), scaled) < 1e-6
    before = [to_local_if_dtensor(p.grad).clone() for p in present]
    clip_grad_by_total_norm_(built.parameters, 2 * expected, expected)
    assert all(torch.equal(to_local_if_dtensor(p.grad), b) for p, b in zip(present, before, strict=True))


def with_partial_sums() -> Built:
    both, line = meshes()
    built = Built()
    built.partial((3, 4), both["tp"], "sum")
    built.partial((4, 3), both, "sum", Shard(0))
    built.partial((4, 3), both, "avg", Replicate())
    built.partial((2, 3), line, "sum")
    built.placed((4, 6), both, Shard(0), Shard(1))
    built.placed((3, 3), both["tp"], Replicate())
    return built


def every_mix() -> bool:
    for order in ORDERS:
        check_clipping(mixture, order)
        check_clipping(with_partial_sums, order)

    built = mixture()
    assert dist.get_world_size() == 4
    with CollectiveCounter() as counter:
        get_grad_norm(built.parameters)
    assert counter.counts == {"all_reduce": 3}, "one for each of dp, tp and all"

    # What torch's own can do on whole gradients: the same, in the same order of arguments.
    for order in (2.0, math.inf):
        plain = [nn.Parameter(torch.zeros_like(g)) for g in built.whole]
        for parameter, gradient in zip(plain, built.whole, strict=True):
            parameter.grad = gradient.clone()
        theirs = nn.utils.clip_grad_norm_(plain, 1.0, order)
        fresh = mixture()
        assert clip_grad_norm_(fresh.parameters, 1.0, order).item() == pytest.approx(theirs.item(), rel=LIMIT)
        for mine, other in zip([p for p in fresh.parameters if p.grad is not None], plain, strict=True):
            assert relative_error(whole(mine.grad), other.grad) < 1e-6
    # A norm that torch gives as a DTensor is taken too.
    fresh = mixture()
    clip_grad_by_total_norm_(fresh.parameters, 1.0, distribute_tensor(theirs, meshes()[1], [Replicate()]))
    assert relative_error(whole(fresh.parameters[0].grad), plain[0].grad) < 1e-6
    return True


def low_precision() -> bool:
    """Norms of bfloat16 gradients are added up in float32: of 4096 equal numbers, bfloat16 would lose most."""
    _, line = meshes()
    many = nn.Parameter(distribute_tensor(torch.zeros(4096, 4, dtype=torch.bfloat16), line, [Shard(0)]))
    many.grad = distribute_tensor(torch.full((4096, 4), 1.0, dtype=torch.bfloat16), line, [Shard(0)])
    other = nn.Parameter(torch.zeros(1))
    other.grad = torch.ones(1)
    total = get_grad_norm([many, other])
    assert total.dtype == torch.float32 and total.item() == pytest.approx(math.sqrt(4096 * 4 + 1), rel=1e-7)
    clip_grad_by_total_norm_([many, other], 1.0, total)
    assert many.grad.dtype == torch.bfloat16
    assert many.grad.to_local()[0, 0] == torch.tensor(1 / total.item(), dtype=torch.bfloat16)
    exact = mixture(torch.float64)
    assert get_grad_norm(exact.parameters).dtype == torch.float64
    assert get_grad_norm(exact.parameters).item() == pytest.approx(exact.norm(2.0), rel=1e-13)
    tiny = nn.Parameter(torch.zeros(3))
    tiny.grad = torch.tensor([1e-7, 2e-7, 1e-7])
    assert get_grad_norm(tiny, norm_type=8.0).item() == pytest.approx((258 * 1e-56) ** 0.125, rel=1e-6)
    return True


def not_finite() -> bool:
    """One number of one rank is not finite: all ranks know it, and nothing is scaled."""
    _, line = meshes()
    for value, order in [
        (math.nan, 2.0),
        (math.nan, math.inf),
        (math.nan, -math.inf),
        (math.inf, 2.0),
        (-math.inf, 3.0),
    ]:
        gradient = torch.arange(1.0, 9.0)
        gradient[5] = value
        parameter = nn.Parameter(distribute_tensor(torch.zeros(8), line, [Shard(0)]))
        parameter.grad = distribute_tensor(gradient, line, [Shard(0)])
        other = nn.Parameter(torch.zeros(2))
        other.grad = torch.ones(2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            total = clip_grad_norm_([parameter, other], 0.5, order)
        assert total.isnan() if math.isnan(value) else total == math.inf, (value, order, total)
        assert "skip this step" in str(caught[0].message)
        assert torch.equal(whole(parameter.grad)[:5], gradient[:5]) and torch.equal(other.grad, torch.ones(2))
        with pytest.raises(RuntimeError, match="total norm of the gradients is"):
            clip_grad_norm_([parameter, other], 0.5, order, error_if_nonfinite=True)
    return True


def ties_and_bounds() -> bool:
    _, line = meshes()
    tied = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    tied["b"].weight = tied["a"].weight
    tied["a"].weight.grad = torch.ones(4, 4)
    assert get_grad_norm(tied).item() == 4.0
    twice = [tied["a"].weight, tied["b"].weight]
    assert clip_grad_norm_(iter(twice), 2.0).item() == 4.0
    assert torch.allclose(tied["a"].weight.grad, torch.full((4, 4), 0.5))

    assert get_grad_norm(nn.Linear(2, 2)).item() == 0.0
    empty = nn.Parameter(distribute_tensor(torch.ones(4), line, [Shard(0)]))
    assert clip_grad_norm_([empty], 1.0).item() == 0.0
    with pytest.raises(ValueError, match="norm_type must be above 0"):
        get_grad_norm(tied, norm_type=0)
    with pytest.raises(TypeError, match="a model or tensors, not tuple"):
        get_grad_norm(tied.named_parameters())
    with pytest.raises(ValueError, match="max_norm must be at least 0"):
        clip_grad_norm_(tied, math.nan)
    return True


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def torchs_own_parallelism() -> bool:
    """`parallelize_module` and `fully_shard` without a plan: strided shards under FSDP2; without it, partial sums; and
    blocks: one on both axes, one on tp and one plain."""
    both, _ = meshes()
    torch.manual_seed(0)
    reference = nn.Sequential(Block(), Block(), Block()).double()
    x = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    reference(x).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in reference.named_parameters()}
    for data_parallel in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), Block()).double()
        if not data_parallel:
            split = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
            parallelize_module(model[0].norm, both["tp"], split)
            parallelize_module(model[0].norm, both["tp"], SequenceParallel())
        arriving = Replicate() if data_parallel else Shard(1)
        styles = {"0.up": ColwiseParallel(input_layouts=arriving), "0.down": RowwiseParallel()}
        parallelize_module(model, both["tp"], styles)
        parallelize_module(model, both["tp"], {"1.up": ColwiseParallel(), "1.down": RowwiseParallel()})
        if data_parallel:
            fully_shard(model[0], mesh=both["dp"])
        model(x).square().mean().backward()
        kinds = {type(placement).__name__ for p in model[0].parameters() for placement in p.grad.placements}
        assert ("_StridedShard" if data_parallel else "Partial") in kinds, kinds
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in expected.values()]))
        total = clip_grad_norm_(model, 0.1)
        assert total.item() == pytest.approx(norm.item(), rel=1e-12)
        for name, p in model.named_parameters():
            assert relative_error(whole(p.grad), expected[name] * (0.1 / (norm + 1e-6))) < 1e-12, name
    return True


def on_all_ranks() -> bool:
    """One call for all that needs no model, one start of the processes."""
    return all([every_mix(), low_precision(), not_finite(), ties_and_bounds(), torchs_own_parallelism()])


def test_every_mix_of_meshes_and_placements():
    assert on_ranks(4, on_all_ranks) == [True] * 4


def foreign_mesh() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    else:
        parameter = nn.Parameter(DTensor.from_local(torch.ones(0), mesh, [Shard(0)], run_check=False))
    get_grad_norm([parameter])


def test_a_mesh_without_this_rank_is_an_error():
    with pytest.raises(RanksFailed) as caught:
        on_ranks(4, foreign_mesh)
    assert set(caught.value.errors) == {2, 3} and "not part of" in caught.value.errors[2]


def gradients_of(model: nn.Module, parts: list[Tensor]) -> None:
    for ids in parts:
        (model(input_ids=ids, labels=ids, use_cache=False).loss / len(parts)).backward()


def planned(sizes: dict[str, int]) -> list[tuple[float, float, dict[str, Tensor]]]:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = small_model("qwen3", tied=True, dtype=torch.float64)
    model.model.layers[0].mlp.up_proj.requires_grad_(False)
    shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, prove=False)
    gradients_of(model, [batch(0, share_of(mesh)[0])])
    found = [(order, get_grad_norm(model, norm_type=order).item()) for order in (2.0, 1.0, math.inf)]
    total = clip_grad_norm_(model.parameters(), 0.1).item()
    return [found, total, {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}]


MESHES = {
    "tp": {"dp_shard": 2, "tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "replicas and tp": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
}


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_planned_models(sizes: dict[str, int]):
    reference = small_model("qwen3", tied=True, dtype=torch.float64)
    reference.model.layers[0].mlp.up_proj.requires_grad_(False)
    shares = math.prod(size for axis, size in sizes.items() if axis != "tp")
    gradients_of(reference, [torch.cat([batch(0, share) for share in range(shares)])])
    gradients = [p.grad for p in reference.parameters() if p.grad is not None]
    norms = [(order, nn.utils.get_total_norm(gradients, order).item()) for order in (2.0, 1.0, math.inf)]
    nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    for found, total, clipped in on_ranks(4, planned, sizes):
        assert found == [(order, pytest.approx(norm, rel=1e-6)) for order, norm in norms]
        assert total == pytest.approx(norms[0][1], rel=1e-6) and total > 0.2
        assert clipped.keys() == expected.keys()
        assert all(relative_error(clipped[name], expected[name]) <= 1e-6 for name in expected)
