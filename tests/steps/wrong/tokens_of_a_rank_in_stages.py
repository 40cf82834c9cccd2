"""Each data-parallel rank divides the sum of its pipeline by the tokens of its own."""

# on: qwen3 pp=2 dp_shard=2
# named: the mean of what each data-parallel rank has

import torch.nn.functional as F

from tests.steps.usual import make as make


def loss_fn(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def step(pipeline, batches, optimizer):
    tokens = max(1, sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches))
    for number, batch in enumerate(batches):
        pipeline.step(**batch, tokens=tokens, calls=len(batches), accumulate=number < len(batches) - 1)
    optimizer.step()
    pipeline.zero_grad()
