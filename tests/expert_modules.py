"""transformers' modules of experts, small; calls of them; and what they compute whole."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardplan.core.layout import V
from shardplan.core.module_program import Exchange, ExpertsProgram, ModuleProgram, ParameterProgram
from shardplan.runtime.parallel.forward import wrap_forward
from shardplan.runtime.parallel.own_experts import OwnExperts
from shardplan.runtime.parallel.parameters import LocalParameters
from shardplan.runtime.parallel.regime import Regime

EXPERTS, HIDDEN = 8, 16
KINDS = {  # type -> (classes' prefix, fields of its configuration, experts a token)
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS, "intermediate_size": 24}, 2),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 24}, 3),
    "deepseek_v3": ("DeepseekV3", {"n_routed_experts": EXPERTS, "moe_intermediate_size": 24}, 3),
    "gpt_oss": ("GptOss", {"num_local_experts": EXPERTS, "intermediate_size": 24}, 3),
}


def experts_module(kind: str, implementation: str = "eager") -> nn.Module:
    """The same on every call."""
    prefix, fields, _ = KINDS[kind]
    library = importlib.import_module(f"transformers.models.{kind}")
    config = getattr(library, f"{prefix}Config")(hidden_size=HIDDEN, **fields)
    config._experts_implementation = implementation
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    module = getattr(modeling, f"{prefix}Experts")(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return module


@dataclass(frozen=True)
class Call:
    """What a module of experts is called with, and the gradient of its result."""

    tokens: Tensor
    ids: Tensor
    weights: Tensor
    gradient: Tensor

    def fresh(self, trained: tuple[bool, bool] = (True, True)) -> Call:
        """The same with new leaves. `trained`: whether the tokens, and the weights, are trained."""
        tokens, weights = (
            x.clone().requires_grad_(t) for x, t in zip((self.tokens, self.weights), trained, strict=True)
        )
        return Call(tokens, self.ids, weights, self.gradient)


def a_call(kind: str, tokens: int, seed: int, routes: str = "any") -> Call:
    """Args: routes: "any"; "first": the first experts alone; "few": neither the first nor the last expert."""
    generator = torch.Generator().manual_seed(seed)
    k = KINDS[kind][2]
    allowed = {"any": range(EXPERTS), "first": range(k), "few": range(1, EXPERTS - 1)}[routes]
    order = [torch.randperm(len(allowed), generator=generator)[:k] for _ in range(tokens)]
    ids = torch.tensor(list(allowed))[torch.stack(order)] if order else torch.empty(0, k, dtype=torch.int64)
    weights = torch.rand(tokens, k, generator=generator) + 0.1
    values, gradient = (torch.randn(tokens, HIDDEN, generator=generator) for _ in range(2))
    return Call(values, ids, weights, gradient)


def program(module: nn.Module, exchange: Exchange | None, sliced: bool = False) -> ModuleProgram:
    stacks = tuple(ParameterProgram(name, V(0), V(0)) for name, _ in module.named_parameters())
    return ModuleProgram("layer.experts", parameters=stacks, experts=ExpertsProgram(EXPERTS, exchange, sliced))


def distribute_experts(
    module: nn.Module, exchange: Exchange | None, sliced: bool, tp: DeviceMesh | None, ep: DeviceMesh | None
) -> None:
    """As a plan does: parameters are DTensors that the forward reads as local tensors, inside which it runs its rows."""
    mesh = tp if exchange is None else ep
    assert mesh is not None
    programs, regime = {"tp": program(module, exchange, sliced)}, Regime("tp")
    for name, p in list(module._parameters.items()):
        stack = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(stack, requires_grad=p.requires_grad))
    wrap_forward(module, OwnExperts(programs, regime, tp, ep))
    wrap_forward(module, LocalParameters({"tp": programs["tp"].parameters}, regime))


class PlainExperts(nn.Module):
    """No operation of it depends on data, or is listed by CUDA as nondeterministic, so that those of the driver are seen."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.scale = nn.Parameter(torch.rand(EXPERTS))
        self.seen: list[tuple[int, ...]] = []

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.seen.append((self.num_experts, *hidden_states.shape, *top_k_index.shape, *top_k_weights.shape))
        chosen = top_k_index.unsqueeze(-1) == torch.arange(self.num_experts, device=top_k_index.device)
        scales = chosen.to(hidden_states.dtype) @ self.scale
        return hidden_states * (scales * top_k_weights).sum(-1, keepdim=True)


@contextmanager
def mesh_of_one() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder, 'rendezvous')}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1, timeout=timedelta(seconds=60))
        try:
            yield init_device_mesh("cpu", (1,))
        finally:
            dist.destroy_process_group()
