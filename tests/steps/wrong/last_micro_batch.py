"""Backward runs after the loop, for the last micro-batch alone."""

# named: backward reaches 1 of the model's 4 forwards in a step

from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch in batches:
        loss = model(**batch, num_items_in_batch=10).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
