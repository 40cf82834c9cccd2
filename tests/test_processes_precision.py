"""Mixed precision with FSDP2: as exact as the unsharded model in bfloat16, and partial gradients are summed in the
reduction's dtype; what FSDP2 keeps gathered and gathers ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import shardplan
from shardplan.proof.compare import relative_error
from shardplan.runtime.apply.state import packed_parameters
from shardplan.torchlib.packing import unpack

MIXED = {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}}
AXES = ("dp_shard", "tp")


class SumDtypes(TorchDispatchMode):
    """The dtypes in which values are summed over the tp axis, with the shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.name == "_c10d_functional::all_reduce_":
            self.seen.add((str(args[0].dtype), args[0].ndim))
        return func(*args, **(kwargs or {}))


def planned(name: str, sequence_parallel: bool, **data_parallel: Any) -> tuple[nn.Module, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    model = small_model(name)
    shardplan.apply_plan(
        model, mesh, "auto", sequence_parallel=sequence_parallel, data_parallel=data_parallel, prove=False
    )
    return model, mesh


def backward(model: nn.Module, *parts: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over the parts, and the whole gradients."""
    total = 0.0
    for ids in parts:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(parts)
        loss.backward()
        total += loss.item()
    return total, {name: whole(p.grad).float() for name, p in model.named_parameters() if p.grad is not None}


def outputs() -> tuple[Tensor, Tensor]:
    """The logits of both: without and with a dtype of the model's output."""
    found = []
    for output in ({}, {"output": "float32"}):
        model, _ = planned("llama", True, mixed_precision={**MIXED["mixed_precision"], **output})
        found.append(model(input_ids=batch(0), use_cache=False).logits)
        found[-1].sum().backward()
    return found[0].detach(), found[1].detach()


@pytest.mark.slow
def test_the_output_dtype_is_that_of_the_model_alone():
    for low, high in on_ranks(4, outputs):
        assert (low.dtype, high.dtype) == (torch.bfloat16, torch.float32) and torch.equal(low.float(), high)


def mixed(name: str, sequence_parallel: bool) -> tuple[float, dict[str, Tensor], set[tuple[str, int]]]:
    model, mesh = planned(name, sequence_parallel, **MIXED)
    with SumDtypes() as sums:
        loss, gradients = backward(model, batch(mesh.get_local_rank("dp_shard")))
    for key, packed in packed_parameters(shardplan.applied(model).program).items():
        gradients[key] = unpack(gradients[key], packed.dim, packed.parts, mesh["tp"].size())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return loss, gradients, sums.seen


def in_bfloat16(name: str) -> nn.Module:
    """The unsharded model with its parameters, and nothing else, in bfloat16, as FSDP2 does it."""
    model = small_model(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def distance(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The relative error of all gradients together, in the Euclidean norm."""
    square = sum((gradients[name] - value).square().sum() for name, value in reference.items())
    return (square / sum(value.square().sum() for value in reference.values())).sqrt().item()


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "tensor"])
@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_bfloat16_is_as_exact_as_the_unsharded_model(name, sequence_parallel):
    parts = [batch(0), batch(1)]
    exact_loss, exact = backward(small_model(name), *parts)
    plain_loss, plain = backward(in_bfloat16(name), *parts)
    runs = on_ranks(4, mixed, name, sequence_parallel)
    loss = sum(run[0] for run in runs) / 4
    assert abs(loss - exact_loss) <= max(2 * abs(plain_loss - exact_loss), 2**-9 * exact_loss)
    for _, gradients, _ in runs:
        assert gradients.keys() == exact.keys()
        assert distance(gradients, exact) <= 2 * distance(plain, exact)
        for key, value in exact.items():
            assert relative_error(gradients[key], value) <= 2 * relative_error(plain[key], value), key


@pytest.mark.slow
def test_partial_gradients_are_summed_in_the_dtype_of_the_reduction():
    for sequence_parallel in (False, True):
        for _, _, seen in on_ranks(4, mixed, "qwen3", sequence_parallel):
            # Gradients are summed as flat vectors, activations [batch, sequence, hidden] in their own dtype.
            assert {dtype for dtype, ndim in seen if ndim == 1} == {"torch.float32"}
            assert {dtype for dtype, ndim in seen if ndim == 3} == (set() if sequence_parallel else {"torch.bfloat16"})


def autocast(name: str) -> tuple[float, dict[str, Tensor], float]:
    """One step under autocast; and how far the loss moves without it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    ids = batch(mesh.get_local_rank("dp_shard"))
    losses = []
    for dtype in (None, "bfloat16"):
        model = small_model(name)
        options = {"sequence_parallel": True, "activation_checkpointing": {"mode": "selective"}}
        shardplan.apply_plan(model, mesh, "auto", autocast_dtype=dtype, **options, prove=False)
        assert ("autocast" in shardplan.applied(model).steps) == (dtype is not None)
        model.zero_grad()
        loss, gradients = backward(model, ids)
        losses.append(loss)
    for wrong, words in ((torch.float32, "must be"), ("float16", "computes in bfloat16")):
        with pytest.raises(ValueError, match=words):
            shardplan.apply_plan(small_model(name), mesh, "auto", autocast_dtype=wrong, data_parallel=MIXED)
    return losses[1], gradients, abs(losses[1] - losses[0])


@pytest.mark.slow
def test_autocast_is_as_exact_as_in_the_unsharded_model():
    parts = [batch(0), batch(1)]
    exact_loss, exact = backward(small_model("qwen3"), *parts)
    with torch.autocast("cpu", torch.bfloat16):
        plain_loss, plain = backward(small_model("qwen3"), *parts)
    runs = on_ranks(4, autocast, "qwen3")
    loss = sum(run[0] for run in runs) / 4
    assert abs(loss - exact_loss) <= max(2 * abs(plain_loss - exact_loss), 2**-9 * exact_loss)
    for _, gradients, moved in runs:
        assert moved > 0, "the forward ran in bfloat16"
        assert gradients.keys() == exact.keys()
        assert distance(gradients, exact) <= 2 * distance(plain, exact)


# What is gathered when


def gathered(reshard: Any) -> list[bool]:
    """Which layers are whole over dp_shard after a forward."""
    model, _ = planned("llama", True, **({} if reshard is None else {"reshard_after_forward": reshard}))
    with torch.no_grad():
        model(input_ids=batch(0), use_cache=False)
    layers = model.model.layers
    return [layer.input_layernorm.weight.device_mesh.ndim == 1 for layer in layers]


@pytest.mark.parametrize(("reshard", "kept"), [(None, [False, True]), (True, [False, False]), (False, [True, True])])
def test_the_last_layer_is_kept_gathered(reshard, kept):
    assert on_ranks(4, gathered, reshard) == [kept] * 4
