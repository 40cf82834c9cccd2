"""The outputs that a module passes to later pipeline stages: read after all of its hooks, and separate from this stage's use of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

BACKWARD = ("_backward_pre_hooks", "_backward_hooks")


class HandedOut:
    """Hooks of a module that run last. torch wraps a module's output for its full backward hooks after the forward hooks, so no hook sees
    the wrapped output. Here, these hooks run the full backward hooks, which stay in the dicts of the handles that remove them.

    The rest of the forward gets a view. The later stage runs this code too, so a hook that the code puts on a tensor acts only once.

    Args:
        seen: called with each output.
    """

    def __init__(self, name: str, module: nn.Module, seen: Callable[[Any], None]):
        self.name, self.seen = name, seen
        self.first, self.then = (vars(module)[kind] for kind in BACKWARD)
        self.legacy = bool(self.then) and not module._is_full_backward_hook  # on the forward's own result
        self.made: BackwardHook | None = None
        if not self.legacy:
            for kind in BACKWARD:
                vars(module)[kind] = OrderedDict()
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.legacy and any(vars(module)[kind] for kind in BACKWARD):
            raise RuntimeError(
                f"{self.name} got a backward hook after apply_plan, and hands its output to another pipeline stage: register it before "
                "apply_plan, which then runs it there"
            )
        self.made = None
        if not self.legacy and (self.first or self.then):
            self.made = BackwardHook(module, list(self.then.values()), list(self.first.values()))
            args = self.made.setup_input_hook(args)
        return args

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.made is not None:
            output = self.made.setup_output_hook(output)
        self.made = None
        self.seen(output)
        return output if self.legacy else _views(output)


def _views(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.view_as(output)
    return type(output)(map(_views, output)) if type(output) in (tuple, list) else output
