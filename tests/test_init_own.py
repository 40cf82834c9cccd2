"""`init` on models of one's own: a plan, or a finding, never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardplan
from shardplan.core.diagnostics import PlanError
from tests.case_models import Stack
from tests.derived_plans import against_overlay

WIDTH, HEAD = 32, 8


class Attention(nn.Module):
    """Attention without a mask: to itself, or to a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        reads = x if memory is None else memory
        made = (self.q(x), self.k(reads), self.v(reads))
        q, k, v = (one.unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in made)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Modulated(nn.Module):
    """A block of a diffusion transformer: a condition scales and shifts what its parts read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn, self.ada = Attention(), nn.Linear(WIDTH, 6 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = self.ada(F.silu(condition))[:, None].chunk(6, -1)
        x = x + c * self.attn(self.norm(x) * (1 + b) + a)
        return x + f * self.down(F.gelu(self.up(self.norm(x) * (1 + e) + d)))


class Diffusion(nn.Module):
    """A small DiT: patches of an image, a time and a class."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.classes = nn.Conv2d(4, WIDTH, 2, 2), nn.Embedding(10, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Modulated() for _ in range(2))
        self.out = nn.Linear(WIDTH, 16)

    def forward(self, hidden_states: Tensor, timestep: Tensor, class_labels: Tensor) -> tuple[Tensor]:
        x = self.patches(hidden_states).flatten(2).transpose(1, 2)
        condition = self.time(timestep[:, None]) + self.classes(class_labels)
        for block in self.blocks:
            x = block(x, condition)
        return (self.out(x),)


class Joint(nn.Module):
    """Two streams that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.add_q, self.add_k, self.add_v, self.add_o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        pairs = ((self.q, self.add_q), (self.k, self.add_k), (self.v, self.add_v))
        q, k, v = (torch.cat([f(x), g(y)], 1).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f, g in pairs)
        both = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.o(both[:, : x.shape[1]]), y + self.add_o(both[:, x.shape[1] :])


class TwoStreams(nn.Module):
    """Joint attention over two look-ups."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Embedding(64, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Joint() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, y = self.one(ids), self.other(ids)
        for block in self.blocks:
            x, y = block(x, y)
        return x + y


class Outputs(nn.Module):
    """An MLP with results in a form of their own."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.box = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Linear(WIDTH, 4)
        self.layers, self.form = nn.ModuleList([self.up]), form
        self.ids = nn.Embedding(64, WIDTH)

    def forward(self, ids: Tensor) -> Any:
        x = self.down(torch.relu(self.up(self.ids(ids))))
        return self.form(x, self.box(x))


class Convolutions(nn.Module):
    """No linear layer at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x


