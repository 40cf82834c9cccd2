"""Parameters that a module has elsewhere too: recurrent modules' flat weights, lists, closures, weights that hooks compute."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import on_ranks
from small_models import whole
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

import shardplan
from shardplan.model.rebinding import HeldParameter, NotBound, copied
from shardplan.proof.compare import relative_error
from tests.own_models import WIDTH, Decoder
from tests.proofs import assert_equal
from tests.test_live import real_rows, squared

PLAN = {
    "version": "1",
    "name": "held",
    "tensor_parallel": {
        "layers.*.mlp": "input_with_grad_allreduce",
        "layers.*.mlp.0": "colwise",
        "layers.*.mlp.2": "rowwise",
    },
}


class Uncopied(Tensor):
    """torch copies no subclass without a `new_empty` of its own."""


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.mixer, self.norm = mixer, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixer(x)
        return x + self.mlp(self.norm(x))


class Model(Decoder):
    def __init__(self, mixer: Callable[[], nn.Module]):
        torch.manual_seed(0)
        super().__init__(lambda: Layer(mixer()))


class Recurrent(nn.Module):
    def __init__(self, cls: type[nn.RNNBase], features: int = WIDTH, **options: Any):
        super().__init__()
        self.rnn = cls(WIDTH, features, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Normalised(nn.Module):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]):
        super().__init__()
        self.linear = norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Scaled(nn.Module):
    """Its parameter stands in whatever `holder` makes of it."""

    def __init__(self, holder: Callable[[nn.Parameter], Any]):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.held = holder(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        held = self.held
        while isinstance(held, (list, tuple, dict)):
            held = next(iter(held.values())) if isinstance(held, dict) else held[0]
        return x * (held(x) if callable(held) else held)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.all = nn.ParameterList([self.scale, nn.Parameter(torch.ones(WIDTH))])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.all[0] * self.all[1] + self.scale


@dataclasses.dataclass
class Holder:
    scale: nn.Parameter

    def __call__(self, x: Tensor) -> Tensor:
        return self.scale


def short(seed: int) -> dict[str, Tensor]:
    return {"ids": ids(seed, 0)}


def ids(step: int, rank: int) -> Tensor:
    return torch.randint(32, (2, 4), generator=torch.Generator().manual_seed(10 * step + rank))


RIGHT = {
    "GRU": partial(Recurrent, nn.GRU, num_layers=2),
    "LSTM": partial(Recurrent, nn.LSTM),
    "LSTM both ways": partial(Recurrent, nn.LSTM, WIDTH // 2, bidirectional=True),
    "weight_norm": partial(Normalised, weight_norm),
    "parametrizations.weight_norm": partial(Normalised, parametrizations.weight_norm),
    "parametrizations.spectral_norm": partial(Normalised, parametrizations.spectral_norm),
    "ParameterList": Listed,
}


def by_closure(scale: nn.Parameter) -> Callable[[Tensor], Tensor]:
    return lambda x: scale


def by_default(scale: nn.Parameter) -> Callable[[Tensor], Tensor]:
    def read(x: Tensor, scale: nn.Parameter = scale) -> Tensor:
        return scale

    return read


HELD = {
    "a list": lambda scale: [scale],
    "a tuple": lambda scale: (scale,),
    "a dict": lambda scale: {"scale": scale},
    "lists in a dict": lambda scale: {"all": [[scale]]},
}
BOUND = {
    "a closure": by_closure,
    "a default": by_default,
    "an object that is called": Holder,
    "a view": lambda s: [s[:]],
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", RIGHT)
def test_these_modules_are_whole_on_each_rank(name: str) -> None:
    report = shardplan.validate(shardplan.Model(Model(RIGHT[name]), inputs=short), PLAN, {"tp": 2})
    assert report.ok and not report.diagnostics, report.diagnostics
    assert_equal(real_rows(partial(Model, RIGHT[name]), PLAN, lambda model: short(0), squared))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", ["LSTM", "weight_norm"])
def test_a_model_that_was_called_before(name: str) -> None:
    model = Model(RIGHT[name])
    model(**short(0))
    assert shardplan.validate(shardplan.Model(model, inputs=short), PLAN, {"tp": 2}).ok


@pytest.mark.parametrize("holder", HELD)
def test_a_parameter_in_a_container_is_a_finding(holder: str) -> None:
    model = Model(partial(Scaled, HELD[holder]))
    (finding,) = shardplan.validate(model, PLAN, {"tp": 2}).diagnostics
    assert finding.code == "SP524"
    assert "layers.0.mixer: held keeps the parameter layers.0.mixer.scale in a" in finding.message
    assert "nn.ParameterList" in finding.help and "self.scale" in finding.help
    with pytest.raises(HeldParameter):
        copied(model, {id(p): p for p in model.parameters()})  # as a rank's run copies it


@pytest.mark.parametrize(
    "value", [threading.Lock(), nn.Parameter(torch.ones(3).as_subclass(Uncopied))], ids=["lock", "parameter"]
)
def test_what_nobody_can_copy_is_a_finding(value: Any) -> None:
    model = Model(next(iter(RIGHT.values())))
    model.value = value
    (finding,) = shardplan.validate(shardplan.Model(model, inputs=short), PLAN, {"tp": 2}).diagnostics
    assert finding.code == "SP524" and "Model cannot be copied" in finding.message


@pytest.mark.parametrize("holder", BOUND)
def test_a_parameter_that_a_function_or_an_object_has_is_a_finding(holder: str) -> None:
    model = Model(partial(Scaled, BOUND[holder]))
    (finding,) = shardplan.validate(model, PLAN, {"tp": 2}).diagnostics
    assert finding.code == "SP524" and "layers.0.mixer" in finding.message
    with pytest.raises(NotBound):
        copied(model)


def two_steps(mixer: Callable[[], nn.Module]) -> dict[str, Tensor]:
    model, mesh = Model(mixer), shardplan.build_mesh(dp_shard=2)
    section = {"backend": "fsdp2", "units": ["layers.*"]}
    shardplan.apply_plan(model, mesh, {"version": "1", "name": "sharded"}, data_parallel=section, prove=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        F.mse_loss(model(ids(step, dist.get_rank())), torch.ones(())).backward()
        found = {name: whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_recurrent_modules_under_fsdp2() -> None:
    found = on_ranks(2, two_steps, RIGHT["LSTM"])
    model = Model(RIGHT["LSTM"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            (F.mse_loss(model(ids(step, rank)), torch.ones(())) / 2).backward()
        if not step:
            optimizer.step()
    for rank in range(2):
        for parameter, expected in model.named_parameters():
            assert relative_error(found[rank][parameter], expected.grad) <= 1e-5, (rank, parameter)


NORMED = """
import torch
from torch import nn
import shardplan
from torch.nn.utils import weight_norm
from torch.nn.utils.parametrizations import weight_norm as parametrized

