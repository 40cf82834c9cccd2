"""What the step of an optimizer communicates on a planned model, and how far it is from the unsharded one: `python -m benchmarks.optimizers`.

What is communicated is counted with torch's fake process group: every collective is called with its size, and none is carried out.
The updates are those of gloo processes. `make build/optimizers build/timm` installs the packages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.optimization import Adafactor

import shardplan
from shardplan.optimizers import Muon, stepped_by
from shardplan.runtime.apply.applied import was_touched
from tests.collective_counter import CollectiveCounter
from tests.processes import on_ranks
from tests.proofs import fake_mesh
from tests.small_models import batch, small_model
from tests.timm_models import timm

from .page import table

FOLDER = Path(__file__).parents[1] / "build" / "optimizers"
MESHES = {"dp 4": ((4,), ("dp_shard",)), "tp 4": ((4,), ("tp",)), "dp 2 x tp 2": ((2, 2), ("dp_shard", "tp"))}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
}  # a rank's part of a matrix has 4,096 numbers: smaller ones torchao leaves as they are
STEPS = 3
OFFLOADED = {"data_parallel": {"cpu_offload": True}}
Make = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True)
class Row:
    """An optimizer.

    Args:
        plain: what it is compared with on the unsharded model; None: it itself.
        options: of `apply_plan`.
        dtype: of the model whose updates are compared.
    """

    make: Make
    plain: Make | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64


def uncompiled(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """In place of torch.compile: torchao's steps take minutes to compile, and a fake process group has no graph."""
    return function


def of_parameters(kind: Callable[[Iterable[nn.Parameter]], Optimizer], model: nn.Module) -> Optimizer:
    return kind(model.parameters())


def matrices_alone(model: nn.Module) -> Optimizer:
    return torch.optim.Muon(Muon(model).param_groups[0]["params"])


def of_package(name: str, **options: Any) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """An optimizer of a package in `FOLDER`, or timm's."""

    def made(parameters: Iterable[nn.Parameter]) -> Optimizer:
        package, kind = name.rsplit(".", 1)
        if package == "timm.optim":
            timm()
        if str(FOLDER) not in sys.path:
            sys.path.append(str(FOLDER))
        return getattr(__import__(package, fromlist=[kind]), kind)(parameters, **options)

    return made


def on_one_device(make: Callable[[Iterable[nn.Parameter]], Optimizer], model: nn.Module) -> Optimizer:
    """A package's optimizer of the matrices, as it is, and AdamW of all else."""
    matrices = make(Muon(model).param_groups[0]["params"])
    matrices.param_groups[0]["lr"] = 0.01
    chosen = {id(p) for p in matrices.param_groups[0]["params"]}
    rest = torch.optim.AdamW([p for p in model.parameters() if id(p) not in chosen])
    matrices.register_step_post_hook(lambda *_: rest.step() and None)
    return matrices


