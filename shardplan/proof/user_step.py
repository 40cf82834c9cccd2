"""A user's own training step, run a number of times, and all its results on a rank."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from shardplan.compiler.layout.randomness import DrawnAlike
from shardplan.compiler.lower.program import Program
from shardplan.core.mesh import APPLIED, MeshSizes
from shardplan.model.reduced.model_inputs import IGNORED
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import PlanMesh
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.pipeline import Pipeline
from shardplan.runtime.pipeline.apply_stages import apply_stages
from shardplan.runtime.pipeline.layout_of_stages import layout_on
from shardplan.runtime.pipeline.step_loss import LossFunction
from shardplan.torchlib.gathering import of_all

from .exact import as_written, in_precision_of
from .pipelined import AXES, Scheduled
from .rank import mesh_of, whole
from .step_kept import Kept
from .step_watch import WHOLE, Ran, Tensors, Watch, local_of
from .steps import Batch

STEPS, MICRO = 3, 2
MAKE, STEP, LOSS = "make", "step", "loss_fn"


def dealt(feed: Callable[[int], Batch], step: int, shares: int, *, alike: bool, masked: bool) -> list[list[Batch]]:
    """The micro-batches of each data-parallel rank. They have unequal numbers of labels, padding if the model takes masks, in the last
    step a micro-batch without labels, and a rank with mostly one token.

    Args:
        feed: seed -> the model's inputs.
        alike: all micro-batches have the same inputs, but different labels.
    """
    every: list[list[Batch]] = []
    for share in range(shares):
        every.append([])
        for micro in range(MICRO):
            place = (step * shares + share) * MICRO + micro
            batch = dict(feed(step if alike else place))
            labels, ids = batch.get("labels"), batch.get("input_ids")
            if isinstance(labels, Tensor) and isinstance(ids, Tensor) and labels.shape == ids.shape:
                draw = torch.Generator().manual_seed(place)
                if share == shares - 1 and not alike:
                    ids = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.5, int(ids[0, -1]))
                labels = ids.masked_fill(
                    torch.rand(ids.shape, generator=draw) < 0.2 + 0.6 * share / shares + 0.1 * micro, IGNORED
                )
                if masked:
                    batch["attention_mask"] = torch.ones_like(ids)
                    batch["attention_mask"][1, -ids.shape[1] // 4 :] = 0
                    labels[1, -ids.shape[1] // 4 :] = IGNORED
                if step == STEPS - 1 and (share, micro) == (shares - 1, 0):
                    labels = torch.full_like(labels, IGNORED)
                batch |= {"input_ids": ids, "labels": labels}
            every[-1].append(batch)
    return every


def joined(batches: Sequence[Batch]) -> Batch:
    """Join the rows of several batches."""
    return {
        name: torch.cat([batch[name] for batch in batches]) if isinstance(value, Tensor) and value.ndim else value
        for name, value in batches[0].items()
    }


@dataclass(frozen=True)
class Trial:
    """A run of the script.

    Args:
        build: makes the unsharded model, the same in every process.
        program: the program on `sizes`.
        batches: the batches of each step.
        alike: whether draws depend only on shapes (`DrawnAlike`).
        staged: how its pipeline runs.
    """

    script: str
    build: Callable[[], nn.Module]
    program: Program
    sizes: MeshSizes
    batches: Sequence[list[Batch]]
    alike: bool = False
    staged: Scheduled | None = None

    def applied(self, mesh: PlanMesh, loss: LossFunction | None) -> nn.Module | Pipeline:
        """The model that the script gets.

        Args:
            loss: the script's loss function, for a pipeline.
        """
        if self.staged is None:
            return apply_program(self.build(), mesh, self.program, src_data_rank=0, seed=0, kind="model")
        layout, count = layout_on(mesh, self.staged.cut, self.staged.schedule), self.staged.micro_batches
        return apply_stages(self.build(), layout, self.program, count, loss, compare=True, src_data_rank=0, seed=0)


def run_trial(trial: Trial) -> tuple[list[Ran], bool]:
    """Run a script's steps. All ranks of the mesh call it together.

    Returns:
        The results of each step, and whether the script or the model drew random numbers.
    """
    torch.manual_seed(dist.get_rank())  # like processes that nobody seeds
    mesh = mesh_of(trial.sizes, APPLIED if trial.staged is None else AXES)
    packed = packed_parameters(trial.program)
    autocast = torch.autocast.__init__

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        autocast(self, *args, **{**kwargs, "enabled": False})

    found, drew = [], False
    with ExitStack() as entered:
        entered.enter_context(patch.dict(os.environ, _as_torchrun()))
        entered.enter_context(patch.object(torch.autocast, "__init__", without))
        for name in ("scale", "unscale_", "step", "update"):
            entered.enter_context(patch.object(GradScaler, name, as_written(getattr(GradScaler, name))))
        with DrawnAlike() if trial.alike else nullcontext():
            script = runpy.run_path(trial.script, run_name="shardplan_step")
        model = trial.applied(mesh, script.get(LOSS))
        with DrawnAlike() if trial.alike else nullcontext(), in_precision_of(model):
            state = script[MAKE](model)
            kept = Kept(state, model, dict(model.named_parameters()), packed)
            for batches in trial.batches:
                watch, before = Watch(trial.script, model), torch.get_rng_state()
                with watch.watching():
                    loss = script[STEP](model, batches, state)
                drew = drew or not torch.equal(before, torch.get_rng_state())
                ran = watch.ran
                ran.loss = None if loss is None else float(whole(loss) if isinstance(loss, Tensor) else loss)
                ran.buffers = watch.written_buffers()
                ran.after = watch.copied()
                kept.note(ran)
                before_update, update = local_of(ran.backward), local_of(ran.update)
                ran.factor, ran.square = _factor(before_update, update)
                ran.factors = {name: _factor({name: x}, update)[0] for name, x in before_update.items()}
                found.append(ran)
    stage = 0 if mesh.pp is None else mesh.pp.get_local_rank()
    for ran in found:
        for name in WHOLE:
            setattr(ran, name, _whole(getattr(ran, name), stage, kept.packed, mesh.tp_size))
    return found, drew


def _as_torchrun() -> dict[str, str]:
    """The environment of a process of `torchrun`, which accelerate reads."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**own, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def _factor(before: Tensors, after: Tensors) -> tuple[float | None, float]:
    both = [(before[name].flatten(), after[name].flatten()) for name in before if name in after]
    if not both:
        return None, 0.0
    x, y = (torch.cat(list(part)).double() for part in zip(*both, strict=True))
    square = float(x @ x)
    if not square:
        return None, 0.0
    factor = float(x @ y) / square
    close = float((y - factor * x).norm()) <= 1e-6 * max(float(y.norm()), 1e-300)
    return factor if close else None, square


def _whole(tensors: Tensors, stage: int, packed: Mapping[str, Any], tp: int) -> Tensors:
    """Make whole the tensors that all ranks with the same stages have, in one order. A collective."""
    own = {name: isinstance(tensor, DTensor) for name, tensor in tensors.items()}
    every = [names for other, names in of_all((stage, own)) if other == stage]
    common = [name for name, sharded in every[0].items() if all(names.get(name) is sharded for names in every)]
    return {name: whole(tensors[name], packed.get(name), tp) for name in common}
