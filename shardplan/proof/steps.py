"""Training steps, each on its own batch, and all their results: the basis for comparing a sharded model with the unsharded one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.compiler.layout.randomness import DrawnAlike
from shardplan.model.reduced.outcome import results_of
from shardplan.model.reduced.precision import cast as in_precision
from shardplan.model.reduced.weights import writes_to
from shardplan.runtime.parallel.fused_logits import FusedLogits
from shardplan.torchlib.equality import TOLERANCE, relative_error
from shardplan.torchlib.private import private

from .exact import in_precision_of

LOUD = 2.0**20  # a power of two, so that a linear backward rounds alike
STEPS = 2  # the second step reads a buffer that the first forward changes

Batch = Mapping[str, Any]
# The gradient of each output, by the output's name; fixed numbers, so that the objective is linear in the outputs.
Directions = Mapping[str, Tensor]


@dataclass(frozen=True)
class Steps:
    """The results of the steps.

    Args:
        outputs: of each step: every floating-point tensor that the model returned, by path.
        directions: of each step: the factors of the outputs for backward.
        gradients: the sum over the steps, by full parameter name, tied parameters under each name; every parameter that
            got a gradient.
        buffers: by full name, after the last step.
        parameters: by full name, after the last step.
        written: the parameters that a forward changed.
        zero: the parameters whose gradient is exactly zero.
        drew: whether the model draws random numbers.
        size: the factor of the directions. Where it is not 1, the first step too differentiates all outputs.
    """

    outputs: Sequence[Mapping[str, Tensor]]
    directions: Sequence[Directions]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    written: frozenset[str] = frozenset()
    zero: frozenset[str] = frozenset()
    drew: bool = False
    size: float = 1.0


def cast(inputs: Batch, dtype: torch.dtype) -> dict[str, Any]:
    """The inputs with their floating-point tensors in another dtype, also in tuples, lists and mappings."""
    return private("tree_map")(lambda x: in_precision(x, dtype), dict(inputs))


def reference_of(build: Callable[[], nn.Module], batches: Sequence[Batch], size: float = 1.0) -> Steps:
    """Run the unsharded model. If it draws random numbers, it is made once more, and runs with the ranks' draws."""
    steps = reference_steps(build(), batches, size)
    if not steps.drew:
        return steps
    with DrawnAlike():
        return replace(reference_steps(build(), batches, size), drew=True)


def reference_steps(model: nn.Module, batches: Sequence[Batch], size: float = 1.0) -> Steps:
    """Run the unsharded model."""
    before = torch.get_rng_state()
    made: list[Directions] = []

    def directions(results: Mapping[str, Tensor]) -> Directions:
        made.append({name: size * direction_of(name, result, len(made)) for name, result in results.items()})
        return made[-1]

    written = writes_to(model)
    outputs = run_steps(model, batches, directions, own_loss=size == 1)
    gradients = {
        name: parameter.grad.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    zero = frozenset(name for name, gradient in gradients.items() if not gradient.any())
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers(remove_duplicate=False)}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    drew = not torch.equal(before, torch.get_rng_state())
    return Steps(outputs, made, gradients, buffers, parameters, written(), zero, drew, size)


def is_linear(model: nn.Module, batch: Batch) -> bool:
    """Whether all gradients of a call grow as the objective does. Else code of the backward (a hook, an autograd function) looks at how
    large they are, and may act on larger ones than those of the steps alone.

    Args:
        model: unsharded; it is used up.
    """
    with in_precision_of(model):
        results = made(plain_call(model, own_copy(batch), 0))
        objective = objective_of(results, {name: direction_of(name, result, 0) for name, result in results.items()})
        found: list[dict[str, Tensor]] = []
        for size in (LOUD**0.5, LOUD):
            model.zero_grad()
            try:
                (size * objective).backward(retain_graph=True)
            except RuntimeError:  # from an autograd function that runs once
                return False
            found.append({n: p.grad.clone() / size for n, p in model.named_parameters() if p.grad is not None})
    quiet, loud = found
    return all(
        not bool(value.isfinite().all()) or relative_error(value, quiet[name]) <= TOLERANCE[torch.float32]
        for name, value in loud.items()
    )


