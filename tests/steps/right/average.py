"""An average of the parameters keeps DTensors, also of matrices whose rows are packed, and is evaluated."""

# on: phi3 dp_shard=2 tp=2

from types import SimpleNamespace

import torch
import torch.distributed as dist

from shardplan import applied, micro_batches


def make(model):
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return SimpleNamespace(optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), average=average)


@torch.no_grad()
def exchange(model, average):
    applied(model).reshard()  # a forward without a backward leaves parameters of FSDP2 gathered
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        parameter.copy_(average[name])
        average[name] = kept


@torch.no_grad()
def evaluate(model, batches):
    total = torch.zeros(())
    for batch, scale in micro_batches(model, batches):
        total += model(**batch).loss * scale
    dist.all_reduce(total)
    return total / dist.get_world_size()


def step(model, batches, state):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            state.average[name].lerp_(parameter, 0.1)
    exchange(model, state.average)
    loss = evaluate(model, batches)
    exchange(model, state.average)
    return loss
