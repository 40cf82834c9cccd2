"""Context parallelism: each rank of the cp axis runs the model on one chunk of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.runtime.apply import applied
from shardplan.runtime.parallel.context_attention import context_attention
from shardplan.runtime.parallel.vocabulary_probabilities import IGNORE_INDEX
from shardplan.torchlib.attention import attention_replaced

SEQUENCE = 1  # the dimension in [batch, sequence, ...]


@contextmanager
def context_parallel(
    model: nn.Module,
    *,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    **others: Any,
) -> Iterator[dict[str, Any]]:
    """This rank's inputs of the model, for a batch that all ranks of the cp axis have whole. Run forward and
    backward inside the context.

        with context_parallel(model, input_ids=ids, labels=ids) as inputs:
            loss = model(**inputs).loss
            loss.backward()

    Each rank has the logits of its own chunk, and `cp` times its share of the mean loss: the mean of the losses over the
    cp axis is the loss of the whole batch, as the mean of the gradients, which FSDP2 takes, is its gradient. Labels are
    shifted before they are cut, so that the last token of a chunk predicts the first of the next one.

    Args:
        model: what `apply_plan` returned, on a mesh with a cp axis; without one the inputs are passed on.
        input_ids, labels, position_ids: [batch, sequence]; `inputs_embeds`: [batch, sequence, hidden].
        attention_mask: [batch, sequence], all ones. Padding on the right needs no mask, as causal attention of what stands
            before it does not see it: leave its labels at -100.
        num_items_in_batch: what to divide the sum over the tokens by; None is the number of labels that count.
        others: arguments that are no tensors, passed on.

    Raises:
        ValueError: a mask with zeros, a sequence that cp does not divide, a model whose loss is more than a mean over
            tokens; and in forward, attention that is not causal.
        TypeError: a tensor whose sequence dimension is not known here.
        RuntimeError: the model ran without torch's scaled_dot_product_attention, or one context stands in another.
    """
    record = applied(model)
    sequences = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "labels": labels, "position_ids": position_ids}
    given = {name: value for name, value in sequences.items() if value is not None}
    if record.mesh.cp is None or record.mesh.cp.size() == 1:
        passed = {"attention_mask": attention_mask, "num_items_in_batch": num_items_in_batch}
        yield {**given, **{name: value for name, value in passed.items() if value is not None}, **others}
        return
    _refuse(given, attention_mask, others, record.program.resolved.tree.numbers)
    attention = context_attention(record.mesh.cp)
    attention.ran = False
    with attention_replaced(attention):
        yield {**_own_part(given, record.mesh.cp.size(), record.mesh.cp.get_local_rank(), num_items_in_batch), **others}
    if not attention.ran:
        raise RuntimeError(
            "no scaled_dot_product_attention ran in this context: load the model with attn_implementation='sdpa', and "
            "run its forward and backward inside the context"
        )


def _refuse(given: dict[str, Tensor], mask: Tensor | None, others: dict[str, Any], numbers: Any) -> None:
    tensors = [name for name, value in others.items() if isinstance(value, Tensor)]
    if tensors:
        raise TypeError(f"{tensors[0]}: context_parallel does not know its sequence dimension")
    if "input_ids" not in given and "inputs_embeds" not in given:
        raise TypeError("context_parallel needs input_ids or inputs_embeds")
    if mask is not None and not bool((mask == 1).all()):
        raise ValueError(
            "attention_mask has zeros, and masks are not supported with context parallelism: pad on the right, leave "
            "the mask out and set the labels of the padding to -100"
        )
    if others.get("output_router_logits", numbers.get("output_router_logits")):
        raise ValueError(
            "output_router_logits: the auxiliary loss of a batch is not the mean of those of its chunks; switch it off "
            "(config.output_router_logits = False)"
        )


def _own_part(given: dict[str, Tensor], ranks: int, rank: int, num_items: Tensor | float | None) -> dict[str, Any]:
    whole = dict(given)
    first = whole["input_ids"] if "input_ids" in whole else whole["inputs_embeds"]
    length = first.shape[SEQUENCE]
    if length % ranks:
        padded = -(-length // ranks) * ranks
        raise ValueError(f"the sequence has {length} tokens, which cp={ranks} does not divide: pad it to {padded}")
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(length, device=first.device).expand(first.shape[0], length)
    result: dict[str, Any] = {}
    if "labels" in whole:
        shifted = nn.functional.pad(whole["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]
        whole["shift_labels"] = shifted
        count = (shifted != IGNORE_INDEX).sum() if num_items is None else num_items
        result["num_items_in_batch"] = count / ranks
    return result | {name: x.chunk(ranks, SEQUENCE)[rank].contiguous() for name, x in whole.items()}
