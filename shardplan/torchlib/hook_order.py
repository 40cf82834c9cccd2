"""Puts hooks of modules in the order in which torch.compile finds them."""

from __future__ import annotations

from torch import nn


def order_hooks(model: nn.Module) -> None:
    """Store the forward hooks of all modules in the order in which they run. Handles stay valid.

    `register_forward_pre_hook(prepend=True)` moves the hook to the front of an OrderedDict, which `dict.keys` does not
    see. Dynamo of torch 2.11 numbers hooks in running order and looks the numbers up in `dict.keys`, so it confuses hooks.
    """
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            items = list(hooks.items())
            if [key for key, _ in items] != list(dict.keys(hooks)):
                hooks.clear()  # in place: handles refer to it
                hooks.update(items)
