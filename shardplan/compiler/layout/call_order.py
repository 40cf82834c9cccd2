"""The order in which the modules of a repeated block run."""

from __future__ import annotations

import torch

from shardplan.model.rebinding import copied
from shardplan.model.repeated_blocks import repeated_blocks

from .model import ModelLayouts


def block_calls(model: ModelLayouts) -> tuple[str, tuple[tuple[str, int], ...]]:
    """The last repeated block of the reduced model that runs, and the modules below it in the order of their first calls.
    Each has its name within the block, and the number of modules between it and the block. ("", ()) where nothing repeats.
    """
    recorded = model.recorded_models[0]
    blocks = repeated_blocks(recorded.tree)
    if not blocks:
        return "", ()
    fresh = copied(recorded.model)
    calls: dict[str, list[tuple[str, int]]] = {}
    open_calls: list[str] = []
    names = {module: name for name, module in fresh.named_modules()}

    def enter(module: torch.nn.Module, args: object) -> None:
        name = names[module]
        block = next((b for b in blocks if name == b or name.startswith(f"{b}.")), None)
        if block is not None:
            inside = calls.setdefault(block, [])
            below = name.removeprefix(block).removeprefix(".")
            if below and below not in [known for known, _ in inside]:
                depth = sum(one.startswith(f"{block}.") for one in open_calls)
                inside.append((below, depth))
        open_calls.append(name)

    def leave(module: torch.nn.Module, args: object, output: object) -> None:
        open_calls.pop()

    hooks = [module.register_forward_pre_hook(enter) for module in names]
    hooks += [module.register_forward_hook(leave) for module in names]
    with model.reduced_model.running(), torch.no_grad():
        fresh(**recorded.inputs)
    for hook in hooks:
        hook.remove()
    ran = [block for block in blocks if block in calls]
    return (ran[-1], tuple(calls[ran[-1]])) if ran else ("", ())
