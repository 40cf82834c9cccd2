"""Running a model to find whether its results are only those of the tokens that its head reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.compiler.layout.run import RecordedModel
from shardplan.core.mesh import Axis
from shardplan.core.plan import Rule
from shardplan.model.labels_over_cp import SEQUENCE, own_labels_of
from shardplan.model.rebinding import copied
from shardplan.model.reduced.model_inputs import IGNORED
from shardplan.model.reduced.outcome import results_of
from shardplan.runtime.parallel.forward import arguments_of
from shardplan.runtime.parallel.outputs import on_first
from shardplan.styles.boundary import boundary
from shardplan.torchlib.equality import TOLERANCE, relative_error

from .hollow_run import changed_argument

RANKS = 2


def losses_are_shares(recorded: RecordedModel, exits: Mapping[str, Rule]) -> bool:
    """Whether a model whose head reads a part of the tokens computes the loss of this part: the mean of all ranks' losses is then the whole
    loss. Labels are shifted and then cut. It is tried with parts that have different numbers of labels.

    Args:
        exits: the rules that would make the sequence whole after the blocks, by module.
    """
    labels = recorded.inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.shape[SEQUENCE] % RANKS:
        return False
    labels = labels.clone()
    labels[:, 1 : labels.shape[SEQUENCE] // RANKS - 1] = IGNORED
    try:
        with torch.no_grad():
            whole = results_of(copied(recorded.model)(**{**recorded.inputs, "labels": labels}))
            parts = [
                results_of(_cut(recorded.model, exits, rank)(**_own(recorded, labels, rank))) for rank in range(RANKS)
            ]
    except Exception:  # raised by code that needs all tokens, or cannot take shifted labels
        return False
    return "loss" in whole and all(_same(value, [part.get(name) for part in parts]) for name, value in whole.items())


def _own(recorded: RecordedModel, labels: Tensor, rank: int) -> dict[str, Any]:
    return {**recorded.inputs, **own_labels_of(labels, RANKS, rank)}


def _same(whole: Tensor, parts: list[Tensor | None]) -> bool:
    values = [value for value in parts if value is not None]
    if len(values) < len(parts):
        return False
    if whole.ndim == 0:
        return relative_error(torch.stack(values).mean(), whole) <= TOLERANCE[whole.dtype]
    joined = values[0] if values[0].shape == whole.shape else torch.cat(values, SEQUENCE)
    return joined.shape == whole.shape and relative_error(joined, whole) <= TOLERANCE[whole.dtype]


def _cut(model: nn.Module, exits: Mapping[str, Rule], rank: int) -> nn.Module:
    """A copy of the model that has only a rank's tokens after its exits."""
    model = copied(model)
    for name, rule in exits.items():
        module, crossing = model.get_submodule(name), boundary(rule).on(Axis.CP)
        own = partial(_own_tokens, dim=rule.seq_dim, rank=rank)
        if crossing.output is not None:
            module.register_forward_hook(partial(_of_output, own))
        else:
            argument = rule.argument or arguments_of(module)[0]
            module.register_forward_pre_hook(partial(changed_argument, argument, own), with_kwargs=True)
    return model


def _own_tokens(x: Tensor, dim: int, rank: int) -> Tensor:
    return x.chunk(RANKS, dim)[rank]


def _of_output(change: Callable[[Tensor], Tensor], module: nn.Module, args: tuple, output: Any) -> Any:
    return on_first(output, change)
