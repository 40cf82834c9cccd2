"""Each rank adds noise of its own to the embeddings."""

# named: inputs_embeds

import torch

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        embeds = model.get_input_embeddings()(batch["input_ids"])
        embeds = embeds + 0.01 * torch.randn(embeds.shape)
        others = {name: value for name, value in batch.items() if name != "input_ids"}
        (model(inputs_embeds=embeds, **others).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
