"""Modules without a transformers configuration: copied whole, or replaced by the reduced model that the user names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardplan.core.diagnostics import Code, PlanError
from shardplan.model.float8 import without_float8
from shardplan.model.found import FoundModel, Inputs
from shardplan.model.initialisation import Blank
from shardplan.model.model_findings import causes, refuse
from shardplan.model.rebinding import HeldParameter, NotBound, copied

from .pictures import BATCH
from .precision import in_dtype
from .weights import randomise, without_noise

NO_REDUCED_MODEL = Code("SP520")
TOO_LARGE = Code("SP521")
NO_INPUTS = Code("SP522")
NOT_CARRIED = Code("SP524")

LARGEST = 20_000_000  # parameters of the reduced model of a transformers model
GIVE_INPUTS = "pass `inputs`, a function from a seed to keyword arguments of `forward`"
MOST_BYTES = 2 * 2**30  # of weights of a module that is copied whole; the ranks' shards need the same memory again


def module_maker(model: FoundModel | nn.Module, name: str, seed: int, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """A function that builds copies of a module on the CPU, all with the same random weights, in training mode without
    dropout. Their functions are bound to the copy.

    Raises:
        PlanError: SP521 where it is too large; SP520 where it is on the meta device and has buffers with
            unknown values; SP524 where one of its functions cannot be bound to a copy.
    """
    try:
        parameters = (model.build("meta") if isinstance(model, FoundModel) else model).parameters()
    except NotBound as error:
        raise not_carried(name, error) from error
    size = sum(p.numel() * (dtype.itemsize if p.is_floating_point() else p.itemsize) for p in parameters)
    if size > MOST_BYTES:
        raise refuse(
            TOO_LARGE,
            f"{name} has {size / 2**30:.1f} GiB of weights in {str(dtype).removeprefix('torch.')}, more than the "
            f"{MOST_BYTES / 2**30:g} GiB that can be copied",
            help="pass `reduced` (`--reduced module:callable`): a function without arguments that builds a reduced model of "
            "the same classes",
        )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            original = without_float8(_on_cpu(model, name))
        return maker_of(original, seed, dtype)
    except NotBound as error:
        raise not_carried(name, error) from error


def maker_of(original: nn.Module, seed: int, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """Change a module, and return a function that builds copies of it: random weights, training mode, no dropout.

    Raises:
        NotBound: one of its functions cannot be bound to a copy.
    """
    randomise(original, seed)
    without_noise(original)
    in_dtype(original, dtype).train()
    copied(original)  # raises once for what cannot be copied
    return lambda: copied(original)


def not_carried(name: str, error: NotBound) -> PlanError:
    """The error for a change of a live model that cannot be made to its reduced model."""
    if isinstance(error, HeldParameter):
        return refuse(
            NOT_CARRIED,
            f"the code of {name} does not read a parameter from its module: {error}",
            help="read it by its name where it is used (`self.scale`), or use nn.ParameterList or nn.ParameterDict in place of the "
            "list",
        )
    return refuse(
        NOT_CARRIED,
        f"{name} was changed in a way that its reduced model cannot reproduce: {error}",
        help="change the model after apply_plan, or pass `reduced`: a function that builds a reduced model with the same "
        "changes",
    )


def checked(inputs: Inputs, name: str) -> Inputs:
    """The user's function for inputs; its mistakes become findings.

    Raises:
        PlanError: SP522, when the function is called.
    """

    def call(seed: int) -> Mapping[str, Any]:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                made = inputs(seed)
        except Exception as error:  # the user's own code
            raise refuse(NO_INPUTS, f"`inputs` of {name} raised", notes=causes(error)) from error
        if not isinstance(made, Mapping) or not all(isinstance(key, str) for key in made):
            raise refuse(
                NO_INPUTS,
                f"`inputs` of {name} returned a {type(made).__name__}",
                help="return a dict: argument of `forward` -> value",
            )
        return made

    return call


def inputs_of(module: nn.Module, name: str, seq_len: int) -> Inputs:
    """Token ids [2, seq_len] for the first argument of `forward`, below the size of the first embedding.

    Raises:
        PlanError: SP522.
    """
    embedding = next((m for m in module.modules() if isinstance(m, nn.Embedding)), None)
    argument = next(iter(inspect.signature(module.forward).parameters), None)
    if embedding is None or argument is None:
        raise refuse(NO_INPUTS, f"the inputs of {name} are not known", help=GIVE_INPUTS)

    def inputs(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {argument: torch.randint(embedding.num_embeddings, (BATCH, seq_len), generator=generator)}

    return inputs


def not_callable(name: str, inputs: Mapping[str, Any], error: Exception) -> PlanError:
    """The error for a module that does not accept token ids."""
    return refuse(
        NO_INPUTS,
        f"{name} cannot be called with token ids as {', '.join(inputs)}",
        notes=causes(error),
        help=GIVE_INPUTS,
    )


def _on_cpu(model: FoundModel | nn.Module, name: str) -> nn.Module:
    if isinstance(model, FoundModel):
        return model.build("cpu")
    result = copied(model)
    if not any(t.is_meta for t in (*result.parameters(), *result.buffers())):
        return result.to("cpu")
    result.to_empty(device="cpu")
    with torch.no_grad():
        blank = Blank(*result.parameters(), *result.buffers())
        blank.initialize(result, result)
    unset = [n for n, b in result.named_buffers() if blank.has(b)]
    if unset:
        raise refuse(
            NO_REDUCED_MODEL,
            f"{name} is on the meta device, so the values of its buffers are not known",
            notes=tuple(unset),
            help="give the module that has it a `reset_parameters()` that computes it, as `materialize` needs too; or build the model on "
            "the CPU, or name the callable that builds it (`module:callable`)",
        )
    return result
