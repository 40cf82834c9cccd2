"""Context parallelism: each rank of the cp axis runs the model on one chunk of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING

from shardplan.core.context_facts import ContextFacts, Plain
from shardplan.model.adapters import unwrapped
from shardplan.model.model_findings import reason
from shardplan.model.sequence_chunks import SEQUENCE, check_length, own_chunk_of, own_labels_of
from shardplan.runtime.apply import Applied, applied
from shardplan.runtime.apply.label_counts import undivided
from shardplan.runtime.parallel.context_attention import context_attention
from shardplan.runtime.parallel.vocabulary_logits import IGNORE_INDEX
from shardplan.runtime.parallel.vocabulary_loss import loss_of_model
from shardplan.runtime.parallel.vocabulary_probabilities import OWN_TOKENS
from shardplan.styles.boundary import returns_tokens
from shardplan.torchlib.attention import attention_replaced
from shardplan.torchlib.equality import TOLERANCE, relative_error

from .position_tables import differing_table

# What takes whole batches as they are.
SECTION = "apply a plan with a section `context_parallel` (`shardplan init --context-parallel` writes one), whose models have whole batches"


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

    What a chunk would silently get wrong is refused here, on every rank alike, before anything is sent: each looks at the whole batch.

    Args:
        model: what `apply_plan` returned, on a mesh with a cp axis. Without one the inputs are passed on. With a plan that has a section
            `context_parallel` they are too, as such a model is called with the whole batch, and nothing below is refused; where the
            section leaves each rank its own tokens, labels are shifted and cut here, and counted.
        input_ids, labels: [batch, sequence]; `inputs_embeds`: [batch, sequence, hidden].
        position_ids: [batch, sequence], in each row one more from token to token: where they begin again, a document does.
        attention_mask: [batch, sequence], all ones. Padding on the right needs no mask, as causal attention of what stands
            before it does not see it: leave its labels at -100.
        num_items_in_batch: what to divide the sum over the tokens by; None is the number of labels that count.
        others: arguments that are numbers, texts or None, passed on.

    Raises:
        ValueError: a mask with zeros, or of another shape; positions that begin again or leave some out; a sequence that cp does not
            divide; a length at which a rotary embedding has other tables for a chunk; labels, and a model whose loss is more than a mean
            over next tokens; and in forward, attention that is not causal.
        TypeError: an argument whose sequence dimension is not known here.
        RuntimeError: the model ran without torch's scaled_dot_product_attention, or one context stands in another.
    """
    record = applied(model)
    sequences = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "labels": labels, "position_ids": position_ids}
    given = {name: value for name, value in sequences.items() if value is not None}
    resolved, cp = record.program.resolved, record.mesh.cp
    if cp is None or cp.size() == 1 or resolved.context_parallel:
        passed: dict[str, Any] = {
            **given,
            **({} if attention_mask is None else {"attention_mask": attention_mask}),
            **({} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}),
            **others,
        }
        if cp is None or not returns_tokens(resolved.on_cp):
            yield passed
            return
        if labels is not None:
            check_length(labels.shape[SEQUENCE], cp.size())
            _refuse_loss(record, None, labels.device)
            passed |= own_labels_of(labels, cp.size(), cp.get_local_rank(), num_items_in_batch)
        token = OWN_TOKENS.set(True)
        try:
            yield passed
        finally:
            OWN_TOKENS.reset(token)
        return
    _refuse(given, attention_mask, others, record)
    with chunk_of(record, given, num_items_in_batch) as own:
        yield {**own, **others}


@contextmanager
def chunk_of(
    record: Applied, given: Mapping[str, Tensor], num_items: Tensor | float | None = None
) -> Iterator[dict[str, Any]]:
    """`context_parallel` on a mesh with several cp ranks, for inputs that were looked at.

    Raises:
        RuntimeError: as there.
    """
    mesh = record.mesh.cp
    assert mesh is not None
    attention = context_attention(mesh)
    attention.ran = False
    with attention_replaced(attention):
        yield own_chunk_of(given, mesh.size(), mesh.get_local_rank(), num_items)
    if not attention.ran:
        raise RuntimeError(
            "no scaled_dot_product_attention ran in this context: load the model with attn_implementation='sdpa', and "
            "run its forward and backward inside the context"
        )