class Scale(nn.Module):
    """One vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Holders(nn.Module):
    """Matrices in holders that are not called, below the model itself, whose code multiplies by them."""

    def __init__(self) -> None:
        super().__init__()
        matrices = {"up": nn.Parameter(torch.randn(64, 16) / 4), "down": nn.Parameter(torch.randn(16, 64) / 8)}
        self.held = nn.ModuleDict({"mlp": nn.ParameterDict(matrices)})

    def forward(self, x: Tensor) -> Tensor:
        mlp = self.held["mlp"]
        return x + F.linear(F.gelu(F.linear(x, mlp["up"])), mlp["down"])


def images(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=generator),
        "timestep": torch.rand(2, generator=generator),
        "class_labels": torch.randint(10, (2,), generator=generator),
    }


def values(*shape: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda seed: {"x": torch.randn(*shape, generator=torch.Generator().manual_seed(seed))}


def test_a_diffusion_transformer() -> None:
    made = shardplan.init_plan(shardplan.Model(Diffusion(), inputs=images))
    rules = made.document["tensor_parallel"]
    assert {rules[f"blocks.*.attn.{name}"] for name in "qkv"} == {"colwise"} and rules["blocks.*.attn.o"] == "rowwise"
    assert (rules["blocks.*.up"], rules["blocks.*.down"]) == ("colwise", "rowwise")


def test_joint_attention_is_split_through() -> None:
    rules = shardplan.init_plan(TwoStreams()).document["tensor_parallel"]
    read = {name: rules[f"blocks.*.{name}"] for name in ("q", "k", "v", "add_q", "add_k", "add_v", "o", "add_o")}
    assert read == {name: "rowwise" if name.endswith("o") else "colwise" for name in read}


@pytest.mark.parametrize(
    "form", [lambda x, box: (x, box), lambda x, box: {"aux": box, "sample": x}], ids=["tuple", "dict"]
)
def test_several_outputs(form: Callable[[Tensor, Tensor], Any]) -> None:
    assert "ids" in shardplan.init_plan(Outputs(form)).document["tensor_parallel"]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("model", "inputs"),
    [(Convolutions, values(2, 4, 8, 8)), (Scale, values(2, 16)), (Holders, values(2, 8, 16))],
    ids=["convolutions", "scale", "holders"],
)
def test_a_model_of_which_nothing_can_be_split(model: type[nn.Module], inputs: Any, sequence_parallel: bool) -> None:
    with pytest.raises(PlanError) as raised:
        shardplan.init_plan(shardplan.Model(model(), inputs=inputs), sequence_parallel=sequence_parallel)
    assert [d.code for d in raised.value.diagnostics] == ["SP530"]


class Layer(nn.Module):
    """A block that normalises its sums, with cross-attention where there is a memory."""

    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.attn, self.norm, self.last_norm = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.cross, self.cross_norm = (Attention(), nn.LayerNorm(WIDTH)) if crosses else (None, None)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.norm(x + self.attn(x))
        if memory is not None:
            x = self.cross_norm(x + self.cross(x, memory))
        return self.last_norm(x + self.down(F.gelu(self.up(x))))


class Side(nn.Module):
    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(crosses) for _ in range(2))

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, memory)
        return x


class Translator(nn.Module):
    """An encoder-decoder: two lists of blocks, with nothing after either."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Side(False), Side(True)

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.encoder(ids)
        return self.decoder(decoder_ids, memory), memory


def test_both_sequences_of_an_encoder_decoder_are_split() -> None:
    def inputs(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randint(64, (2, 8), generator=generator) for name in ("ids", "decoder_ids")}

    torch.manual_seed(0)
    made = shardplan.init_plan(shardplan.Model(Translator(), inputs=inputs), sequence_parallel=True)
    rules = made.document["sequence_parallel"]
    for side in ("encoder", "decoder"):
        assert rules[f"{side}.layers.0"] == "split_seq_input"
        assert rules[side] == "gather_seq_output"
    for tp in (2, 4):
        report = shardplan.validate(
            shardplan.Model(Translator(), inputs=inputs), made.document, {"tp": tp}, sequence_parallel=True
        )
        assert report.ok and report.proven, report
    del made.document["sequence_parallel"]["decoder"]
    report = shardplan.validate(
        shardplan.Model(Translator(), inputs=inputs), made.document, {"tp": 2}, sequence_parallel=True
    )
    assert [one.code for one in report.errors] == ["SP405"]


class Residual(nn.Module):
    """A block that ends in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm = Attention(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


def hidden(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed))}


def test_a_model_that_ends_in_its_blocks_has_no_place_to_gather() -> None:
    against_overlay(Stack([Residual(), Residual()]), hidden)


def test_blocks_that_end_in_a_norm_gather_there() -> None:
    made = shardplan.init_plan(
        shardplan.Model(Stack([Layer(False), Layer(False)]), inputs=hidden), sequence_parallel=True
    )
    rules = made.document["sequence_parallel"]
    assert rules["layers.*"] == "split_seq_input"
    assert rules["layers.*.last_norm"] == {"style": "sequence_parallel", "output": "gather"}
    report = shardplan.validate(
        shardplan.Model(Stack([Layer(False), Layer(False)]), inputs=hidden),
        made.document,
        {"tp": 4},
        sequence_parallel=True,
    )
    assert report.ok and report.proven, report
