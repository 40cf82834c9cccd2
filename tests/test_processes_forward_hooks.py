"""Forward hooks that modules had before a plan was applied: they see and change what the unsharded model's would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import on_ranks
from small_models import small_model, whole
from torch import Tensor, nn

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error


def squared(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + output.square()


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def hooked(kind: str, ends: tuple[str, ...]) -> nn.Module:
    model = small_model(kind)
    for name, module in model.named_modules():
        if name.endswith(ends):
            module.register_forward_hook(squared if kind == "llama" else doubled)
    return model


def step(model: nn.Module) -> Tensor:
    ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(5))
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    return whole(output.logits.detach())


def equal(kind: str, ends: tuple[str, ...], sequence_parallel: bool) -> None:
    sharded, reference = hooked(kind, ends), hooked(kind, ends)
    shardplan.apply_plan(sharded, shardplan.build_mesh(tp=2), "auto", sequence_parallel=sequence_parallel)
    assert relative_error(step(sharded), step(reference)) <= TOLERANCE[torch.float32]
    expected = dict(reference.named_parameters())
    for name, _, gradient in shardplan.full_parameters(sharded, gradients=True):
        assert relative_error(gradient, expected[name].grad) <= TOLERANCE[torch.float32], name


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("llama", ("down_proj", "self_attn.o_proj", "layers.0.mlp")),
        ("codegen", ("out_proj",)),  # its sum waits for that of the MLP, where no hook reads it
        ("codegen", ("mlp.fc_out",)),
    ],
)
def test_a_hook_changes_what_it_changes_unsharded(kind: str, ends: tuple[str, ...]) -> None:
    for sequence_parallel in (False, True):
        on_ranks(2, equal, kind, ends, sequence_parallel)
