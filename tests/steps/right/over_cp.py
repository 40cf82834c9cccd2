"""Each rank of the axis cp has its own tokens of the sequence."""

# on: qwen3 cp=2 tp=2

from shardplan import clip_grad_norm_, context_parallel, micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        with context_parallel(model, **batch) as inputs:
            (model(**inputs).loss * scale).backward()
    clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
