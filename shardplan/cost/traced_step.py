"""A training step of a sharded model under the meter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.core.diagnostics import PlanError
from shardplan.model.model_findings import reason, refuse
from shardplan.model.reduced.outcome import loss_of
from shardplan.runtime.apply.applied import applied
from shardplan.runtime.apply.plan_mesh import PlanMesh

from .cost_codes import NOT_TRACED
from .fake_rank import groups_of, without_memory
from .ledger import Ledger, category_of, moments_of
from .meter import Meter
from .running_module import Places

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "none": None,
}


def trace(
    model: nn.Module,
    mesh: PlanMesh,
    inputs: Callable[[], Mapping[str, Any]],
    *,
    optimizer: str,
    logits: Iterable[tuple[int, int]],
    offloaded: bool,
    name: str,
) -> Ledger:
    """Run two steps on tensors without memory and measure the second: in the first the optimizer makes its state, and DTensor
    makes whole tensors to learn how operators split.

    Args:
        model: sharded, on the meta device.
        mesh: the one it is sharded on, of a fake process group.
        inputs: makes keyword arguments of its `forward`; it is called where tensors have no memory.
        optimizer: one of OPTIMIZERS.
        logits: see `Meter`.
        offloaded: see `moments_of`.
        name: the model's, for messages.

    Raises:
        PlanError: SP560: the model's code raised.
    """
    places = Places()
    shared = applied(model).shared
    meter = Meter(places, groups_of(mesh, shared.regime.neighbours if shared is not None else {}), logits)
    with without_memory(), meter.running(), places.following(model):
        model.to_empty(device="cpu")
        meter.mark([*model.parameters(), *model.buffers()], "parameters")
        make = OPTIMIZERS[optimizer]
        updates = make(model.parameters()) if make is not None else None
        for _ in range(2):
            meter.start()
            try:
                _step(model, inputs, updates, meter)
            except PlanError:
                raise
            except Exception as error:  # whatever the modelling code raises on tensors without values
                raise refuse(
                    NOT_TRACED, f"a step of {name} cannot be traced without values", notes=(reason(error),)
                ) from error
        log = meter.log
        weights = sum(n for record, n in log.operands if category_of(record) in ("parameters", "gathered parameters"))
        parameters = [_local(p) for p in model.parameters()]
        states = [_local(x) for x in _states(updates)]
        stored = sum(p.numel() for p in parameters)
        # The optimizer reads parameters, gradients and its state, and writes the first and the last.
        updated = sum(3 * p.nbytes for p in parameters) + sum(2 * x.nbytes for x in states) if updates else 0
    return Ledger(moments_of(log, offloaded=offloaded), log.flops, log.calls, log.bytes, stored, weights + updated)


def _step(
    model: nn.Module,
    inputs: Callable[[], Mapping[str, Any]],
    optimizer: torch.optim.Optimizer | None,
    meter: Meter,
) -> None:
    """Forward, backward, optimizer step; nothing but the batch and the loss outlives the forward, and no gradient the
    step."""
    places = meter.places
    places.enter("forward")
    batch = inputs()
    loss = loss_of(model(**batch))
    meter.end_forward()
    places.enter("backward")
    loss.backward()
    del loss
    meter.mark((p.grad for p in model.parameters() if p.grad is not None), "gradients")
    places.enter("optimizer step")
    if optimizer is not None:
        optimizer.step()
        meter.mark(_states(optimizer), "optimizer state")
    model.zero_grad(set_to_none=True)


def _states(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    if optimizer is None:
        return []
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
