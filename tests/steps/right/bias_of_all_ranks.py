"""The bias that balances experts follows the tokens of all ranks."""

# on: deepseek_v3 dp_shard=2 ep=2

import torch

from shardplan import count_expert_tokens, micro_batches, update_expert_bias


def make(model):
    count_expert_tokens(model)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    optimizer.step()
    update_expert_bias(model, 1e-3)
    optimizer.zero_grad()
