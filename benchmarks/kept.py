"""What the forward of a layer keeps for its backward: `python -m benchmarks.kept`.

On the meta device, at real dimensions: the storages that the forward made and that are there when it is over. One layer is the
difference of two depths.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from .collectives import DEPTHS, ITEM
from .page import table
from .ways import SHAPES, Way, fake_ranks, llama, planned, stock_sp, stock_tp, trunk

TP, BATCH, TOKENS = 8, 1, 8192
WAYS: dict[str, Way] = {
    "TP": partial(planned, sp=False),
    "SP": partial(planned, sp=True),
    "SP, regather": partial(planned, sp=True, regather=True),
    "torch's styles, TP": stock_tp,
    "torch's styles, SP": stock_sp,
}
TEXT = """## What a layer keeps for its backward

`python -m benchmarks.kept`: a Llama layer of the 8B model's dimensions, tp {tp}, {batch} x {tokens:,} tokens, bfloat16, without
activation checkpointing, its attention with a fused kernel; in units of an activation, A = batch x tokens x hidden x 2 bytes ({mib:.0f} MiB).
"""


class Made(TorchDispatchMode):
    """Notes the storages that operators make. A DTensor's are those of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(one, torch.distributed.tensor.DTensor) for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                reference = StorageWeakRef(storage)
                self.storages[reference.cdata] = (reference, storage.nbytes())
        return result

    def kept(self) -> int:
        return sum(size for reference, size in self.storages.values() if not reference.expired())


class Attention(torch.autograd.Function):
    """Keeps what a fused kernel keeps (FlashAttention, arXiv 2205.14135): queries, keys, values and the result, and the
    softmax's sums, a number for each head and token."""

    @staticmethod
    def forward(ctx, query, key, value):
        result = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return result


def attention(module, query, key, value, mask, **kwargs):
    return Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


def kept(model: nn.Module) -> int:
    AttentionInterface.register("fused", attention)
    model.config._attn_implementation = "fused"
    ids = torch.empty(BATCH, TOKENS, dtype=torch.long, device="meta")
    positions = torch.empty(1, TOKENS, dtype=torch.long, device="meta")
    mask = torch.empty(BATCH, 1, TOKENS, TOKENS, dtype=torch.bfloat16, device="meta")  # not looked at
    with Made() as made:
        hidden = trunk(model, input_ids=ids, position_ids=positions, attention_mask=mask)
    assert hidden.requires_grad
    return made.kept()


def rows() -> Iterator[tuple[str, str]]:
    for name, way in WAYS.items():
        with fake_ranks(TP) as mesh, torch.device("meta"):
            few, many = (kept(way(llama(depth, **SHAPES["8B"]), mesh).to(torch.bfloat16)) for depth in DEPTHS)
        yield name, f"{(many - few) / unit():.2f} A"


def unit() -> int:
    return BATCH * TOKENS * SHAPES["8B"]["hidden_size"] * ITEM


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(TEXT.format(tp=TP, batch=BATCH, tokens=TOKENS, mib=unit() / 2**20))
    print(table(("plan", "kept"), rows()))


if __name__ == "__main__":
    main()
