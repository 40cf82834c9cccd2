"""Evaluation: the forwards of a batch through all stages, without the schedule."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .hand_over import Ahead, Handing, Sent, sending
from .micro_batch_inputs import Inputs


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
