"""Gradients of experts are divided by ep, which the plan has done."""

# on: qwen3_moe dp_shard=2 ep=2
# named: experts.gate_up_proj is right after backward, and at the optimizer's step 0.5.* times

import torch.distributed as dist

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    for name, parameter in model.named_parameters():
        if ".experts." in name and dist.get_world_size() > 1:
            parameter.grad /= 2
    clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
