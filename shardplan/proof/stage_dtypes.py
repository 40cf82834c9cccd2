"""The proof of pipeline stages in the dtypes of training: stages on their ranks, and the whole model, run the same micro-batches with
FSDP2's casts, or under torch.autocast."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from shardplan.compiler.layout.randomness import DrawnAlike
from shardplan.compiler.lower import Program
from shardplan.core.mesh import Axis, MeshSizes
from shardplan.core.plan import Overlays
from shardplan.model.reduced.precision import in_dtype, with_half
from shardplan.runtime.apply.phases import apply_program

from .pipelined import AXES, Scheduled, ScheduledCase, one_step, ranks_are_silent
from .proof_batches import MicroBatches
from .rank import Left, mesh_of, whole
from .section_dtype import DtypeTrial, Unsharded, few_batches
from .simulate import common_to_ranks, copy_of
from .steps import Steps
from .threads import OnRanks

APART = 1000  # between the seeds of two draws


@dataclass(frozen=True, kw_only=True)
class StagesTrial(DtypeTrial):
    """The proof of stages in lower dtypes; its programs are for one stage.

    Args:
        sizes: of the mesh, with pp.
    """

    sizes: MeshSizes
    scheduled: Scheduled

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of inputs that have rows for micro-batches."""
        return self.scheduled.kinds

    @property
    def ranks(self) -> int:
        """The number of simulated ranks."""
        return few_batches(self.sizes).world_size

    def exact(self, kind: str, draw: int) -> tuple[MicroBatches, Steps]:
        """The micro-batches of a draw, and the whole model's step on them in float32."""
        batches = self._batches(kind, draw, torch.float32)
        before = torch.get_rng_state()
        steps = self._step(batches, self.built(draw))
        if torch.equal(before, torch.get_rng_state()):
            return batches, steps
        with DrawnAlike():
            return batches, replace(self._step(batches, self.built(draw)), drew=True)

    def cast_whole(self, kind: str, draw: int, dtype: torch.dtype) -> Steps:
        """The step of the whole model and inputs that are in a dtype themselves."""
        return self._step(self._batches(kind, draw, dtype), in_dtype(with_half(self.built(draw)), dtype))

    def _batches(self, kind: str, draw: int, dtype: torch.dtype) -> MicroBatches:
        def inputs(seed: int) -> dict[str, object]:
            return self.reduced_model.inputs(seed=APART * draw + seed, kind=kind)

        return MicroBatches(inputs, self.scheduled.micro_batches, 1, dtype)

    def _step(self, batches: MicroBatches, model: nn.Module) -> Steps:
        before = {name: value.detach().clone() for name, value in model.named_parameters(remove_duplicate=False)}
        step = one_step([model], batches, own=self._own(batches))
        buffers = {name: buffer.detach() for name, buffer in model.named_buffers(remove_duplicate=False)}
        parameters = {name: one.detach() for name, one in model.named_parameters(remove_duplicate=False)}
        written = frozenset(name for name, one in parameters.items() if not torch.equal(one, before[name]))
        return Steps([{"loss": step.loss}], [], step.gradients, buffers, parameters, written)

    def _own(self, batches: MicroBatches) -> bool:
        return batches.own(in_dtype(self.built(0), batches.dtype))

    def alone(self, model: nn.Module, program: Program, batches: MicroBatches, exact: Steps, on_ranks: OnRanks) -> Left:
        """The step of the whole model on one rank."""
        axes = (Axis.DP_SHARD,) if self.lower.precision is not None else ()

        def step(rank: int) -> Left:
            apply_program(
                model, mesh_of(program.resolved.sizes, axes), program, src_data_rank=0, autocast=self.lower.autocast
            )
            with DrawnAlike() if exact.drew else nullcontext():
                made = one_step([model], batches, own=self._own(batches))
            buffers = {name: buffer.detach() for name, buffer in model.named_buffers(remove_duplicate=False)}
            return Left([{"loss": made.loss}], {n: whole(x) for n, x in made.gradients.items()}, buffers, {})

        with common_to_ranks(model):
            (left,) = on_ranks(step)
        return left

    def sharded(self, known: Unsharded, on: Overlays, draw: int, on_ranks: OnRanks) -> list[Left]:
        """The step of each rank, with the tensors of the other stages."""
        sizes, first = few_batches(self.sizes), with_half(self.built(draw))
        program = self.in_dtype(self.programs[on])
        case = ScheduledCase(lambda: first, known.batches.inputs, program, sizes, self.scheduled, torch.float32)
        models = [first, *(copy_of(first, known.exact.written) for _ in range(sizes.world_size - 1))]
        casts = self.lower.precision is not None
        axes: Collection[Axis] = [
            axis for axis in AXES if axis is Axis.PP or sizes.of(axis) > 1 or (casts and axis is Axis.DP_SHARD)
        ]
        own = self._own(known.batches)
        with ranks_are_silent(), common_to_ranks(first):
            run = partial(case.step_of_rank, known.batches, axes, own=own, drew=known.exact.drew)
            lefts = on_ranks(lambda rank: run(models[rank], autocast=self.lower.autocast))
        return [
            replace(
                left,
                gradients={name: value for one in (*lefts, left) for name, value in one.gradients.items()},
                buffers={name: value for one in (*lefts, left) for name, value in one.buffers.items()},
            )
            for left in lefts
        ]
