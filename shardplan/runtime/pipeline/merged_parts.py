"""The stages of a rank as one module, for code that reads names and tensors of a model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardplan.model.stage_stubs import is_stub

STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


def merged(parts: Sequence[nn.Module]) -> nn.Module:
    """A module with everything that the parts have, under their names. A module that only one part has is used as it is. A
    module that several parts have becomes a plain module with their children, parameters and buffers, and the first part's
    hooks on the state dict."""
    found = _merged(parts)
    assert found is not None
    return found


def _merged(modules: Sequence[nn.Module]) -> nn.Module | None:
    real = [module for module in modules if not is_stub(module)]
    if len(real) <= 1:
        return real[0] if real else None
    holder = nn.Module()
    for module in real:
        holder._parameters |= {
            n: p for n, p in module._parameters.items() if p is not None and n not in holder._parameters
        }
        holder._buffers |= {n: b for n, b in module._buffers.items() if n not in holder._buffers}
        holder._non_persistent_buffers_set |= module._non_persistent_buffers_set
        for name in STATE_HOOKS:
            held = getattr(holder, name)
            for key, hook in getattr(module, name).items():
                held.setdefault(key, hook)
    for name in dict.fromkeys(name for module in real for name in module._modules):
        child = _merged([one for module in real if (one := module._modules.get(name)) is not None])
        if child is not None:
            holder._modules[name] = child
    return holder
