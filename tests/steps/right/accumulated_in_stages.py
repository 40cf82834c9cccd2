"""Stages of a pipeline with tp: the counts are the script's own."""

# on: qwen3 pp=2 tp=2

from shardplan import clip_grad_norm_
from tests.steps.usual import make as make


def step(pipeline, batches, optimizer):
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    losses = [
        pipeline.step(**batch, tokens=tokens, calls=len(batches), accumulate=number < len(batches) - 1)
        for number, batch in enumerate(batches)
    ]
    clip_grad_norm_(pipeline, 0.1)
    optimizer.step()
    pipeline.zero_grad()
    return sum(losses)
