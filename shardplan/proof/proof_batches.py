"""The micro-batches of a proof, and an unsharded model's loss on them: the loss of a step is the sum over tokens, divided by the
tokens of all micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.model.reduced.outcome import results_of
from shardplan.model.reduced.reduced_model import ReducedModel
from shardplan.runtime.apply.label_counts import IGNORED, predicts_next_token, tokens_of
from shardplan.torchlib.private import private

from .exact import in_precision_of
from .steps import cast, direction_of, made, objective_of, own_copy

Inputs = dict[str, Any]


def rowwise_kinds(model: ReducedModel) -> tuple[str, ...]:
    """The kinds of inputs that can be joined to a batch: each tensor has a row for each row of the batch, and everything else is
    the same in all micro-batches."""
    return tuple(kind for kind in model.kinds if _joined([model.inputs(seed=seed, kind=kind) for seed in (0, 1)]))


def _joined(parts: Sequence[Inputs]) -> Inputs:
    """Join several batches into one; empty where this is not possible."""
    first = parts[0]
    rows = {x.shape[0] if x.ndim else 0 for value in first.values() for x in _tensors(value)}
    if len(rows) != 1 or rows == {0} or any(part.keys() != first.keys() for part in parts):
        return {}
    joined = {}
    for name, value in first.items():
        values = [part[name] for part in parts]
        if isinstance(value, Tensor):
            if any(one.shape != value.shape for one in values):
                return {}
            joined[name] = torch.cat(values)
        elif _tensors(value) or any(one != value for one in values):
            return {}
        else:
            joined[name] = value
    return joined


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in private("tree_leaves")(value) if isinstance(x, Tensor)]


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of all steps and data-parallel ranks.

    Args:
        inputs: seed -> one micro-batch; each has another seed.
        count: their number in one step, on each data-parallel rank.
        replicas: the number of data-parallel ranks.
    """

    inputs: Callable[[int], Inputs]
    count: int
    replicas: int
    dtype: torch.dtype

    def one(self, step: int, replica: int, part: int) -> Inputs:
        """A micro-batch, which the caller may change. Some labels are left out, so that micro-batches have different numbers of
        labels."""
        place = (step, replica, part)
        # Once, in one thread: making inputs may draw from a generator that all ranks share.
        if place not in self._made:
            self._made[place] = self._new(*place)
        return own_copy(self._made[place])

    @cached_property
    def _made(self) -> dict[tuple[int, int, int], Inputs]:
        return {}

    def _new(self, step: int, replica: int, part: int) -> Inputs:
        made = cast(self.inputs((step * self.replicas + replica) * self.count + part), self.dtype)
        ids, labels = made.get("input_ids"), made.get("labels")
        if isinstance(ids, Tensor) and isinstance(labels, Tensor) and labels.shape == ids.shape and ids.ndim == 2:
            labels = labels.clone()
            counted = 1 + (labels[0, 1:] != IGNORED).nonzero().flatten()  # without labels that the inputs leave out
            labels[0, counted[: 1 + (replica + part) % (labels.shape[1] // 2)]] = IGNORED
            made["labels"] = labels
        return made

    def together(self, step: int, replica: int) -> Inputs:
        """The batch of a step."""
        return _joined([self.one(step, replica, part) for part in range(self.count)])

    @cached_property
    def _tokens(self) -> dict[int, int]:
        return {}

    def tokens(self, step: int) -> int:
        """The tokens of all micro-batches of a step that a loss of next tokens counts."""
        if step not in self._tokens:
            every = [(replica, part) for replica in range(self.replicas) for part in range(self.count)]
            found = [tokens_of(self.one(step, *place)["labels"], shifted=True) for place in every]
            self._tokens[step] = int(sum(found))
        return self._tokens[step]

    def own(self, model: nn.Module) -> bool:
        """As `own_loss`."""
        return own_loss(model, self.one(0, 0, 0))

    def loss_of(self, model: nn.Module, step: int, replica: int, part: int, *, own: bool) -> Tensor:
        """The share of one micro-batch in the loss of a step, by the unsharded model.

        Args:
            own: use the model's loss, averaged over the micro-batches; the result of its `loss_function`, a mean over tokens, is
                weighted by the number of tokens. Else use `objective`, averaged over the micro-batches.
        """
        given, shares = self.one(step, replica, part), self.count * self.replicas
        if not own:
            labels = given.pop("labels", None)
            return objective(_read(model(**given)), labels) / shares
        weight = int(tokens_of(given["labels"], shifted=True)) * shares / self.tokens(step)
        with _each_loss(model, lambda loss: loss * weight):
            return model(**given).loss / shares


def _read(output: Any) -> Any:
    """The part of an output that a pipeline's loss function reads."""
    return output.logits if hasattr(output, "logits") else output


def objective(output: Any, labels: Tensor | None) -> Tensor:
    """A scalar for models without a loss of next tokens: the sum of all outputs, each multiplied with fixed numbers."""
    results: Mapping[str, Tensor] = {n: x for n, x in made(results_of(output)).items() if n != "loss"}
    return objective_of(results, {name: direction_of(name, result, 0) for name, result in results.items()})


def own_loss(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a model computes a loss of next tokens by its `loss_function`, which a pipeline divides by the tokens of the step.

    Args:
        model: one forward is run, which may change its buffers.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or not predicts_next_token(model):
        return False
    called: list[bool] = []

    def seen(loss: Tensor) -> Tensor:
        called.append(True)
        return loss

    with in_precision_of(model), _each_loss(model, seen), torch.random.fork_rng(devices=[]):
        output = model(**inputs)
    return bool(called) and getattr(output, "logits", None) is not None


@contextmanager
def _each_loss(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the results of a model's `loss_function` in this context."""
    function: Callable[..., Tensor] = model.loss_function  # type: ignore[assignment]  # torch's types know tensors and modules alone
    model.loss_function = lambda *args, **kwargs: change(function(*args, **kwargs))  # type: ignore[assignment]
    try:
        yield
    finally:
        model.loss_function = function  # type: ignore[assignment]
