"""The loss that is returned is this rank's share."""

# named: the step returns

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    total = 0.0
    for batch, scale in micro_batches(model, batches):
        loss = model(**batch).loss * scale
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total