def seed_of(step: int, index: int) -> int:
    """The seed of a batch, for one step of one data-parallel rank."""
    return index * STEPS + step


def averaged(runs: Sequence[Steps]) -> tuple[Steps, ...]:
    """The unsharded steps of all data-parallel ranks, each on its own batches, with the mean of their gradients, as FSDP2
    computes it. A missing gradient counts as zero if another rank has one."""
    if len(runs) == 1:
        return tuple(runs)
    names = dict.fromkeys(name for run in runs for name in run.gradients)
    gradients = {
        name: reduce(torch.add, (run.gradients[name] for run in runs if name in run.gradients)) / len(runs)
        for name in names
    }
    return tuple(replace(run, gradients=gradients) for run in runs)


Call = Callable[[nn.Module, dict[str, Any], int], Mapping[str, Tensor]]  # (model, its arguments, step) -> its results


def plain_call(model: nn.Module, batch: dict[str, Any], step: int) -> Mapping[str, Tensor]:
    """A call of a model with its arguments."""
    return results_of(model(**batch))


def run_steps(
    model: nn.Module,
    batches: Sequence[Batch],
    directions: Callable[[Mapping[str, Tensor]], Directions],
    call: Call = plain_call,
    *,
    own_loss: bool = True,
) -> list[Mapping[str, Tensor]]:
    """Run forward and backward for each batch; gradients accumulate. Returns the detached outputs of each batch.

    The first step differentiates the model's own loss, if there is one. Every other step differentiates all differentiable
    outputs, each times its direction, as callers may read any of them.

    Args:
        directions: the factors of a step's outputs.
        call: how the model is called.
        own_loss: whether the first step differentiates the model's own loss.
    """
    outputs: list[Mapping[str, Tensor]] = []
    for i, batch in enumerate(batches):
        with in_precision_of(model):
            results = made(call(model, own_copy(batch), i))
            given = directions(results)
            if i or "loss" not in results or not own_loss:
                objective_of(results, given).backward()
            else:
                results["loss"].backward()
        separate(model)
        outputs.append({name: result.detach() for name, result in results.items()})
    return outputs


def made(results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The results, with the logits that a loss computes."""
    return {name: x.make() if isinstance(x, FusedLogits) else x for name, x in results.items()}


def own_copy(batch: Batch) -> dict[str, Any]:
    """A copy of a batch for a forward, which may change it: CTRL multiplies the given embeddings in place."""
    return private("tree_map")(lambda x: x.clone() if isinstance(x, Tensor) else x, dict(batch))


def separate(model: nn.Module) -> None:
    """Give each gradient of a plain parameter its own memory. For `a.flatten() + b.flatten()`, autograd keeps views of one tensor as
    the gradients of both parameters, and then adds the next step's gradient twice, which would be a wrong reference.

    Gradients that are DTensors stay as they are in a planned model.
    """
    seen: set[int] = set()
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, DTensor):
            continue
        memory = gradient.untyped_storage().data_ptr()
        if memory in seen:
            parameter.grad = gradient.clone()
        seen.add(memory)


def objective_of(results: Mapping[str, Tensor], directions: Directions) -> Tensor:
    """A scalar: the sum of all outputs, each times its direction; if gradients are recorded, only of differentiable outputs.

    Raises:
        ValueError: there is no such output.
    """
    terms, trains = [], torch.is_grad_enabled()
    for name, result in results.items():
        direction = directions.get(name)
        whole = result.full_tensor() if isinstance(result, DTensor) else result
        # An output with another name or shape than in the unsharded model differs anyway.
        if (result.requires_grad or not trains) and direction is not None and direction.shape == whole.shape:
            terms.append((whole * direction.to(whole.dtype)).sum())
    if not terms:
        raise ValueError("the model returns nothing differentiable, so it cannot be trained")
    return torch.stack([term.to(terms[0].dtype) for term in terms]).sum()


def direction_of(name: str, result: Tensor, step: int) -> Tensor:
    """Random numbers that depend only on an output's name and shape, scaled so that the sum over the output is about
    one."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{step} {name}".encode()))
    drawn = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    return drawn / max(1, result.numel()) ** 0.5
