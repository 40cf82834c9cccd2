"""Collectives and ring bytes of a layer at real dimensions: `python -m benchmarks.collectives`.

Models are on the meta device and the process group is torch's fake one: every collective of a forward and a backward is
called, with its real size, and none is carried out. One layer is the difference of two depths. Bytes are those that a rank
sends with ring algorithms: (n - 1)/n of the whole for an all-gather or a reduce-scatter, twice that for an all-reduce
(Patarasuk and Yuan, 2009).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from tests.collective_counter import Collective, CollectiveCounter

from .page import table
from .ways import SHAPES, Way, fake_ranks, llama, planned, stock_sp, stock_tp, trunk

DEPTHS = (1, 2)
TPS = (2, 4, 8)
TOKENS = ((1, 2048), (8, 2048), (2, 8192), (1, 65536))  # batch, sequence
ITEM = 2  # bfloat16
WAYS: dict[str, Way] = {
    "TP": partial(planned, sp=False),
    "SP": partial(planned, sp=True),
    "torch's styles, TP": stock_tp,
    "torch's styles, SP": stock_sp,
}
TEXT = """## Communication of a layer

`python -m benchmarks.collectives`: collectives and ring bytes of a Llama layer on the tp axis in a training step, counted at the
dimensions of 8B, 70B and 405B models, tp 2, 4 and 8, {tokens} (batch x tokens): the least and the most of all {count} cases.
Bytes are in units of the minimum: four reductions of an activation of A bytes, 8 A (n - 1)/n on n ranks, as all-reduces or
as pairs of reduce-scatter and all-gather (Megatron-LM, arXiv 1909.08053 and 2205.05198). With the sequence split the
gradients of a layer's two norms are summed too, which the bytes below have in them. Of every built-in plan [the table of
model types](../reports/model-types.md) says the collectives and their minimum.
"""


def ring_bytes(calls: list[Collective], ranks: int) -> float:
    """What a rank sends. An all-gather's elements are those of one shard."""
    factor = {"all_reduce": 2 * (ranks - 1) / ranks, "reduce_scatter": (ranks - 1) / ranks, "all_gather": ranks - 1.0}
    # Where there is no all-to-all (on CPUs) DTensor gathers and cuts; where there is one a rank sends less.
    return ITEM * sum(call.elements * factor[call.name] for call in calls)


def step(model: nn.Module, batch: int, tokens: int) -> list[Collective]:
    ids = torch.empty(batch, tokens, dtype=torch.long, device="meta")
    positions = torch.empty(1, tokens, dtype=torch.long, device="meta")
    # A mask of four dimensions is taken as it is; for others transformers looks at values.
    mask = torch.empty(batch, 1, tokens, tokens, dtype=torch.bfloat16, device="meta")
    with CollectiveCounter() as counter:
        hidden = trunk(model, input_ids=ids, position_ids=positions, attention_mask=mask)
        local = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        local.sum().backward()
    return counter.calls


def of_a_layer(
    way: Way, tp: int, shape: dict[str, int], sizes: Sequence[tuple[int, int]] = TOKENS
) -> Iterator[tuple[Counter[str], float]]:
    """Collectives of a layer by name, and its ring bytes in units of the minimum, for each (batch, tokens)."""
    with fake_ranks(tp) as mesh:
        with torch.device("meta"):
            models = [way(llama(depth, **shape), mesh).to(torch.bfloat16) for depth in DEPTHS]
        for batch, tokens in sizes:
            few, many = (step(model, batch, tokens) for model in models)
            counts = Counter(call.name for call in many)
            counts.subtract(call.name for call in few)
            least = 8 * batch * tokens * shape["hidden_size"] * ITEM * (tp - 1) / tp
            yield +counts, (ring_bytes(many, tp) - ring_bytes(few, tp)) / least


def rows() -> Iterator[tuple[str, str, str, str]]:
    for name, way in WAYS.items():
        ours = name in ("TP", "SP")
        found, fail = [], 0
        for shape, tp in tqdm(list(product(SHAPES.values(), TPS)), desc=name, file=sys.stderr, leave=False):
            for sizes in [TOKENS] if ours else [[size] for size in TOKENS]:
                try:
                    found += of_a_layer(way, tp, shape, sizes)
                except RuntimeError as error:
                    if ours or "redistribute" not in str(error):
                        raise
                    fail += 1
        ratios = [ratio for _, ratio in found]
        counts = [", ".join(f"{counter[op]} {op.replace('_', '-')}" for op in sorted(counter)) for counter, _ in found]
        fewest, most = (choose(found, key=lambda one: one[0].total())[0].total() for choose in (min, max))
        said = counts[0] if len(set(counts)) == 1 else f"{fewest} to {most}"
        said += f"; {fail} cases fail inside DTensor" if fail else ""
        yield name, "1.00" if ours else "", f"{min(ratios):.4f} to {max(ratios):.4f}", said


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    sizes = ", ".join(f"{batch} x {tokens:,}" for batch, tokens in TOKENS)
    print(TEXT.format(tokens=sizes, count=len(SHAPES) * len(TPS) * len(TOKENS)))
    print(table(("plan", "goal", "ring bytes, of the minimum", "collectives"), rows()))


if __name__ == "__main__":
    main()
