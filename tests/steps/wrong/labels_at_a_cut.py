"""Labels are shifted in each rank's part of the sequence: the last token of a part has no target."""

# on: qwen3 cp=2 tp=2
# named: off after backward

import torch.nn.functional as F

from shardplan import applied, context_parallel, micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    cp = applied(model).mesh.sizes.cp
    for batch, scale in micro_batches(model, batches, loss="sum", labels=lambda batch: batch["labels"][:, 1:]):
        with context_parallel(model, input_ids=batch["input_ids"]) as inputs:
            logits = model(**inputs).logits[:, :-1].flatten(0, 1)
            rank = applied(model).mesh.cp.get_local_rank() if cp > 1 else 0
            labels = batch["labels"].chunk(cp, 1)[rank][:, 1:]
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            (loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