class Block(nn.Module):
    def __init__(self, normed):
        super().__init__()
        self.up, self.down = normed(nn.Linear(16, 64)), normed(nn.Linear(64, 16))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def features(seed):
    return {"input": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))}

for normed, name in (
    (parametrized, "parametrizations.weight.original0"), (weight_norm, "weight_v"), (weight_norm, "weight_g")
):
    plan = {"version": "1", "name": "own", "tensor_parallel": {f"0.up.{name}": "colwise"}}
    model = shardplan.Model(nn.Sequential(Block(normed), Block(normed)), inputs=features)
    report = shardplan.validate(model, plan, {"tp": 2})
    assert "SP408" in str(report) and "weight_norm of a weight" in str(report), report
    print(name)
"""


def test_half_of_a_weight_norm_is_a_finding() -> None:
    """torch's kernel reads past the end of a norm of another size, and the process ends."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", NORMED], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, len(ran.stdout.split())) == (0, 3), ran.stdout + ran.stderr


def test_a_model_with_norms_of_weights_has_no_plan_that_init_knows() -> None:
    """The module computes its weight, so that no parameter tells its features."""
    model = nn.Sequential(
        *(nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)), nn.ReLU()) for _ in range(2))
    )
    with pytest.raises(shardplan.PlanError) as error:
        shardplan.init_plan(shardplan.Model(model, inputs=lambda seed: {"input": torch.randn(2, 8, 16)}), tp=2)
    assert [one.code for one in error.value.diagnostics] == ["SP530"]
