"""The micro-batches of one optimizer step: the loss is one mean over the tokens of all of them, on all data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from shardplan.core.by_key import by_key
from shardplan.model.adapters import unwrapped
from shardplan.runtime.apply import Applied, applied
from shardplan.runtime.apply.label_counts import predicts_next_token, tokens_of
from shardplan.runtime.apply.model_parts import Parted
from shardplan.runtime.apply.plan_mesh import PlanMesh
from shardplan.runtime.parallel.process_groups import named_ranks
from shardplan.runtime.pipeline import Pipeline
from shardplan.runtime.pipeline.step_loss import StepLoss, divided_by_step
from shardplan.styles.boundary import returns_tokens

_T = TypeVar("_T")
Loss: TypeAlias = Literal["model", "sum", "mean"]
Labels: TypeAlias = str | Callable[[Any], Tensor | int]


class _Current:
    """The step whose micro-batches run, and the model's loss function divided by its count.

    Attributes:
        own: the model's loss function.
        divided: replaces it during the step.
    """

    def __init__(self, model: PreTrainedModel):
        self.step: StepLoss | None = None
        self.own = model.loss_function
        self.divided = divided_by_step(self.own, lambda: self.step, shifted=True)


_CURRENT: WeakKeyDictionary[nn.Module, _Current] = WeakKeyDictionary()


def micro_batches(
    model: nn.Module | Pipeline,
    batches: Iterable[_T],
    *,
    labels: Labels = "labels",
    loss: Loss = "model",
    defer: bool = True,
) -> Iterator[tuple[_T, float]]:
    """The micro-batches of one optimizer step, each with the factor for its loss. Call it on all ranks, with the same number
    of micro-batches on each.

        for batch, scale in micro_batches(model, batches):
            (model(**batch).loss * scale).backward()

    The gradients are those of the mean over all tokens of the step: of every micro-batch, on every data-parallel rank, however the
    tokens are distributed. They are reduced over data-parallel ranks once, at the last micro-batch; sums over tp happen in each
    backward. The sum of the scaled losses, averaged over the data-parallel ranks, is the loss of the step. One all-reduce for each
    data-parallel axis counts the tokens, and the process waits for it. However the loop ends, the model is unchanged afterwards. A step
    without any label has the loss 0.

    Args:
        model: what `apply_plan` returned. With a Pipeline the body is `pipeline.step(**batch)`: the batch then also has the arguments
            `accumulate`, `tokens` and `calls`.
        batches: those of one step on this rank.
        labels: what counts in a batch: a name in it; or a function of it that returns labels (-100 does not count), a tensor of bool, or
            the count itself. With the model's own loss of next tokens, the first label of each row does not count either, except with a
            Pipeline and a function.
        loss: "model": the one that a transformers model computes with its `loss_function`, which then divides its sum by the count of the
            step (`num_items_in_batch`); additions of the model (a router's loss) are averaged over micro-batches. For a loss of your own:
            "sum" or "mean" over what counts in a micro-batch.
        defer: False reduces the gradients of each micro-batch, so FSDP2 keeps them sharded.

    Raises:
        ValueError: no plan was applied to the model; ranks have unequal numbers of micro-batches; "model" for a model whose loss is not
            one of next tokens; "mean" if nothing counts in a micro-batch, or ranks of cp have their own tokens; a batch without labels.
        TypeError: `labels` is a name and a batch is no mapping; labels that are neither integers nor bool.
        RuntimeError: with "model", its `loss_function` did not run for a micro-batch.
    """
    if loss not in ("model", "sum", "mean"):
        raise ValueError(f"loss must be 'model', 'sum' or 'mean', not {loss!r}")
    record = applied(model)
    if isinstance(model, Parted):
        if loss != "model":
            raise ValueError(
                "a pipeline computes the loss in its step: leave `loss` out. PipelineOptions(loss_fn=...) gives it one of your own, a sum"
            )
        return cast("Iterator[tuple[_T, float]]", _of_pipeline(model, list(batches), labels))
    inner = cast(Applied, record).model
    inner = unwrapped(inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else inner)
    if loss == "model" and not predicts_next_token(inner):
        raise ValueError(
            f"{type(inner).__name__} does not return a mean loss over next tokens, which a step could divide by their count: pass "
            "`labels`, and loss='sum' or loss='mean', whichever the loop's loss of a micro-batch is"
        )
    if loss == "mean" and record.mesh.sizes.cp > 1 and not _has_all_tokens(cast(Applied, record)):
        raise ValueError(
            "a rank of the cp axis has its own tokens of the sequence, so it has no mean over all: compute the sum, and pass loss='sum'"
        )
    return _of_model(cast(Applied, record), inner, list(batches), labels, loss, defer=defer)


def _of_model(
    record: Applied, inner: nn.Module, batches: Sequence[_T], labels: Labels, loss: Loss, *, defer: bool
) -> Iterator[tuple[_T, float]]:
    own, tokens, empty = _counts(batches, labels, record.mesh, shifted=loss == "model")
    if empty and loss == "mean":
        raise ValueError(
            f"no token counts in {empty} of the step's micro-batches, so they have no mean: compute the sum, and pass loss='sum'"
        )
    ranks = record.mesh.data_parallel_ranks
    if _has_all_tokens(record):  # all ranks of cp have the loss of the whole batch
        ranks //= record.mesh.sizes.cp
    step = StepLoss(tokens, len(batches), ranks, None, counts_labels=labels == "labels")
    with _dividing(inner, step) if loss == "model" else nullcontext():
        for number, (batch, count) in enumerate(zip(batches, own, strict=True), 1):
            step.counted = False
            scale = {"model": 1 / len(batches), "sum": ranks / tokens, "mean": count * ranks / tokens}[loss]
            with _without_reduction(record.model) if defer and number < len(batches) else nullcontext():
                yield batch, scale
            if loss == "model" and not step.counted:
                raise RuntimeError(
                    f"micro-batch {number} ran without the model's `loss_function`, so its loss was not divided by the tokens of the "
                    "step: pass the labels to the model, or, for a loss of your own, pass loss='sum' or loss='mean' to micro_batches"
                )


def _has_all_tokens(record: Applied) -> bool:
    """Whether each rank of cp computes the loss of the whole batch."""
    resolved = record.program.resolved
    return resolved.context_parallel and not returns_tokens(resolved.on_cp)


def _of_pipeline(pipeline: Parted, batches: Sequence[Any], labels: Labels) -> Iterator[tuple[Mapping[str, Any], float]]:
    assert isinstance(pipeline, Pipeline)
    if (wrong := next((batch for batch in batches if not isinstance(batch, Mapping)), None)) is not None:
        raise TypeError(
            f"a batch of a pipeline must be a mapping, the arguments of its step by name, not {type(wrong).__name__}"
        )
    shifted = isinstance(labels, str) and pipeline.shifts_labels()
    _, tokens, _ = _counts(batches, labels, pipeline.layout.mesh, shifted=shifted)
    pipeline.counts_labels = labels == "labels"
    try:
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            yield {**batch, "accumulate": not last, "tokens": tokens, "calls": len(batches)}, 1.0
    finally:
        pipeline.counts_labels = False


def _count(batch: Any, labels: Labels, *, shifted: bool) -> Tensor | int:
    if isinstance(labels, str):
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"a batch is a {type(batch).__name__}, which has no {labels!r}: pass labels=lambda batch: ..., a function that returns them"
            )
        if batch.get(labels) is None:
            raise ValueError(f"a batch has no {labels!r}: pass `labels`, their name or a function of the batch")
        found = batch[labels]
    else:
        found = labels(batch)
    if isinstance(found, int):
        return found
    if not isinstance(found, Tensor) or found.is_floating_point() or found.is_complex():
        kind = str(found.dtype) if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"labels must be integers, bool or a count, not {kind}: convert a mask with `mask.bool()`")
    if found.dtype == torch.bool:
        return found.sum()
    return tokens_of(found, shifted=shifted) if found.ndim else found


def _counts(batches: Sequence[Any], labels: Labels, mesh: PlanMesh, *, shifted: bool) -> tuple[list[int], int, int]:
    """The count in each micro-batch of this rank; the count on all data-parallel ranks, at least 1; and how many micro-batches count nothing."""
    own = [int(_count(batch, labels, shifted=shifted)) for batch in batches]
    numbers = torch.tensor(
        [sum(own), sum(not count for count in own), len(own), len(own) ** 2], device=mesh.mesh.device_type
    )
    groups = mesh.batch_groups
    for group in groups:
        dist.all_reduce(numbers, group=group)
    tokens, empty, count, squares = numbers.tolist()
    if math.prod(group.size() for group in groups) * squares != count**2:
        raise ValueError(
            f"data-parallel ranks have unequal numbers of micro-batches ({_by_rank(len(own), groups)}): give each rank the same number. "
            "A micro-batch whose labels are all -100 adds nothing"
        )
    return own, max(tokens, 1), empty


def _by_rank(number: int, groups: Sequence[dist.ProcessGroup]) -> str:
    """The numbers of all ranks of these groups in words, rare ones first. All ranks call it."""
    every = {dist.get_rank(): number}
    for group in groups:
        boxes: list[Any] = [None] * group.size()
        dist.all_gather_object(boxes, every, group=group)
        every = {rank: own for box in boxes for rank, own in box.items()}
    ranks = by_key((own, rank) for rank, own in sorted(every.items()))
    return "; ".join(
        f"{own} on {named_ranks(those)}" for own, those in sorted(ranks.items(), key=lambda pair: len(pair[1]))
    )


@contextmanager
def _dividing(model: nn.Module, step: StepLoss) -> Iterator[None]:
    """Make a model's loss function divide by the step's count."""
    assert isinstance(model, PreTrainedModel)  # its loss is one of next tokens
    current = _CURRENT.get(model)
    if current is None or current.own is not model.loss_function:
        current = _CURRENT[model] = _Current(model)
    current.step, model.loss_function = step, current.divided
    try:
        yield
    finally:
        current.step, model.loss_function = None, current.own


@contextmanager
def _without_reduction(model: nn.Module) -> Iterator[None]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif (no_sync := getattr(model, "no_sync", None)) is not None:
        with no_sync():
            yield
    else:  # no data-parallel ranks
        yield
