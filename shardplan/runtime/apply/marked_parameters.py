"""Attributes of parameter objects that refuse a call. They are set again where new parameter objects are made: in `_apply` (`to`,
`to_empty`) and `load_state_dict(assign=True)`. For FSDP2, which gathers, see `fsdp_units.when_gathered`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.core.tree import parent
from shardplan.runtime.parallel.fsdp_units import when_gathered

Mark = Callable[[str, Tensor], None]


def mark_parameters(model: nn.Module, names: Collection[str], mark: Mark) -> dict[str, Tensor]:
    """Set an attribute of DTensor parameters, now and whenever other objects replace them. Returns the current objects by name.

    Args:
        mark: (name, parameter) -> None; sets it.
    """
    found: dict[str, Tensor] = {}
    for name in names:
        owner, leaf = model.get_submodule(parent(name)), name.rpartition(".")[2]
        one = partial(_mark, owner, leaf, name, mark)
        one()
        owner.__dict__["_apply"] = partial(_then, owner._apply, one)
        owner.register_load_state_dict_post_hook(lambda module, keys, one=one: one())
        if (parameter := owner._parameters[leaf]) is not None:
            found[name] = parameter
    return found


def _mark(owner: nn.Module, leaf: str, name: str, mark: Mark) -> None:
    parameter = owner._parameters[leaf]
    if isinstance(parameter, DTensor):
        mark(name, parameter)


def _then(apply: Callable[..., nn.Module], one: Callable[[], None], *args: object, **options: object) -> nn.Module:
    result = apply(*args, **options)
    one()
    return result


# `full_tensor()` of a packed parameter returns permuted rows, and a script would export them unnoticed: it is refused. Gradients and the
# results of `detach()` and `.data` are other objects, which cannot be marked.
def refuse_full_tensor(model: nn.Module, names: Collection[str]) -> None:
    """Make `full_tensor()` of these parameters raise RuntimeError; the message says what to call instead.

    Args:
        model: with its styles, ties and FSDP2 units in place.
        names: its packed parameters.
    """
    by_identity = {id(parameter): name for name, parameter in mark_parameters(model, names, _mark_packed).items()}
    when_gathered(
        model.modules(),
        lambda sharded: partial(_mark_packed, by_identity[id(sharded)]) if id(sharded) in by_identity else None,
    )


def _refuse_packed(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} is packed: full_tensor() would return its rows in the stored order, which depends on tp; "
        "shardplan.full_parameters(model, gradients=False) gives whole parameters in the original order"
    )


def _mark_packed(name: str, parameter: Tensor) -> None:
    parameter.__dict__["full_tensor"] = partial(_refuse_packed, name)
