"""The balance of the experts is the mean over micro-batches of what the model gives for each."""

# on: qwen3_moe dp_shard=2 tp=2

import torch

from shardplan import micro_batches


def make(model):
    return torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        output = model(**batch, output_router_logits=True)
        ((output.loss + 0.01 * output.aux_loss) * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
