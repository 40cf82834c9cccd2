"""A small model with stacks of experts, and its experts distributed over ep by hand: a program whose stacks are stored over ep, and
an exchange made of moves. What the mesh and FSDP2 do with it is real; routes are a part of the batch, so that they are alike
in all runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.compiler.lower import Program
from shardplan.core.layout import I, Layout, P, R, V
from shardplan.core.mesh import Axis
from shardplan.core.module_program import ModuleProgram, ParameterProgram
from shardplan.runtime.apply.build_mesh import build_mesh
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import PlanMesh, read_mesh
from shardplan.runtime.parallel.forward import wrap_forward
from shardplan.runtime.parallel.tensor_moves import move
from tests import small_models
from tests.proofs import program_of

WIDTH, TOKENS = 8, 16
OVER_EP = Layout("V", 0, Axis.EP)
STACKS = ("up", "down", "bias")
Batch = tuple[Tensor, Tensor, Tensor]


class Experts(nn.Module):
    def __init__(self, count: int, inner: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, inner, WIDTH))
        self.down = nn.Parameter(torch.randn(count, WIDTH, inner))
        self.bias = nn.Parameter(torch.randn(count, WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        outputs = torch.zeros_like(x)
        for expert, (up, down, bias) in enumerate(zip(self.up, self.down, self.bias, strict=True)):
            y = torch.tanh(x @ up.T) @ down.T + bias
            outputs = outputs + torch.where((ids == expert)[:, None], y, 0)
        return outputs


class Layer(nn.Module):
    def __init__(self, count: int, inner: int):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.experts = Experts(count, inner)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.experts(x, ids)


class Model(nn.Module):
    def __init__(self, count: int = 8, inner: int = 6, layers: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(Layer(count, inner) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ids: Tensor, target: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, ids.roll(i))
        return (self.head(x) - target).square().mean()


def build(seed: int = 0, **options: int) -> Model:
    torch.manual_seed(seed)
    return Model(**options)


def batch(share: int, step: int = 0, count: int = 8) -> Batch:
    """The tokens of one data-parallel rank; other ranks use the experts more or less often."""
    generator = torch.Generator().manual_seed(100 * step + share)
    x, target = torch.randn(2, TOKENS, WIDTH, generator=generator).unbind()
    return x, torch.randint(0, count - share % 2, (TOKENS,), generator=generator), target


class Exchange:
    """Around a module of experts: its ranks see all tokens of their ep group, and the results are added up."""

    def __init__(self, mesh: PlanMesh):
        self.mesh = mesh

    def __call__(self, forward: Any, module: nn.Module, args: tuple, kwargs: dict) -> Tensor:
        (x, ids), tp, ep = args, self.mesh.tp, self.mesh.ep
        assert ep is not None
        if tp is not None:
            x, ids = move(x, tp, I, V(0)), move(ids, tp, I, V(0))
        x, ids = move(x, ep, V(0), R), move(ids, ep, V(0), R)
        y = move(forward(x, ids - ep.get_local_rank() * len(module.up)), ep, P, V(0))
        return y if tp is None else move(y, tp, V(0), I)


@dataclass(frozen=True)
class Case:
    """A mesh and a model.

    Args:
        sizes: for `build_mesh`.
        section: the data_parallel section, False where there is none.
        model: of the model.
        frozen: parameters that are not trained.
    """

    sizes: Mapping[str, int]
    section: Mapping[str, Any] | bool = field(default_factory=dict)
    model: Mapping[str, int] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return self.model.get("count", 8)

    def build(self, seed: int = 0) -> Model:
        model = build(seed, **self.model)
        for name in self.frozen:
            model.get_parameter(name).requires_grad_(False)
        return model


def program(model: nn.Module, tp: int, section: Mapping[str, Any] | bool) -> Program:
    """Dense layers split over tp, all stacks over ep."""
    plan = {"version": "1", "name": "mine", "tensor_parallel": {"layers.*.up": "colwise", "layers.*.down": "rowwise"}}
    if section is not False:
        plan["data_parallel"] = {"backend": "fsdp2", "units": ["layers.*"], **section}
    found = program_of(model, plan, tp)
    stacks = tuple(ParameterProgram(name, OVER_EP, OVER_EP) for name in STACKS)
    own = {name: ModuleProgram(name, "experts", stacks) for name in found.modules if name.endswith(".experts")}
    own |= {
        f"layers.{i}.experts": ModuleProgram(f"layers.{i}.experts", "experts", stacks) for i in range(len(model.layers))
    }
    return replace(found, variants={key: {**modules, **own} for key, modules in found.variants.items()})


def sharded(case: Case, seed: int = 0, mesh: DeviceMesh | None = None, ep: int | None = None) -> tuple[Model, PlanMesh]:
    """The model on a mesh, its experts over ep."""
    read = read_mesh(build_mesh(**case.sizes) if mesh is None else mesh, ep=ep)
    model = case.build(seed)
    for layer in model.layers:
        wrap_forward(layer.experts, Exchange(read))
    apply_program(model, read, program(model, read.tp_size, case.section), src_data_rank=0, kind="model")
    return model, read


def share_of(mesh: PlanMesh) -> int:
    """Which batch is this rank's."""
    axes = (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP)
    return small_models.share_of(mesh.mesh, [mesh.names[axis] for axis in axes if axis in mesh.names])[0]
