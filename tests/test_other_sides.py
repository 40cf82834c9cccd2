"""Code that compares a length, a width or the number of a layer with a constant: both of its branches are proven, or a line is named."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.core.diagnostics import Diagnostic
from tests.processes import on_ranks
from tests.small_models import small_model

PLAN = {"version": "1", "name": "mlp", "tensor_parallel": {"up": "colwise", "down": "rowwise"}}
LIMIT = 4096


class Block(nn.Module):
    """Where `long` says so, it reads the width of a rank's slice."""

    limit = 512

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def long(self, x: Tensor) -> bool:
        return False

    def right(self, h: Tensor) -> Tensor:
        return h * 0.5

    def wrong(self, h: Tensor) -> Tensor:
        return h / (1 + h.square().sum(-1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return x + self.down(self.other(h) if self.long(x) else h)


class Literal(Block):
    def long(self, x: Tensor) -> bool:
        return x.shape[1] > 4096


class Mirrored(Block):
    def long(self, x: Tensor) -> bool:
        return 4096 <= x.size(1)  # noqa: SIM300


class Global(Block):
    def long(self, x: Tensor) -> bool:
        return x.shape[-2] > LIMIT


class Attribute(Block):
    def long(self, x: Tensor) -> bool:
        return x.shape[1] >= self.limit


class Named(Block):
    def long(self, x: Tensor) -> bool:
        _batch, length, _width = x.shape
        return not length < 100


class Handed(Block):
    def long(self, x: Tensor) -> bool:
        return self.over(x.shape[1])

    def over(self, length: int) -> bool:
        return length > 1000


class Single(Block):
    def long(self, x: Tensor) -> bool:
        return x.shape[0] == 1


class Nested(Block):
    """The second comparison is made in the branch of the first."""

    def long(self, x: Tensor) -> bool:
        if x.shape[1] > 100:
            return x.shape[1] % 3 == 2
        return False


class Chained(Block):
    def long(self, x: Tensor) -> bool:
        return 100 < x.shape[1] < 5000


class Among(Block):
    def long(self, x: Tensor) -> bool:
        return x.shape[1] in (100, 200)


class Counted(Block):
    def long(self, x: Tensor) -> bool:
        return len(x) == 1


class Odd(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return x + self.down(self.other(h) if x.shape[1] % 2 else h)


class Whole(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        if x.shape[1] > 2048:
            h = self.other(h)
        return x + self.down(h)


class AnyLength(Block):
    def long(self, x: Tensor) -> bool:
        return any(n > 1000 for n in x.shape)


class Cut(Block):
    """Of each of these the reduced model has nothing, or all."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return x + self.down(torch.cat((h[:, :512], self.other(h[:, 512:])), 1))


class Last(Block):
    window = 512

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return x + self.down(torch.cat((self.other(h[..., : -self.window, :]), h[..., -self.window :, :]), -2))


class Chunks(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        for i in range(x.shape[1] // LIMIT):
            h = torch.cat((h[:, : i * LIMIT], self.other(h[:, i * LIMIT :])), 1)
        return x + self.down(h)


class Ranges(Block):
    def forward(self, x: Tensor) -> Tensor:
        _rows, length, _width = x.shape
        parts = [torch.relu(self.up(x[:, i : i + 1024])) for i in range(0, length, 1024)]
        return x + self.down(torch.cat(parts if len(parts) == 1 else [self.other(one) for one in parts], 1))


class Parts(Block):
    def forward(self, x: Tensor) -> Tensor:
        first, *others = torch.relu(self.up(x)).split(1024, dim=1)
        return x + self.down(torch.cat((first, *map(self.other, others)), 1))


class Least(Block):
    def forward(self, x: Tensor) -> Tensor:
        h, n = torch.relu(self.up(x)), min(x.shape[1], self.limit)
        return x + self.down(torch.cat((h[:, :n], self.other(h[:, n:])), 1))


class Full(Block):
    def long(self, x: Tensor) -> bool:
        return (x > 0).sum().item() > 10_000


class Most(Block):
    def long(self, x: Tensor) -> bool:
        largest = int(x.abs().max())
        return largest > 100


class Given(Block):
    def long(self, x: Tensor) -> bool:
        return 4096 in x[:, :, 0].long().flatten().tolist()


class Never(Block):
    def long(self, x: Tensor) -> bool:
        kinds = set(x[:, 0, 0].long().tolist())
        return not (LIMIT not in kinds)


class Steps(Block):
    """Warms up for longer than a proof runs."""

    warm_up = 100

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def long(self, x: Tensor) -> bool:
        self.calls += self.training
        return self.calls > self.warm_up


class Turns(Steps):
    def long(self, x: Tensor) -> bool:
        self.calls += 1
        return self.calls % 100 == 0


class Share(Steps):
    def long(self, x: Tensor) -> bool:
        self.calls = self.calls + 0.01
        return self.calls >= 0.5


class Buffered(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def long(self, x: Tensor) -> bool:
        self.calls.add_(1)
        return bool((self.calls > 3).item())


FORMS = (Literal, Mirrored, Global, Attribute, Named, Handed, Single, Nested, Chained, Among, Counted, Odd, Whole)
CUTS = (AnyLength, Cut, Last, Chunks, Ranges, Parts, Least)
READ_OFF = (Full, Most, Given, Never)
STEPS = (Steps, Turns, Share, Buffered)


def built(form: type[Block], how: str) -> nn.Module:
    made = type(form.__name__, (form,), {"other": getattr(Block, how)})
    return made()


def features(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))}


def found(model: nn.Module, plan: Any = PLAN, **options: Any) -> tuple[Diagnostic, ...]:
    named = shardplan.Model(model, inputs=features) if isinstance(model, Block) else model
    return shardplan.validate(named, plan, {"tp": 2}, **options).diagnostics


def codes(model: nn.Module, plan: Any = PLAN, **options: Any) -> list[str]:
    return [one.code for one in found(model, plan, **options)]


@pytest.mark.parametrize("form", FORMS + CUTS + READ_OFF + STEPS)
def test_both_branches_are_proven(form: type[Block]) -> None:
    assert codes(built(form, "right")) == []
    (wrong,) = found(built(form, "wrong"))
    assert wrong.code == "SP420"
    assert wrong.notes[-1].startswith(f"only with the other side of {__file__}:")


# Inputs with which a form takes its branch.
SHAPES = {
    Literal: (1, 4100, 16),
    Attribute: (1, 600, 16),
    Single: (1, 8, 16),
    Nested: (1, 101, 16),
    Chained: (1, 200, 16),
    AnyLength: (1, 1004, 16),
    Cut: (1, 600, 16),
    Last: (1, 600, 16),
    Chunks: (1, 4200, 16),
    Ranges: (1, 1040, 16),
    Parts: (1, 1040, 16),
    Least: (1, 600, 16),
}


def errors() -> list[tuple[str, bool]]:
    """Of each form, right and wrong: whether two ranks give other gradients than the unsharded model."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
    for form, shape in SHAPES.items():
        for how in ("right", "wrong"):
            torch.manual_seed(0)
            one = built(form, how).double()
            other = copy.deepcopy(one)
            shardplan.apply_plan(shardplan.Model(one, inputs=features), mesh, PLAN, prove=False)
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            for model in (one, other):
                model(x).square().mean().backward()
            gradient = one.up.weight.grad.full_tensor()
            differs = float((gradient - other.up.weight.grad).abs().max() / other.up.weight.grad.abs().max()) > 1e-9
            found.append((f"{form.__name__} {how}", differs))
    return found


@pytest.mark.slow
def test_real_processes_say_the_same() -> None:
    for found in on_ranks(2, errors):
        assert {name for name, differs in found if differs} == {f"{form.__name__} wrong" for form in SHAPES}


class Stages(nn.Module):
    """Long rows need what the first block returned in the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.norm(x + first if x.shape[1] > 512 else x)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_cut_into_stages_is_proven_in_both_branches(tp: int) -> None:
    plan = {"version": "1", "name": "mlp", "tensor_parallel": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}
    found = {}
    for carry in ([], ["blocks.0"]):
        section = {"pipeline_parallel": {"layers": "blocks.*", "carry": carry}}
        report = shardplan.validate(shardplan.Model(Stages(), inputs=features), plan | section, {"pp": 2, "tp": tp})
        found[len(carry)] = report.diagnostics
    assert found[1] == ()
    (wrong,) = found[0]
    assert wrong.code == "SP431" and "only with the other side of" in wrong.notes[-1]


class Tokens(Block):
    def many(self, tokens: int) -> bool:
        return tokens > 4096

    def long(self, x: Tensor) -> bool:
        return self.many(len(x.flatten(0, 1)))


def test_the_number_of_tokens_is_a_length() -> None:
    assert codes(built(Tokens, "right")) == []
    assert codes(built(Tokens, "wrong")) == ["SP420"]


class Widths(Block):
    """The width is the model's own."""

    def long(self, x: Tensor) -> bool:
        return x.shape[-1] > 128


def test_what_the_model_itself_has_is_on_one_side() -> None:
    assert codes(built(Widths, "wrong")) == []


class Empty(Block):
    """Rows there are in a model of each size."""

    def long(self, x: Tensor) -> bool:
        return x.shape[0] < 1 or len(x) == 0 or not x.shape[1] > 0


def test_whether_there_are_any_is_asked_in_a_model_of_each_size() -> None:
    assert codes(built(Empty, "wrong")) == []


class Unfit(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            x = x.squeeze(0)[None].reshape(1, 8, 16)
        return super().forward(x)


def test_a_branch_that_does_not_run_is_a_warning_with_the_line() -> None:
    report = shardplan.validate(shardplan.Model(Unfit(), inputs=features), PLAN, {"tp": 2})
    assert report.ok and [one.code for one in report.diagnostics] == ["SP423"]
    assert (
        "test_other_sides.py" in report.diagnostics[0].notes[0] and "x.shape[0] == 1" in report.diagnostics[0].notes[0]
    )


def too_long(x: Tensor) -> bool:
    return x.shape[1] > 4096


class Helped(Block):
    def long(self, x: Tensor) -> bool:
        return too_long(x)


class Decorated(Block):
    @torch.no_grad()
    def long(self, x: Tensor) -> bool:
        return x.shape[1] > 4096


class Lambda(Block):
    long = lambda self, x: x.shape[1] > 4096  # noqa: E731


class Static(Block):
    @staticmethod
    def asked(x: Tensor) -> bool:
        return x.shape[1] > 4096

    def long(self, x: Tensor) -> bool:
        return self.asked(x)


class Limit:
    """No module."""

    def asked(self, x: Tensor) -> bool:
        return x.shape[1] > 4096


class Object(Block):
    limit = Limit()

    def long(self, x: Tensor) -> bool:
        return self.limit.asked(x)


class Table(Block):
    limits = {"long": too_long}  # noqa: RUF012

    def long(self, x: Tensor) -> bool:
        return self.limits["long"](x)


class Partial(Block):
    def __init__(self) -> None:
        super().__init__()
        self.asked = partial(too_long)

    def long(self, x: Tensor) -> bool:
        return self.asked(x)


@pytest.mark.parametrize("form", [Helped, Decorated, Lambda, Static, Object, Table, Partial])
def test_what_nothing_can_be_put_in_the_place_of_is_a_warning(form: type[Block]) -> None:
    assert codes(built(form, "right")) == ["SP423"]


def patched(forward: Callable[..., Tensor]) -> nn.Module:
    model = small_model("llama", num_hidden_layers=2)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.number = number
        layer.mlp.forward = types.MethodType(forward, layer.mlp)
    return model


def _of_a_layer(self: nn.Module, x: Tensor) -> Tensor:
    h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    if x.shape[1] > 4096:
        h = h / (1 + h.square().sum(-1, keepdim=True))
    return self.down_proj(h)


def _of_a_width(self: nn.Module, x: Tensor) -> Tensor:
    h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    if x.shape[-1] > 1024:
        h = h / (1 + h.square().sum(-1, keepdim=True))
    return self.down_proj(h)


def _fine(self: nn.Module, x: Tensor) -> Tensor:
    h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    if x.shape[-1] > 1024 or x.shape[1] > 4096:
        h = h * 0.5
    return self.down_proj(h)


@pytest.mark.parametrize("forward", [_of_a_layer, _of_a_width])
def test_a_patched_model_of_transformers(forward: Callable[..., Tensor]) -> None:
    assert "SP420" in codes(patched(forward), "llama", sequence_parallel=False)
    assert codes(patched(_fine), "llama", sequence_parallel=False) == []
