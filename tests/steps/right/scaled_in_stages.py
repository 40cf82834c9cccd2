"""float16 with a scaler in a pipeline: the loss is scaled where it is made, and stages agree on whether a step is skipped."""

# on: qwen3 pp=2 dp_shard=2

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardplan import applied, clip_grad_norm_

SCALER = torch.amp.GradScaler("cpu", init_scale=512.0)


def loss_fn(logits, labels):
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")
    return loss * SCALER.get_scale()


def make(pipeline):
    return SimpleNamespace(optimizer=torch.optim.AdamW(pipeline.parameters(), lr=1e-2))


def step(pipeline, batches, state):
    tokens = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in batches]).sum()
    dist.all_reduce(tokens)
    tokens = int(tokens) // applied(pipeline).mesh.sizes.pp
    SCALER.scale(torch.ones(()))  # makes its factor
    factor = SCALER.get_scale()
    total = 0.0
    for number, batch in enumerate(batches):
        total += (
            pipeline.step(**batch, tokens=tokens, calls=len(batches), accumulate=number < len(batches) - 1) / factor
        )
    for parameter in pipeline.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(factor)
    finite = torch.tensor(
        float(all(bool(p.grad.isfinite().all()) for p in pipeline.parameters() if p.grad is not None))
    )
    dist.all_reduce(finite, dist.ReduceOp.MIN)
    clip_grad_norm_(pipeline, 0.1)
    if finite:
        state.optimizer.step()
    state.optimizer.zero_grad()
    return total
