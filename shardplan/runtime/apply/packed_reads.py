"""`full_tensor()` of a packed parameter returns permuted rows, which a script would export unnoticed: the parameters of a
planned model refuse it.

The refusal is an attribute of the parameter object. What makes other objects of it sets the attribute anew: `_apply`
(`to`, `to_empty`), `load_state_dict(assign=True)`, and FSDP2 where it gathers. A gradient, a `detach()` and a `data` are
objects of their own, which nothing reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.core.tree import parent
from shardplan.runtime.parallel.fsdp_units import when_gathered


def refuse_full_tensor(model: nn.Module, names: Collection[str]) -> None:
    """Make `full_tensor()` of these parameters raise RuntimeError, with what to call instead.

    Args:
        model: with its styles, ties and FSDP2 units in place.
        names: its packed parameters.
    """
    by_identity: dict[int, str] = {}
    for name in names:
        owner, leaf = model.get_submodule(parent(name)), name.rpartition(".")[2]
        by_identity[id(owner._parameters[leaf])] = name
        _mark_parameter(owner, leaf, name)
        owner.__dict__["_apply"] = partial(_apply, owner, leaf, name, owner._apply)
        owner.register_load_state_dict_post_hook(partial(_after_load, leaf, name))
    when_gathered(
        model.modules(),
        lambda sharded: partial(_mark, by_identity[id(sharded)]) if id(sharded) in by_identity else None,
    )


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} is packed: full_tensor() would return its rows in the stored order, which depends on tp; "
        "shardplan.full_parameters(model, gradients=False) gives whole parameters in the original order"
    )


def _mark(name: str, parameter: Tensor) -> None:
    parameter.__dict__["full_tensor"] = partial(_refuse, name)


def _mark_parameter(owner: nn.Module, leaf: str, name: str) -> None:
    parameter = owner._parameters[leaf]
    if isinstance(parameter, DTensor):
        _mark(name, parameter)


def _apply(
    owner: nn.Module, leaf: str, name: str, apply: Callable[..., nn.Module], *args: Any, **options: Any
) -> nn.Module:
    result = apply(*args, **options)
    _mark_parameter(owner, leaf, name)
    return result


def _after_load(leaf: str, name: str, module: nn.Module, incompatible_keys: object) -> None:
    _mark_parameter(module, leaf, name)
