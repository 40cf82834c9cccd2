"""The reduction of gradients is put off in the last micro-batch too."""

# named: gradient

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        model.set_requires_gradient_sync(False)
        (model(**batch).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.set_requires_gradient_sync(True)
