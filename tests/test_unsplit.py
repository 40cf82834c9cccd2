"""PLAN `auto` where tp is 1: any module, with every data-parallel backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from processes import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error

Rows = Mapping[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.inner(x))

    def other(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Base(nn.Module):
    """A stack that is run as a subclass says; its first two blocks are a list, the others a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleDict({"a": Block(), "b": Block()})
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.norm(self.heads["a"](x) + self.heads["b"](x)).square().mean()

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Twice(Base):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(block(x))


class OtherName(Base):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(block, Block)
        return block.other(x)


class Weights(Base):
    """It reads the blocks' weights, and calls none of them."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(block, Block)
        return torch.nn.functional.linear(x, block.inner.weight, block.inner.bias)


class Shared(Base):
    """A parameter of a block is one outside of it too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.weight = self.blocks[1].inner.weight


class Lists(nn.Module):
    """No list at all: one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def rows(seed: int) -> Rows:
    return {"x": torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))}


def transformer(make: type, name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make.from_config(AutoConfig.for_model(name, **settings)).eval()

    return build


def module(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return build


def ids(seed: int) -> Rows:
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def pixels(seed: int) -> Rows:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))}


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the units that are expected."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Rows]
    units: tuple[str, ...]


HEADS = ("heads.a", "heads.b")
T5 = {
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "image_size": 16}
BERT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
CASES = {
    "plain": Case(module(Base), rows, ("blocks.0", "blocks.1", *HEADS)),
    "run twice": Case(module(Twice), rows, HEADS),
    "another name": Case(module(OtherName), rows, HEADS),
    "weights alone": Case(module(Weights), rows, HEADS),
    "a shared parameter": Case(module(Shared), rows, ("blocks.0", *HEADS)),
    "no list": Case(module(Lists), rows, ()),
    "t5": Case(
        transformer(AutoModelForSeq2SeqLM, "t5", **T5),
        ids,
        ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"),
    ),
    "vit": Case(transformer(AutoModel, "vit", **VIT, patch_size=4), pixels, ("layers.0", "layers.1")),
    "modernbert": Case(
        transformer(AutoModelForMaskedLM, "modernbert", **BERT, pad_token_id=0),
        ids,
        ("model.layers.0", "model.layers.1"),
    ),
    "albert": Case(transformer(AutoModelForMaskedLM, "albert", **BERT, embedding_size=16), ids, ()),
    "llama": Case(
        transformer(AutoModel, "llama", **BERT),
        lambda seed: {"input_ids": ids(seed)["input_ids"]},
        ("layers.0", "layers.1"),
    ),
}


def loss_of(model: nn.Module, inputs: Rows) -> Tensor:
    found = model(**inputs)
    if isinstance(found, Tensor):
        return found
    return found.loss if "loss" in found else found.last_hidden_state.square().mean()


def compared(name: str, backend: str) -> dict[str, float]:
    """The relative errors of the loss and of every gradient."""
    case = CASES[name]
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    axis = "dp_replicate" if backend == "ddp" else "dp_shard"
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(axis,))
    reference, model = case.build(), case.build()
    # The pooler of ViT has no part in its loss here: torch's DDP raises in the second step unless it is told.
    options = {"ddp": {"find_unused_parameters": True}} if backend == "ddp" else {}
    model = shardplan.apply_plan(
        shardplan.Model(model, inputs=case.inputs), mesh, "auto", data_parallel={"backend": backend, **options}
    )
    resolved = shardplan.applied(model).program.resolved
    assert resolved.dp_units == case.units, resolved.dp_units
    losses = [loss_of(reference, case.inputs(seed)) for seed in range(ranks)]
    (sum(losses) / ranks).backward()
    loss = loss_of(model, case.inputs(rank))
    loss.backward()
    found = {"loss": relative_error(loss.detach(), losses[rank].detach())}
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = expected.pop(name.removeprefix("module.")).grad
        given = parameter.grad
        if wanted is None:
            assert given is None or not bool((given.full_tensor() if isinstance(given, DTensor) else given).any())
            continue
        assert given is not None, name
        found[name] = relative_error(given.full_tensor() if isinstance(given, DTensor) else given, wanted)
    assert not expected
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_unsharded_model(name: str):
    for found in on_ranks(2, compared, name, "fsdp2"):
        assert len(found) > 4 and max(found.values()) < TOLERANCE[torch.float32], found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "another name", "t5", "vit"])
def test_so_it_does_with_ddp(name: str):
    for found in on_ranks(2, compared, name, "ddp"):
        assert len(found) > 4 and max(found.values()) < TOLERANCE[torch.float32], found
