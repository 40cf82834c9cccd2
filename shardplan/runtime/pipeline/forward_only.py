"""Evaluation: the forwards of a batch through all stages, whatever the schedule. (torch's `eval` runs the schedule's actions without
their backwards, which those with two neighbouring stages on one rank cannot do in torch 2.13.)"""

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
    rank, batches = dist.get_rank(group), inputs.split(micro_batches)
    here: dict[int, list[Sent]] = {}  # stage -> what it hands to the next one, which is on this rank too
    waiting: list[dist.Work] = []
    losses: list[Tensor] = []
    kept: list[Tensor] = []  # until it is sent
    for stage, part in parts.items():
        results: list[Sent] = []
        for i, batch in enumerate(batches):
            received: Sent = ()
            if stage and owners[stage - 1] == rank:
                received = here[stage - 1][i]
            elif stage:
                received = tuple(torch.empty(one.shape, dtype=one.dtype, device=device) for one in handing[stage - 1])
                for x in received:
                    dist.recv(x, group=group, group_src=owners[stage - 1])
            sent = part(*received, **batch)
            if stage + 1 not in owners:
                losses.append(sent)
            elif owners[stage + 1] == rank:
                results.append(sent)
            else:
                kept += sent
                waiting += [_sending(x, group, owners[stage + 1]) for x in sent]
        here = {stage: results}
    for work in waiting:
        work.wait()
    return losses


def _sending(x: Tensor, group: ProcessGroup, peer: int) -> dist.Work:
    work = dist.isend(x, group=group, group_dst=peer)
    assert work is not None  # this rank is in the group
    return work