def through_hook(name: str) -> Row:
    """A package's optimizer for the matrices through Muon's hook, with AdamW."""
    make = of_package(name, lr=1.0, weight_decay=0.0)

    def hooked(model: nn.Module) -> Optimizer:
        options = {"lr": 0.01, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
        return Muon(model, whole_matrix=stepped_by(make), stateful=True, **options)

    return Row(hooked, partial(on_one_device, make))


def simple(kind: Callable[..., Optimizer], **options: Any) -> Row:
    return Row(partial(of_parameters, partial(kind, **options)))


OTHERS = (
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
)
ROWS: dict[str, Row] = {
    "AdamW, for-loop": simple(torch.optim.AdamW, foreach=False),
    "AdamW, foreach": simple(torch.optim.AdamW, foreach=True),
    "AdamW, fused": simple(torch.optim.AdamW, fused=True),
    "AdamW, parameters and states on the host (`cpu_offload`)": Row(
        partial(of_parameters, torch.optim.AdamW), options=OFFLOADED
    ),
    "AdamW on the host of torchao (`CPUOffloadOptimizer`)": Row(
        partial(of_parameters, of_package("torchao.optim.CPUOffloadOptimizer"))
    ),
    "AdamW, 8-bit of torchao": Row(partial(of_parameters, of_package("torchao.optim.AdamW8bit")), dtype=torch.float32),
    **{kind.__name__: simple(kind) for kind in OTHERS},
    "SGD with momentum": simple(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD, fused": simple(torch.optim.SGD, lr=0.1, fused=True),
    "LAMB of timm": Row(partial(of_parameters, of_package("timm.optim.Lamb"))),
    "LAMB of pytorch_optimizer": Row(partial(of_parameters, of_package("pytorch_optimizer.Lamb"))),
    "Adafactor of torch": simple(torch.optim.Adafactor),
    "Adafactor of transformers": simple(Adafactor),
    "Muon of torch, the matrices alone": Row(matrices_alone),
    "Muon of shardplan, with AdamW": Row(partial(Muon, lr=0.01), partial(on_one_device, torch.optim.Muon)),
    "Shampoo of pytorch_optimizer": Row(partial(of_parameters, of_package("pytorch_optimizer.Shampoo"))),
    "Shampoo of pytorch_optimizer, through Muon's hook": through_hook("pytorch_optimizer.Shampoo"),
    "SOAP of pytorch_optimizer": Row(partial(of_parameters, of_package("pytorch_optimizer.SOAP"))),
    "SOAP of pytorch_optimizer, through Muon's hook": through_hook("pytorch_optimizer.SOAP"),
}
TEXT = """## Steps of optimizers

`python -m benchmarks.optimizers`, with torch {torch}, {packages}. **Communication**: the collectives of a step and the numbers that a rank puts into them, in parts of the
numbers that it stores of the matrices, for a Llama with two layers (14 matrices) in float32. The one all-reduce of shardplan's Muon has two numbers for each matrix. torch's Muon
sends float32, that of shardplan bfloat16. **Off**: after three real steps on four gloo processes (dp 2 x tp 2), the norm of a parameter's update minus that of
the same optimizer on the unsharded model, over the norm of that; the largest of all parameters, in float64 (8-bit: float32). Where it is not rounding, "alone" is how far
the unsharded optimizer is from itself if the halves of its batch change places: SOAP's basis of what no gradient has shown is rounding, and the 8 bits are those of
a scale for each block of 256 numbers, where a shard has other blocks. torch's Muon adds products of shards in bfloat16. "refused": a ValueError at the first step, before anything is changed. "needs CUDA": its constructor says so.
"""


def communicated(row: Row, shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    with fake_mesh(*shape, names=names) as mesh:
        model = small_model("llama")
        model = shardplan.apply_plan(model, mesh, "auto", src_data_rank=None, prove=False, **row.options)
        try:
            optimizer = row.make(model)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            stored = sum(p.to_local().numel() for p in Muon(model).param_groups[0]["params"])
            with CollectiveCounter() as counter:
                optimizer.step()
        except (ValueError, AssertionError) as error:
            return refused(error)
        sent = sum(call.elements for call in counter.calls) / stored
        return f"{len(counter.calls)}, {sent:.1f}" if counter.calls else "none"


def refused(error: Exception) -> str:
    return {ValueError: "refused", AssertionError: "needs CUDA"}[type(error)]


def updates(model: nn.Module, make: Make, shares: Iterable[int]) -> dict[str, Tensor]:
    """What real steps add to each whole parameter.

    Args:
        shares: of the batch that this model has.
    """
    parameters = shardplan.full_parameters if was_touched(model) else nn.Module.named_parameters
    before = {name: value.detach().clone() for name, value in parameters(model)}
    optimizer = make(model)
    for step in range(STEPS):
        ids = torch.cat([batch(step, share) for share in shares])
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        model.zero_grad()
    return {name: value.detach() - before[name] for name, value in parameters(model)}


def furthest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    moved = {name: value for name, value in expected.items() if value.any() or found[name].any()}
    return max(float((found[name] - value).norm() / value.norm()) for name, value in moved.items())


def off(name: str) -> str:
    """On all ranks of dp 2 x tp 2."""
    torch.compile = uncompiled
    row = ROWS[name]
    mesh = shardplan.build_mesh(dp_shard=2, tp=2, device_type="cpu")
    model = small_model("llama", dtype=row.dtype, **SIZES)
    model = shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, prove=False, **row.options)
    try:
        found = updates(model, row.make, [mesh["dp_shard"].get_local_rank()])
    except (ValueError, AssertionError) as error:
        return refused(error)
    expected, turned = (
        updates(small_model("llama", dtype=row.dtype, **SIZES), row.plain or row.make, shares)
        for shares in ((0, 1), (1, 0))
    )
    error = furthest(found, expected)
    return f"{error:.1e}" if error < 1e-6 else f"{error:.1e} (alone {furthest(turned, expected):.1e})"


BALANCED = {
    "llama": ({"dp_shard": 8}, {"tp": 8}, {"dp_shard": 4, "tp": 8}),
    "qwen3_moe": ({"dp_shard": 8}, {"dp_shard": 4, "tp": 4}),
}
BALANCE = """
**The work of owners**: that of the rank that has the most, over the least that any division could give it (the mean of the ranks, or the largest matrix), and the
matrices, for models of the types' default configurations.
"""


def balanced(name: str, sizes: Mapping[str, int]) -> tuple[int, float]:
    """How many matrices there are, and the work of the busiest rank over the least."""
    with fake_mesh(*sizes.values(), names=tuple(sizes)) as mesh:
        model = shardplan.Model(name).find().build("meta")
        pieces = Muon(shardplan.apply_plan(model, mesh, "auto", src_data_rank=None, prove=False))._pieces
    groups: dict[Any, list[Any]] = {}
    for one in pieces:
        groups.setdefault(one.stack.group, []).append(one)
    worst = 1.0
    for group, own in groups.items():
        if group is not None:
            loads = [sum(one.work for one in own if one.owner == rank) for rank in range(len(own[0].stack.boxes))]
            worst = max(worst, max(loads) / max(sum(loads) / len(loads), *(one.work for one in own)))
    return sum(one.which[1] - one.which[0] for one in pieces), worst


def main() -> None:
    torch.compile = uncompiled
    rows = [
        [name, on_ranks(4, off, name)[0], *(communicated(row, *mesh) for mesh in MESHES.values())]
        for name, row in ROWS.items()
    ]
    print(
        TEXT.format(
            torch=torch.__version__.split("+")[0],
            packages=", ".join(f"{name} {version(name)}" for name in ("torchao", "pytorch_optimizer", "transformers"))
            + f", timm {timm().__version__}",
        )
    )
    print(table(["optimizer", "off", *MESHES], rows))
    print(BALANCE)
    owners = [
        (name, ", ".join(f"{axis} {n}" for axis, n in sizes.items()), f"{count:,}", f"{work:.3f} (goal: at most 1.1)")
        for name, meshes in BALANCED.items()
        for sizes in meshes
        for count, work in (balanced(name, sizes),)
    ]
    print(table(["model", "mesh", "matrices", "busiest / least"], owners))


if __name__ == "__main__":
    main()
