"""A term of the parameters is added to the loss."""

# named: got mixed torch.Tensor and DTensor

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        term = sum(p.pow(2).sum() for p in model.parameters())
        (model(**batch).loss * scale + 0.01 / len(batches) * term).backward()
    optimizer.step()
    optimizer.zero_grad()
