"""Runs the schedule with torch.distributed.pipelining; in evaluation, the forwards alone, without a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from shardplan.core.schedules import Schedule

from .hand_over import Ahead, Handed, Handing, Sent, sending
from .micro_batch_inputs import Inputs
from .step_loss import loss_dtype


class _Stage(PipelineStage):
    """A stage whose first micro-batch may already have run. Schedules run the forwards of a stage in order."""

    ahead: Ahead | None = None

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        if self.ahead is None:
            return super().forward_maybe_with_nosync(*args, **kwargs)
        ahead, self.ahead = self.ahead, None
        return ahead.taken(args)


class Engine:
    """A schedule for steps with given shapes of hand-overs.

    Args:
        parts: stage -> its callable, for the stages of this rank.
        stages: the number of all stages.
        handing: what each stage except the last sends.
    """

    def __init__(
        self,
        schedule: Schedule,
        parts: Mapping[int, nn.Module],
        stages: int,
        micro_batches: int,
        handing: Handing,
        group: ProcessGroup,
        device: torch.device,
    ):
        self.micro_batches, self.has_last = micro_batches, stages - 1 in parts
        received = handing[-1] if handing else ()
        loss = Handed((), loss_dtype(one.dtype for one in received), True)  # torch 2.11 compares it
        self.made = {
            stage: _Stage(
                part,
                stage,
                stages,
                device,
                input_args=tuple(one.example() for one in handing[stage - 1]) if stage else (),
                output_args=tuple(one.example() for one in (handing[stage] if stage < stages - 1 else (loss,))),
                group=group,
            )
            for stage, part in parts.items()
        }
        made = [*self.made.values()]
        cls: Any = get_schedule_class(schedule.torch_class)
        self.schedule = cls(
            made if schedule.multiple else made[0],
            n_microbatches=micro_batches,
            loss_fn=lambda output, target: output,  # the last stage has computed the loss
            scale_grads=False,
        )

    def run(self, inputs: Inputs, ahead: Mapping[int, Ahead]) -> list[Tensor]:
        """Forward and backward of all micro-batches. Returns the losses on the ranks of the last stage.

        Args:
            ahead: stage -> the forward of the first micro-batch, if it has run.
        """
        for stage, one in self.made.items():
            one.ahead = ahead.get(stage)
        losses: list[Tensor] = []
        # torch needs a target for each micro-batch on the ranks of the last stage.
        target = torch.zeros(self.micro_batches) if self.has_last else None
        own: dict[str, Any] = {"target": target, "losses": losses} if self.has_last else {}
        self.schedule.step(**inputs.tensors, **own, return_outputs=False)
        return losses


def forward_only(
    parts: Mapping[int, nn.Module],
    owners: Mapping[int, int],
    inputs: Inputs,
    micro_batches: int,
    handing: Handing,
    ahead: Mapping[int, Ahead],
    group: ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """Run this rank's stages one after the other, each on all micro-batches. Returns the losses on the ranks of the last stage.

    Args:
        parts: the stages of this rank, by number.
        owners: stage -> its rank on the pp axis.
        ahead: stage -> the forward of the first micro-batch, if it has run.
    """
    batches = inputs.split(micro_batches)
    waiting: list[dist.Work] = []
    losses: list[Tensor] = []
    kept: list[Tensor] = []  # until they are sent
    for stage, part in parts.items():
        for i, batch in enumerate(batches):
            received: Sent = ()
            if stage:
                received = tuple(torch.empty(one.shape, dtype=one.dtype, device=device) for one in handing[stage - 1])
                for x in received:
                    dist.recv(x, group=group, group_src=owners[stage - 1])
            sent = ahead[stage].taken(received) if i == 0 and stage in ahead else part(*received, **batch)
            if stage + 1 not in owners:
                losses.append(sent)
            else:
                kept += sent
                waiting += [sending(x, group, owners[stage + 1]) for x in sent]
    for work in waiting:
        work.wait()
    return losses
