"""NEFTune: noise on the embeddings, which each tp rank draws for itself."""

# named: off rank 0's after

import torch

from shardplan import micro_batches


def noisy(module, args, output):
    size = (output.shape[1] * output.shape[2]) ** 0.5
    return output + torch.empty_like(output).uniform_(-1, 1) * 5 / size


def make(model):
    model.get_input_embeddings().register_forward_hook(noisy)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
