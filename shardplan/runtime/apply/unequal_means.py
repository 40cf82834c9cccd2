"""Whether a loss is a mean over each rank's own labels although data-parallel ranks have unequal numbers of labels."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .label_counts import predicts_next_token, tokens_of, undivided
from .same_inputs import in_a_graph, is_compared
from .watched import Watched

TEXT = (
    "the loss is the mean over a rank's own labels, and data-parallel ranks have unequal numbers of them, from {least} to {most} in this "
    "forward: their average is not the mean over all tokens. Write\n"
    "    for batch, scale in shardplan.micro_batches(model, batches):  # those of one optimizer step\n"
    "        (model(**batch).loss * scale).backward()"
)


def warn_of_unequal_means(watched: Watched) -> None:
    """Warn once where a model's gradients are averages of means over unequal numbers of labels: `TEXT`.

    It looks at the training forwards chosen by `is_compared`, until ranks have unequal numbers. When such a forward's loss is
    differentiated, ranks compare their numbers of labels and their loss's gradients, in an all-reduce of four numbers for each
    data-parallel axis. It does not warn for a loop that does not differentiate the model's loss, weighs it by the labels, or passes
    `num_items_in_batch`.
    """
    groups, model = watched.mesh.batch_groups, watched.inner
    if not groups:
        return
    count = 0

    def compare(gradient: Tensor, labels: float) -> None:
        numbers = torch.tensor([labels, -labels], dtype=torch.float64, device=gradient.device)
        numbers = torch.cat([numbers, torch.stack([gradient, -gradient]).double()])
        for group in groups:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
        most, least, high, low = numbers.tolist()
        if most == -least:
            return
        handle.remove()
        if -least >= 0 and abs(high + low) <= 1e-6 * abs(high):
            warnings.warn(TEXT.format(least=int(-least), most=int(most)), stacklevel=1)

    def after(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        nonlocal count
        labels = kwargs.get("labels")
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if not isinstance(labels, Tensor) or type(loss) is not Tensor or loss.ndim or not loss.requires_grad:
            return
        if in_a_graph({"loss": loss}) or not module.training:
            return
        function = getattr(model, "loss_function", None)
        if undivided(function) is not function:  # in the loop of `micro_batches`, on all ranks
            return
        count += 1
        if not is_compared(count):
            return
        divided = kwargs.get("num_items_in_batch") is not None
        labelled = -1 if divided else int(tokens_of(labels, shifted=predicts_next_token(model)))
        loss.register_hook(lambda gradient: compare(gradient, labelled))

    handle = watched.outer.register_forward_hook(after, with_kwargs=True)
