"""Second derivatives, which the gradients of planned models do not have."""

from __future__ import annotations

import torch


def refuse_second_derivatives() -> None:
    """Called in a backward. (torch's `once_differentiable` does not say why, and torch.compile does not trace it.)

    Raises:
        RuntimeError: the backward itself is recorded (`create_graph=True`).
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("a planned model's gradients cannot be differentiated again (create_graph=True)")
