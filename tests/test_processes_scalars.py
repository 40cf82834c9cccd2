"""Parameters without dimensions, which FSDP2 refuses: trained, clipped, saved and loaded as in the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import on_ranks
from small_models import share_of, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.optim import AdamW
from transformers import CLIPConfig, CLIPModel

import shardplan
from shardplan.proof.compare import relative_error

STEPS, MAX_NORM = 3, 0.5
ADAMW = {"lr": 1e-2, "eps": 1e-3}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
WITH_TP = {"dp_shard": 2, "tp": 2}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CLIP = {
    "text_config": TOWER | {"vocab_size": 99, "max_position_embeddings": 16, "eos_token_id": 98},
    "projection_dim": 16,
}
CLIP["vision_config"] = TOWER | {"image_size": 8, "patch_size": 4}
PLANS: dict[str, dict[str, Any]] = {
    "clip": {
        "tensor_parallel": {"**.mlp.fc1": "colwise", "**.mlp.fc2": "rowwise"},
        "data_parallel": {"units": ["**.encoder.layers.*"]},
    },
    "gated": {
        "tensor_parallel": {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.gate": "replicate"},
        "data_parallel": {"units": ["layers.*"]},
        "activation_checkpointing": {"modules": ["layers.*"]},
    },
}


class Gate(nn.Module):
    """A block that is multiplied by a number of its own."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gate = nn.Parameter(torch.tensor(gate))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.down(torch.tanh(self.up(x)))


class Gated(nn.Module):
    """Blocks with gates, one of them frozen, between numbers of the model, one of them read by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(1.0))
        self.layers = nn.ModuleList(Gate(gate) for gate in (0.5, 0.7, 0.9))
        self.layers[1].gate.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).square().mean()


def clip() -> nn.Module:
    torch.manual_seed(0)
    return CLIPModel(CLIPConfig(**CLIP)).double()


def gated() -> nn.Module:
    torch.manual_seed(0)
    return Gated().double()


def clip_loss(model: nn.Module, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(98, (3, 8), generator=draw)
    ids[:, -1] = 98
    pixels = torch.randn(3, 3, 8, 8, generator=draw, dtype=torch.float64)
    return model(input_ids=ids, pixel_values=pixels, return_loss=True).loss


def gated_inputs(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


def gated_loss(model: nn.Module, seed: int) -> Tensor:
    return model(**gated_inputs(seed))


INPUTS: dict[str, Callable[[int], dict[str, Any]] | None] = {"clip": None, "gated": gated_inputs}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "clip": (clip, clip_loss),
    "gated": (gated, gated_loss),
}


def kept(tensor: Tensor) -> Tensor:
    return whole(tensor).detach().clone()


def step(name: str, model: nn.Module, optimizer: AdamW, at: int, shares: list[int]) -> dict[str, Tensor]:
    """One step in two micro-batches: the losses of the shares, the norm, the gradients, and the parameters afterwards."""
    loss_of, found = MODELS[name][1], {}
    for micro in range(2):
        for share in shares:
            loss = loss_of(model, 100 * at + 10 * micro + share) / (2 * len(shares))
            loss.backward()
            found[f"loss {micro} {share}"] = loss.detach() * len(shares)
    found |= {f"gradient {n}": kept(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    found["norm"] = kept(shardplan.clip_grad_norm_(model.parameters(), MAX_NORM))
    optimizer.step()
    optimizer.zero_grad()
    return found | {f"parameter {n}": kept(p) for n, p in model.named_parameters()}


def optimizer_of(model: nn.Module) -> AdamW:
    """Of what is trained; a distributed checkpoint of an optimizer has no place for what never had a gradient."""
    return AdamW([p for n, p in model.named_parameters() if p.requires_grad and n != "unused"], **ADAMW)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert {key for key in found if key[:4] != "loss"} == {key for key in expected if key[:4] != "loss"}
    gradients = {key.split()[1]: value.abs().max() for key, value in expected.items() if key.startswith("gradient")}
    # Of what does not matter to the loss, the bias of keys, there is roundoff alone, and it learns from roundoff.
    roundoff = {name for name, value in gradients.items() if value <= 1e-12 * max(gradients.values())}
    assert all(name.endswith("k_proj.bias") for name in roundoff)
    for key, value in found.items():
        if key.split()[-1] in roundoff:
            continue
        assert relative_error(value, expected[key]) <= 1e-9, key


def trained(name: str, sizes: dict[str, int], folder: str) -> None:
    build = MODELS[name][0]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    plan = {"version": "1", "name": "scalars", **PLANS[name]}
    shares = list(range(mesh.size() // sizes.get("tp", 1)))
    reference = build()
    optimizer = optimizer_of(reference)
    expected = [step(name, reference, optimizer, at, shares) for at in range(STEPS + 1)]

    model = build()
    scalars = {n for n, p in model.named_parameters() if not p.ndim}
    shardplan.apply_plan(shardplan.Model(model, inputs=INPUTS[name]), mesh, plan, prove=False)
    usual = next(p for n, p in model.named_parameters() if n not in scalars)
    for n in scalars:
        stored = model.get_parameter(n)
        assert stored.device_mesh == usual.device_mesh and set(stored.placements) == {Replicate()}, n
        assert stored.requires_grad == reference.get_parameter(n).requires_grad
    own = optimizer_of(model)
    for at in range(STEPS):
        same(step(name, model, own, at, [share_of(mesh)[0]]), expected[at])

    states = get_state_dict(model, own)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    with torch.device("meta"):
        again = build()
    shardplan.apply_plan(shardplan.Model(again, inputs=INPUTS[name]), mesh, plan, prove=False)
    if name == "clip":
        shardplan.materialize(again, "cpu")
    else:
        again.to_empty(device="cpu")
    optimizer = optimizer_of(again)
    states = get_state_dict(again, optimizer)
    dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    set_state_dict(again, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    same(step(name, again, optimizer, STEPS, [share_of(mesh)[0]]), expected[STEPS])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [WITH_TP, HSDP], ids=["tp", "hsdp"])
def test_scalars_learn_as_unsharded(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    on_ranks(4, trained, name, sizes, str(tmp_path))
