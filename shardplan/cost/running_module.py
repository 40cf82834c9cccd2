"""Finding which module runs: in forward by its hooks, in backward by the gradients of its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shardplan.core.estimates import Phase
from shardplan.model.reduced.nests import tensors_in

Place = tuple[Phase, str]  # the running phase, and the module's full name


class Places:
    """Follows a model's run. While a checkpointed forward is recomputed, the phase stays "backward"."""

    def __init__(self) -> None:
        self.phase: Phase = "forward"
        self._forward: list[str] = []
        self._backward = ""

    @property
    def now(self) -> Place:
        """The phase, and the full name of the innermost module that runs; "" is the model itself."""
        if self.phase == "optimizer step":
            return self.phase, ""
        return self.phase, self._forward[-1] if self._forward else self._backward

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self._backward = ""

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._begin(name), prepend=True))
            # The first hooks see an output before other hooks replace it. A checkpoint's early stop is an exception, hence always_call.
            handles.append(module.register_forward_hook(self._end(name), prepend=True, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._forward.append(name)

        return hook

    def _end(self, name: str) -> Any:
        def reached(gradient: Tensor) -> None:
            self._backward = name

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._forward.pop()
            if self.phase == "forward":
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(reached)

        return hook
