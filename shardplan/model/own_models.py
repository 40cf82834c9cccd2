"""`module:callable`: a model made by the user's own code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

import torch
from torch import nn

from shardplan.core.diagnostics import Code, PlanError

from .model_findings import did_you_mean, reason, refuse

NO_CALLABLE = Code("SP507")
BAD_CALLABLE = Code("SP508")
NO_OWN_INPUTS = Code("SP515")


def find_callable(word: str) -> Callable[[], nn.Module]:
    """Imports the module of `module:callable` and returns the callable.

    Raises:
        PlanError: SP507.
    """
    module_name, _, name = word.partition(":")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise refuse(NO_CALLABLE, f"{module_name} is a file, not the name of a module", help=f"write `{dotted}:{name}`")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing a script may raise anything, or exit
        raise refuse(
            NO_CALLABLE,
            f"the module {module_name} of {word} cannot be imported",
            notes=(reason(error),),
            help="run from the folder that contains the module, or set PYTHONPATH"
            if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
            else f"`python -c 'import {module_name}'` shows where",
        ) from error
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise refuse(NO_CALLABLE, f"the module {module_name} has no {name}", help=did_you_mean(name, public)) from None
    if not callable(found):
        raise refuse(NO_CALLABLE, f"{word} is a {type(found).__name__}, not a callable")
    return found


def find_inputs(inputs: str | Callable) -> Callable:
    """The function that makes inputs, given as such or as `module:callable`.

    Raises:
        PlanError: SP515.
        TypeError: neither a word nor a function.
    """
    return _function(inputs, "inputs")


def find_reduced(reduced: str | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The function that builds the reduced model, given as such or as `module:callable`.

    Raises:
        PlanError: SP515.
        TypeError: neither a word nor a function.
    """
    return _function(reduced, "reduced")


def _function(given: str | Callable, argument: str) -> Callable:
    if isinstance(given, nn.Module):
        raise TypeError(
            f"{argument} must be a function or `module:callable`, not a module: pass a function that builds it"
        )
    if callable(given):
        return given
    if not isinstance(given, str):
        raise TypeError(f"{argument} must be a function or `module:callable`, not {type(given).__name__}")
    if ":" not in given:
        raise refuse(NO_OWN_INPUTS, f"`{given}` does not name a function", help="write `module:callable`")
    try:
        return find_callable(given)
    except PlanError as error:
        raise PlanError(tuple(replace(d, code=NO_OWN_INPUTS) for d in error.diagnostics)) from error


def call(function: Callable[[], nn.Module], word: str, device: str) -> nn.Module:
    """Call the function with `device` as the default device.

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
