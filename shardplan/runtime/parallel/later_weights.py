"""Weights' gradients while the gradient of their layers' input is reduced.

Linear layers that read one moved value (q, k and v; gate and up) add up its gradient, which the move reduces over the ranks. Autograd's
node of a layer computes its weight's gradient together with its input's. So the reduction would begin after all products, and be waited
for at once. Here a layer's node computes the gradient of its input alone, and the move has the weights as inputs: its backward begins the
reduction, computes the weights' gradients, and then waits (Megatron-LM's order, arXiv 2205.05198, section 4.2.2).

`leave_weights` decides when a plan is applied which layers do this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.torchlib.operators import UNSAFE_VIEW
from shardplan.torchlib.private import private

_current_graph_task_id = private("current_graph_task_id")
_top_hooks = private("top_saved_tensors_hooks")
Keeper = Callable[[Tensor], Any] | None


def keeper() -> Keeper:
    """What keeps the tensors that autograd saves now; None: autograd itself."""
    return None if torch.compiler.is_compiling() else eager_keeper()


def eager_keeper() -> Keeper:
    """The same where nothing is being compiled."""
    hooks = _top_hooks(False)
    return None if hooks is None else hooks[0]


def of_checkpoint(keeper: Keeper) -> bool:
    """Whether this is a checkpoint (use_reentrant=False), which keeps the tensors of a forward or runs it again."""
    return getattr(keeper, "__module__", "") == torch.utils.checkpoint.__name__


class Later:
    """The weights of the layers that may read one moved value.

    Args:
        layers: these.
        keeper: what keeps saved tensors, if not autograd itself: a checkpoint, offloading.

    Attributes:
        weights: as their layers read them, [out, in] each; trained.
        left: for each weight, by its id: (the backward, the gradient of a layer's output) for each call of its layers.
    """

    __slots__ = ("keeper", "left", "weights")

    def __init__(self, layers: Sequence[nn.Module], keeper: Keeper):
        self.keeper = keeper
        self.weights: list[Tensor] = []
        self.left: dict[int, list[tuple[int, Tensor]]] = {}
        for layer in layers:
            weight = layer._parameters["weight"]
            if weight is None or not weight.requires_grad or id(weight) in self.left:
                continue
            if type(weight) is not Tensor and isinstance(weight, DTensor):  # the first question is the cheaper one
                continue
            self.weights.append(weight)
            self.left[id(weight)] = []

    def gradients(self, moved: Callable[[], Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
        """The weights' gradients in the move's backward; None for weights whose layers have left nothing.

        Args:
            moved: () -> the moved value, as the layers read it. Asked for only if one has left something: code that changes the value
                in place before any layer reads it is right, and autograd would refuse to return it.
            wanted: for each weight.
        """
        task, rows = _current_graph_task_id(), None
        found: list[Tensor | None] = []
        for weight, left, asked in zip(self.weights, self.left.values(), wanted, strict=True):
            total: Tensor | None = None
            for at, gradient in left if asked else ():
                if at == task:  # otherwise of an earlier backward that did not reach the move
                    rows = moved().flatten(0, -2) if rows is None else rows
                    one = _of_weight(gradient, rows, weight.dtype)
                    total = one if total is None else total.add_(one)
            left.clear()
            found.append(total)
        return found


def _of_weight(gradient: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a weight; under autocast the layer has computed in the dtype of its output's gradient."""
    columns = gradient.flatten(0, -2).t()
    if columns.dtype == rows.dtype == dtype:
        return torch.mm(columns, rows)
    return torch.mm(columns, rows.to(columns.dtype)).to(dtype)


def leaving(forward: Callable[..., Tensor], module: nn.Module, args: tuple, kwargs: dict) -> Tensor:
    """Call a layer that leaves its weight's gradient to the move of its input, where the input comes from a move.

    Args:
        forward: its own.
    """
    x = args[0] if len(args) == 1 and not kwargs and not torch.compiler.is_compiling() else None
    later = getattr(x.grad_fn, "later", None) if isinstance(x, Tensor) else None  # this very value is a move's result
    # A checkpoint around the layer runs it again without the move, and the layer must save the same both times.
    if not isinstance(later, Later) or eager_keeper() is not later.keeper:
        return forward(*args, **kwargs)
    slots = module._parameters
    weight = slots["weight"]
    left = later.left.get(id(weight))
    if left is None:
        return forward(*args, **kwargs)
    assert x is not None and weight is not None
    y = nn.functional.linear(x, weight.detach(), slots["bias"])
    if y._is_view():  # a change in place would bypass the node of a view
        y = UNSAFE_VIEW(y, y.shape)

    def leave(gradients: tuple[Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            left.append((_current_graph_task_id(), gradients[0]))

    # Of the node, after hooks of the tensor; it costs the host a third of `Tensor.register_hook`.
    if (node := y.grad_fn) is not None:
        node.register_prehook(leave)
    return y


class Readers:
    """The modules that read one moved value: Linear layers, or modules that have some.

    Attributes:
        modules: these.
        layers: by variant, those of their layers that leave their weights' gradients to the move, once `leave_weights` has decided.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.layers: dict[str, list[nn.Module]] = {}

    def later(self, variant: str, kept_by: Keeper) -> Later | None:
        """What the layers may leave to the move of a value that has a gradient; None: nothing. Then nothing is trained, or a part of the
        block is in a checkpoint of its own: it runs again without the block, reads its parameters itself, and must save the same both times.

        Args:
            kept_by: what kept saved tensors when the block read its parameters.
        """
        layers = self.layers.get(variant)
        if not layers or eager_keeper() is not kept_by:
            return None
        later = Later(layers, kept_by)
        return later if later.weights else None
