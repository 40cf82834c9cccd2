"""A loss of one's own in a pipeline with tp: label smoothing, and a penalty of the logits."""

# on: qwen3 pp=2 tp=2

import torch.nn.functional as F

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def loss_fn(logits, labels):
    logits, labels = logits[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)
    return loss + 1e-3 * (logits.logsumexp(-1) ** 2 * (labels != -100)).sum()


def step(pipeline, batches, optimizer):
    total = 0.0
    for batch, _ in micro_batches(pipeline, batches, labels=lambda batch: batch["labels"][:, 1:]):
        total += pipeline.step(**batch)
    clip_grad_norm_(pipeline, 0.1)
    optimizer.step()
    pipeline.zero_grad()
    return total
