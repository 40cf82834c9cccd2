"""Running a model with hollow arguments for the modules whose heads are exchanged over cp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.compiler.layout.run import RecordedModel
from shardplan.core.module_program import ModuleProgram
from shardplan.model.labels_over_cp import SEQUENCE
from shardplan.model.rebinding import copied
from shardplan.runtime.parallel.forward import arguments_of
from shardplan.torchlib.hollow import Hollow


def reads_shapes_alone(recorded: RecordedModel, programs: Mapping[str, ModuleProgram]) -> bool:
    """Whether the code of these modules reads only the shapes of their arguments, and only the projections below read the values.
    Other values that the projections read must have all tokens. It is tried on one rank, which has all tokens.

    Args:
        programs: the modules' programs for the cp rules.
    """
    model, run = copied(recorded.model), _Run()
    for name, program in programs.items():
        moves = program.on_cp
        module = model.get_submodule(name)
        if moves is not None and (moves.hollow is not None or moves.takes):
            argument = moves.hollow or arguments_of(module)[0]
            change = partial(changed_argument, argument, run.kept if moves.takes else run.hollow)
            module.register_forward_pre_hook(change, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**recorded.inputs)
    except Exception:  # raised by code that reads values, or cannot run without them
        return False
    return True


def changed_argument(
    name: str, change: Callable[[Tensor], Tensor], module: nn.Module, args: tuple, kwargs: dict
) -> Any:
    """A pre-hook (with its first two arguments bound) that changes the named argument of a call, positional or not."""
    if name in kwargs:
        return args, {**kwargs, name: change(kwargs[name])}
    at = arguments_of(module).index(name)
    return (*args[:at], change(args[at]), *args[at + 1 :]), kwargs


class _Run:
    """Makes the values that replace arguments. The sequence length is that of the last hollow argument."""

    length = 0

    def hollow(self, x: Tensor) -> Tensor:
        self.length = x.shape[SEQUENCE]
        return Hollow(x, x.shape, lambda whole: whole, "{} reads values".format)

    def kept(self, x: Tensor) -> Tensor:
        if isinstance(x, Hollow):
            return x.kept
        if x.ndim < 2 or x.shape[-2] != self.length:
            raise ValueError(f"a projection reads {list(x.shape)}, neither the argument nor all tokens")
        return x
