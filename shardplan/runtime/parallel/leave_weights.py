"""Which layers leave their weights' gradients to the move of their input (`later_weights`): decided when a plan is applied."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.core.by_key import by_key
from shardplan.core.tree import ancestors
from shardplan.torchlib.private import private

from .boundaries import Enter, Leave
from .forward import around_of, is_own
from .parameters import LocalParameters
from .reading import Reads
from .regime import Shared

_FakeTensor = private("FakeTensor")


def leave_weights(model: nn.Module, shared: Shared, compiled: Collection[str]) -> None:
    """Decide for every module with a moved input which layers leave the gradients of their weights to the move.

    A layer does if all of this holds; any other layer runs as it is:

    - it reads the moved input itself: it has the rule, or the module with the rule has it as a child. The rule does not say `regather`:
      an input that autograd keeps as a shard is gathered for the layers' own backward;
    - its class is torch's `nn.Linear`, no subclass, with torch's own forward, and its weight is a plain tensor. Layers of adapters are none;
    - its rows are split, and it reads its own rows of the weight, which its block reads together with the block's other parameters;
    - nobody has registered a hook on it;
    - its weight is more than half as large as the largest of these layers: a small product hides little, and costs the host as much;
    - it is not in a module that the plan compiles.

    Args:
        compiled: the names of these modules.
    """
    split = _split(model)
    names = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module in split
        and _plain(module)
        and not any(one in compiled for one in (name, *ancestors(name)))
    }
    for readers in shared.readers:
        candidates = dict.fromkeys(layer for module in readers.modules for layer in (module, *module.children()))
        own = [layer for layer in candidates if isinstance(layer, nn.Linear) and layer in names]
        sizes = [layer.out_features * layer.in_features for layer in own]
        for layer, size in zip(own, sizes, strict=True):
            if 2 * size <= max(sizes):
                continue
            wrapper = around_of(layer, LocalParameters)
            assert wrapper is not None  # `_plain`
            for variant in split[layer]:
                readers.layers.setdefault(variant, []).append(layer)
                if variant not in wrapper.leaves:
                    wrapper.leaves.add(variant)
                    shared.overlapped.setdefault(variant, []).append(names[layer])


def _split(model: nn.Module) -> dict[nn.Module, list[str]]:
    """The layers that read their own rows of a weight, in a block that reads its parameters; and the variants in which they do."""
    members = (
        (owner, variant, program)
        for module in model.modules()
        if (reads := around_of(module, Reads)) is not None
        for variant, read in reads.members.items()
        for owner, _, program in read
    )
    return by_key(
        (owner, variant)
        for owner, variant, program in members
        if program.name == "weight" and program.dim == 0 and program.stored == program.computed and not program.shared
    )


def _plain(layer: nn.Linear) -> bool:
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    if not all(isinstance(hook, (Enter, Leave)) for registered in hooks for hook in registered.values()):
        return False
    weight = layer._parameters.get("weight")
    return (
        is_own(layer, nn.Linear, LocalParameters)
        and isinstance(weight, DTensor)
        and weight.is_floating_point()
        and type(weight._local_tensor) in (Tensor, nn.Parameter, _FakeTensor)
    )
