"""Losses for models whose logits stay split over the vocabulary, or are computed by the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.compiler.lower.program import Program
from shardplan.runtime.parallel.forward import wrap_forward
from shardplan.runtime.parallel.fused_logits import FusedLogits, fused_logits
from shardplan.runtime.parallel.vocabulary_loss import loss_of_model


def use_sharded_loss(model: nn.Module, program: Program) -> None:
    """Give a transformers model a loss on split logits, so that `labels=` keeps working. A model without a `loss_function`
    computes its own loss on the DTensor. Fused logits need none: torch's cross-entropy takes them."""
    if program.sharded_logits and hasattr(model, "loss_function"):
        model.loss_function = loss_of_model  # type: ignore[assignment]  # torch's types know tensors and modules alone


class FusedHead:
    """Wraps the forward of an output head, inside of all other wrappers: it makes no logits.

    Args:
        size: the whole vocabulary's.
        mesh: the mesh that splits it; None: it is whole.
    """

    uncompiled = "the loss makes the logits of a fused head"

    def __init__(self, size: int, mesh: DeviceMesh | None):
        self.size, self.mesh = size, mesh

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> FusedLogits:
        hidden: Tensor = args[0] if args else kwargs["input"]
        assert isinstance(module, nn.Linear), module
        return fused_logits(hidden, module.weight, module.bias, group=self.mesh, vocab_size=self.size)


def fuse_heads(model: nn.Module, program: Program, mesh: DeviceMesh | None) -> bool:
    """Let the loss compute the logits of the program's fused heads.

    Args:
        mesh: the tp mesh; None: one rank.

    Raises:
        ValueError: a head does not compute torch's linear layer.
    """
    for name in program.fused_heads:
        one = program.modules[name]
        layer = model.get_submodule(name).get_submodule(one.layer)
        if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
            raise ValueError(
                f"{name}: the forward of {type(layer).__name__} is not that of nn.Linear, so a loss cannot make its logits: write "
                '`colwise_vocab`, or pass logits="sharded"'
            )
        assert one.logits is not None, one
        wrap_forward(layer, FusedHead(one.logits, mesh))
    return bool(program.fused_heads)
