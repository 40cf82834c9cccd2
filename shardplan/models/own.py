"""`module:callable`: a model made by the user's own code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from operator import attrgetter

import torch
from torch import nn

from .codes import BAD_CALLABLE, NO_CALLABLE
from .findings import did_you_mean, reason, refuse


def find_callable(word: str) -> Callable[[], nn.Module]:
    """Imports the module of `module:callable` and returns the callable.

    Raises:
        PlanError: SP507.
    """
    module_name, _, name = word.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script may do anything, and exit, while it is imported
        raise refuse(
            NO_CALLABLE,
            f"the module {module_name} of {word} cannot be imported",
            notes=(reason(error),),
            help="run from the folder that holds the module, or set PYTHONPATH",
        ) from error
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise refuse(NO_CALLABLE, f"the module {module_name} has no {name}", help=did_you_mean(name, public)) from None
    if not callable(found):
        raise refuse(NO_CALLABLE, f"{word} is a {type(found).__name__}, not a callable")
    return found


def call(function: Callable[[], nn.Module], word: str, device: str) -> nn.Module:
    """Calls it with `device` as the default device.

    Raises:
        PlanError: SP508.
    """
    try:
        with torch.device(device):
            model = function()
    except (Exception, SystemExit) as error:
        raise refuse(
            BAD_CALLABLE,
            f"{word} raised {type(error).__name__}",
            notes=(reason(error), f"it was called on the {device} device"),
            help="make it a function without arguments that builds the model and reads no values of tensors",
        ) from error
    if not isinstance(model, nn.Module):
        raise refuse(
            BAD_CALLABLE,
            f"{word} returned a {type(model).__name__}, not a torch.nn.Module",
            help="return the model",
        )
    return model