def _refuse(given: dict[str, Tensor], mask: Any, others: dict[str, Any], record: Applied) -> None:
    ranks, numbers = record.mesh.sizes.cp, record.program.resolved.tree.numbers
    facts = record.program.resolved.context
    assert facts is not None, "a program for several cp ranks"
    for name, value in others.items():
        if not isinstance(value, Plain):
            raise TypeError(f"{name}: context_parallel does not know its sequence dimension")
    if "input_ids" not in given and "inputs_embeds" not in given:
        raise TypeError("context_parallel needs input_ids or inputs_embeds")
    shape = next(iter(given.values())).shape[:2]
    for name, shapes in (("labels", (shape,)), ("position_ids", (shape, (1, shape[1])))):
        if name in given and given[name].shape not in shapes:
            raise ValueError(f"{name} must be [batch, sequence], {list(shape)}, and is {list(given[name].shape)}")
    if mask is not None:
        _refuse_mask(mask, shape)
    if others.get("output_router_logits", numbers.get("output_router_logits")):
        raise ValueError(
            "output_router_logits: the auxiliary loss of a batch is not the mean of those of its chunks; switch it off "
            f"(config.output_router_logits = False), or {SECTION}"
        )
    if others.get("logits_to_keep"):
        raise ValueError(
            "logits_to_keep: each rank has the logits of its own chunk, not the last ones of the sequence; leave it out"
        )
    check_length(shape[1], ranks)
    if "labels" in given:
        _refuse_loss(record, facts.loss, given["labels"].device)
    _refuse_positions(record.model, facts, given, ranks)


def _refuse_mask(mask: Any, shape: torch.Size) -> None:
    if not isinstance(mask, Tensor) or mask.shape != shape:
        what = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be [batch, sequence], {list(shape)}, all ones, and is {what}: a chunk has no other masks; "
            f"leave it out, or {SECTION}"
        )
    if not bool((mask == 1).all()):
        raise ValueError(
            "attention_mask has zeros, and a chunk has no masks: pad on the right, leave the mask out and set the labels of the padding to "
            f"-100, or {SECTION}"
        )


def _refuse_positions(model: nn.Module, facts: ContextFacts, given: dict[str, Tensor], ranks: int) -> None:
    positions = given.get("position_ids")
    if positions is None:
        first = next(iter(given.values()))
        positions = torch.arange(first.shape[SEQUENCE], device=first.device)[None]
    elif bool((breaks := positions.diff(dim=SEQUENCE) != 1).any()):
        row, token = breaks.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids begin anew or leave positions out at token {token + 1} of row {row}: a chunk does not see that another document "
            "begins there. Give each document a row of its own, padded on the right, and leave position_ids out, or "
            f"{SECTION}"
        )
    else:
        positions = positions.unique(dim=0)
    if (found := differing_table(model, facts.tables, positions, ranks)) is not None:
        name, chunk = found
        length = positions.shape[SEQUENCE]
        raise ValueError(
            f"{name} makes other tables for chunk {chunk} of {ranks} than for the whole sequence of {length} tokens, as it reads the "
            f"largest position: shorten the sequence, use a mesh without a cp axis, or {SECTION}"
        )


def _refuse_loss(record: Applied, why: str | None, device: torch.device) -> None:
    function = undivided(getattr(unwrapped(record.model), "loss_function", None))
    if why is None and function is not None and function is not loss_of_model and function not in LOSS_MAPPING.values():
        why = _apart(function, device)
    if why is not None:
        raise ValueError(
            f"labels: {why}: leave labels out, and compute the loss from each chunk's logits with `causal_lm_loss(logits, None, "
            "shift_labels=..., num_items_in_batch=...)`"
        )


def _apart(function: Callable[..., Tensor], device: torch.device) -> str | None:
    """Why a loss function that replaces the model's own is no mean over next tokens: found by calling it on a few numbers."""
    labels = torch.tensor([[1, 2, 3, 4, 0, IGNORE_INDEX, IGNORE_INDEX, 1]], device=device)
    logits = torch.arange(8.0 * 5, device=device).sin().view(1, 8, 5)
    try:
        parts = []
        for rank, own_logits in enumerate(logits.chunk(2, SEQUENCE)):
            own = own_chunk_of({"labels": labels}, 2, rank)
            del own["position_ids"]
            parts.append(function(own_logits, own.pop("labels"), 5, **own))
        error = relative_error(torch.stack(parts).mean(), function(logits, labels, 5))
    except Exception as raised:  # whatever the user's code raises
        return f"the model's loss_function was replaced, and cannot be called with a chunk's labels ({reason(raised)})"
    if error <= TOLERANCE[torch.float32]:
        return None
    return "the model's loss_function was replaced by one that is no mean over next tokens with shift_labels and num_items_in_batch"
