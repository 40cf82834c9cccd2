"""The sum is divided by the labels of this rank's micro-batches: gradients are averaged over ranks as if all had as many."""

# named: they are the mean of what each data-parallel rank has

from tests.steps.usual import make as make


def step(model, batches, optimizer):
    count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches).clamp(min=1)
    for batch in batches:
        model(**batch, num_items_in_batch=count).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
