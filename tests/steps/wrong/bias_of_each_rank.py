"""The bias that balances experts (DeepSeek-V3) follows the tokens of each rank's own micro-batches."""

# on: glm4_moe dp_shard=2
# named: the buffer model.layers.\d.mlp.gate.e_score_correction_bias

import torch

from shardplan import micro_batches


def make(model):
    counts = {}

    def counted(name, module):
        def hook(_, args, output):
            if torch.is_grad_enabled():
                chosen = args[1].flatten().bincount(minlength=counts[name].numel())
                counts[name] += chosen

        return hook

    routers = {n: m for n, m in model.named_modules() if hasattr(m, "e_score_correction_bias")}
    for name, router in routers.items():
        counts[name] = torch.zeros(router.e_score_correction_bias.numel())
        experts = model.get_submodule(name.rpartition(".")[0] + ".experts")
        experts.register_forward_hook(counted(name, experts))
    return torch.optim.AdamW(model.parameters(), lr=1e-2), routers, counts


def step(model, batches, state):
    optimizer, routers, counts = state
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, router in routers.items():
            router.e_score_correction_bias += 1e-3 * (counts[name].mean() - counts[name]).sign()
            counts[name].zero_()
