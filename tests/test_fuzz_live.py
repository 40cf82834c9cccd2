"""Live models with random patches: `apply_plan` refuses one before it is touched, or it trains as the unsharded model."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import MethodType

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error

Layer = nn.Module


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Gated(nn.Module):
    """In place of an activation, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * self.gate


def own_forward(layer: Layer) -> None:
    before = layer.mlp.forward
    layer.mlp.forward = MethodType(lambda self, x: before(x) * 1.5 + x, layer.mlp)


def normalised(layer: Layer) -> None:
    """Wrong with sequence parallelism of the features, right on whole ones."""
    before = layer.mlp.down_proj.forward
    layer.mlp.down_proj.forward = MethodType(
        lambda self, x: before(x / (1 + x.norm(dim=-1, keepdim=True))), layer.mlp.down_proj
    )


def output_hook(layer: Layer) -> None:
    layer.mlp.register_forward_hook(lambda module, args, output: output * 0.5)


def input_hook(layer: Layer) -> None:
    layer.mlp.register_forward_pre_hook(lambda module, args: (torch.tanh(args[0]), *args[1:]))


def gradient_hook(layer: Layer) -> None:
    layer.self_attn.q_proj.weight.register_hook(lambda gradient: gradient * 2)


def halved(layer: Layer) -> None:
    parametrize.register_parametrization(layer.self_attn.q_proj, "weight", Halved())


def normed_weight(layer: Layer) -> None:
    weight_norm(layer.mlp.up_proj)


def frozen(layer: Layer) -> None:
    layer.mlp.gate_proj.weight.requires_grad_(False)
    layer.input_layernorm.weight.requires_grad_(False)


def no_module(layer: Layer) -> None:
    layer.register_module("extra", None)
    layer.post_attention_layernorm = nn.Identity()


def unused(layer: Layer) -> None:
    layer.mlp.extra = nn.Parameter(torch.ones(3))


def activation(layer: Layer) -> None:
    layer.mlp.act_fn = Gated()


def meta(layer: Layer) -> None:
    layer.mlp.up_proj.to("meta")


def bias(layer: Layer) -> None:
    layer.mlp.down_proj.bias = nn.Parameter(torch.linspace(-1, 1, layer.mlp.down_proj.out_features))


def doubled_weight(layer: Layer) -> None:
    layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight


PATCHES: tuple[Callable[[Layer], None], ...] = (
    own_forward,
    normalised,
    output_hook,
    input_hook,
    gradient_hook,
    halved,
    normed_weight,
    frozen,
    no_module,
    unused,
    activation,
    meta,
    bias,
    doubled_weight,
)


def patched(seed: int) -> tuple[nn.Module, str]:
    """A small model with one or two patches, each of one layer or of all, and their names."""
    draw, model = random.Random(seed), small_model("llama")
    chosen = draw.sample(PATCHES, draw.choice((1, 1, 2)))
    layers = model.model.layers
    for patch in chosen:
        for layer in draw.choice((layers, layers[:1], layers[1:])):
            patch(layer)
    if draw.random() < 0.1:
        layers[1] = layers[0]
    return model, f"seed {seed}: {', '.join(patch.__name__ for patch in chosen)}"


def outcome(seeds: range) -> list[tuple[str, str, dict[str, float]]]:
    """Of each seed: the patches, what refused the model, and the relative errors where nothing did."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = []
    for seed in seeds:
        (model, words), (reference, _) = patched(seed), patched(seed)
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        try:
            shardplan.apply_plan(model, mesh, "auto", sequence_parallel=seed % 2 == 1)
        except (shardplan.PlanError, ValueError, TypeError) as error:
            after = {name: id(parameter) for name, parameter in model.named_parameters()}
            assert before == after and not any(isinstance(p, DTensor) for p in model.parameters()), words
            found.append((words, f"{type(error).__name__}: {error}", {}))
            continue
        ids = batch(seed)
        expected = reference(input_ids=ids, labels=ids, use_cache=False).loss
        expected.backward()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
        errors = {"loss": relative_error(whole(loss).detach(), expected.detach())}
        for name, parameter in model.named_parameters():
            given, right = parameter.grad, wanted[name]
            if right is not None:
                assert given is not None, (words, name)
                errors[name] = relative_error(whole(given), right)
        found.append((words, "", errors))
    return found


def judge(seeds: range) -> tuple[int, int]:
    """How many were refused and how many trained."""
    ranks = on_ranks(2, outcome, seeds, seconds=600.0)
    for words, refused, errors in (row for rank in ranks for row in rank):
        assert refused or (len(errors) > 8 and max(errors.values()) < TOLERANCE[torch.float32]), (words, errors)
        assert "Traceback" not in refused and "internal" not in refused, (words, refused)
    return sum(bool(row[1]) for row in ranks[0]), sum(not row[1] for row in ranks[0])


@pytest.mark.slow
def test_patched_models_are_refused_or_train_right():
    refused, trained = judge(range(24))
    assert min(refused, trained) >= 3, "both kinds were tried"
