"""The balance of the experts is added up over all ranks, those of tp too."""

# on: qwen3_moe dp_shard=2 tp=2
# named: off after backward

from torch.distributed.nn.functional import all_reduce

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        output = model(**batch, output_router_logits=True)
        balance = sum(logits.softmax(-1).square().mean() for logits in output.router_logits)
        ((output.loss + 0.1 * all_reduce(balance)) * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
