"""What the step of an optimizer communicates on a planned model: `python -m benchmarks.optimizers`.

The process group is torch's fake one: every collective is called with its size, and none is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer
from transformers.optimization import Adafactor

import shardplan
from shardplan.optimizers import Muon
from tests.collective_counter import CollectiveCounter
from tests.proofs import fake_mesh
from tests.small_models import small_model

from .page import table

MESHES = {"dp 4": ((4,), ("dp_shard",)), "tp 4": ((4,), ("tp",)), "dp 2 x tp 2": ((2, 2), ("dp_shard", "tp"))}
Make = Callable[[nn.Module], Optimizer]


def of_parameters(kind: Callable[[Iterable[nn.Parameter]], Optimizer], model: nn.Module) -> Optimizer:
    return kind(model.parameters())


def matrices_alone(model: nn.Module) -> Optimizer:
    return torch.optim.Muon(Muon(model).param_groups[0]["params"])


OPTIMIZERS: dict[str, Make] = {
    "AdamW, for-loop": partial(of_parameters, partial(torch.optim.AdamW, foreach=False)),
    "AdamW, foreach": partial(of_parameters, partial(torch.optim.AdamW, foreach=True)),
    "AdamW, fused": partial(of_parameters, partial(torch.optim.AdamW, fused=True)),
    "NAdam": partial(of_parameters, torch.optim.NAdam),
    "SGD with momentum": partial(of_parameters, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "SGD, fused": partial(of_parameters, partial(torch.optim.SGD, lr=0.1, fused=True)),
    "Adafactor of torch": partial(of_parameters, torch.optim.Adafactor),
    "Adafactor of transformers": partial(of_parameters, Adafactor),
    "Muon of torch, the matrices alone": matrices_alone,
    "Muon of shardplan, with AdamW": Muon,
}
TEXT = """## Steps of optimizers

`python -m benchmarks.optimizers`: the collectives of a step and the numbers that a rank puts into them, in parts of the numbers that it stores of the matrices, for a Llama
with two layers (14 matrices) in float32. "refused": a ValueError at the first step. The one all-reduce of shardplan's Muon has two numbers for each matrix. torch's Muon sends float32, that of shardplan bfloat16.
"""


def stepped(make: Make, shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    with fake_mesh(*shape, names=names) as mesh:
        model = shardplan.apply_plan(small_model("llama"), mesh, "auto", src_data_rank=None, prove=False)
        optimizer = make(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        stored = sum(p.to_local().numel() for p in Muon(model).param_groups[0]["params"])
        try:
            with CollectiveCounter() as counter:
                optimizer.step()
        except ValueError:
            return "refused"
        sent = sum(call.elements for call in counter.calls) / stored
        return f"{len(counter.calls)}, {sent:.1f}" if counter.calls else "none"


def main() -> None:
    rows = [[name, *(stepped(make, *mesh) for mesh in MESHES.values())] for name, make in OPTIMIZERS.items()]
    print(f"{TEXT}\n{table(['optimizer', *MESHES], rows)}")


if __name__ == "__main__":
    main()
