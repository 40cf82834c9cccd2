"""Evaluation: the forwards of a batch through all stages, whatever the schedule."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .hand_over import Handing
from .micro_batch_inputs import Inputs

Sent = tuple[Tensor, ...]


def forward_only(
    parts: Mapping[int, nn.Module],
    owners: Mapping[int, int],
    inputs: Inputs,
    micro_batches: int,
    handing: Handing,
    group: ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """Run a stage of this rank after the other, each on all micro-batches. Returns the losses where the last stage is.

    Args:
        parts: the stages of this rank, by number.
        owners: stage -> its rank on the pp axis.
    """
    batches = inputs.split(micro_batches)
    waiting: list[dist.Work] = []
    losses: list[Tensor] = []
    kept: list[Tensor] = []  # until it is sent
    for stage, part in parts.items():
        for batch in batches:
            received: Sent = ()
            if stage:
                received = tuple(torch.empty(one.shape, dtype=one.dtype, device=device) for one in handing[stage - 1])
                for x in received:
                    dist.recv(x, group=group, group_src=owners[stage - 1])
            sent = part(*received, **batch)
            if stage + 1 not in owners:
                losses.append(sent)
            else:
                kept += sent
                waiting += [_sending(x, group, owners[stage + 1]) for x in sent]
    for work in waiting:
        work.wait()
    return losses


def _sending(x: Tensor, group: ProcessGroup, peer: int) -> dist.Work:
    work = dist.isend(x, group=group, group_dst=peer)
    assert work is not None  # this rank is in the group
    return work
