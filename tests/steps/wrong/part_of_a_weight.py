"""The head's weight is read whole, but not for its gradient."""

# named: lm_head.weight has no gradient

import torch

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, loss="sum", labels=lambda batch: batch["labels"][:, 1:]):
        hidden = model.model(batch["input_ids"]).last_hidden_state
        weight = model.lm_head.weight
        weight = weight.full_tensor().detach() if hasattr(weight, "full_tensor") else weight
        logits = (hidden @ weight.T)[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
        (loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
