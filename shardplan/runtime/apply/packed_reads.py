"""`full_tensor()` of a packed parameter returns permuted rows, and a script would export them unnoticed. So the parameters of a planned
model refuse it (`marked_parameters`). Gradients and the results of `detach()` and `.data` are other objects, which cannot be marked.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import NoReturn

from torch import Tensor, nn

from shardplan.runtime.parallel.fsdp_units import when_gathered

from .marked_parameters import mark_parameters


def refuse_full_tensor(model: nn.Module, names: Collection[str]) -> None:
    """Make `full_tensor()` of these parameters raise RuntimeError; the message says what to call instead.

    Args:
        model: with its styles, ties and FSDP2 units in place.
        names: its packed parameters.
    """
    by_identity = {id(parameter): name for name, parameter in mark_parameters(model, names, _mark).items()}
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
