"""Modules without a transformers configuration: copied as they are."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardplan.models.findings import reason, refuse
from shardplan.models.found import FoundModel, Inputs
from shardplan.models.tree import kind_of

from .codes import NO_INPUTS, NO_TWIN, TOO_LARGE
from .inputs import BATCH
from .weights import randomise

LARGEST = 20_000_000  # parameters of a small model, and of a module that is copied whole


def module_maker(model: FoundModel | nn.Module, name: str, seed: int, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """What builds copies of a module on the CPU, all with the same random weights, in training mode without
    dropout.

    Raises:
        PlanError: SP521 where it is too large; SP520 where it is on the meta device and has buffers whose
            values nothing tells.
    """
    size = sum(p.numel() for p in (model.build("meta") if isinstance(model, FoundModel) else model).parameters())
    if size > LARGEST:
        raise refuse(
            TOO_LARGE,
            f"{name} has {size:,} parameters, more than the {LARGEST:,} that are copied",
            help="give a smaller model of the same structure",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        original = _on_cpu(model, name)
    randomise(original, seed)
    for module in original.modules():
        if kind_of(module) == "dropout":
            module.p = 0.0
    original.to(dtype).train()
    return lambda: copy.deepcopy(original)


def checked(inputs: Inputs, name: str) -> Inputs:
    """The user's function for inputs, whose mistakes are findings.

    Raises:
        PlanError: SP522, when it is called.
    """

    def call(seed: int) -> Mapping[str, Any]:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                made = inputs(seed)
        except Exception as error:  # the user's own code
            raise refuse(NO_INPUTS, f"`inputs` of {name} raised", notes=(reason(error),)) from error
        if not isinstance(made, Mapping) or not all(isinstance(key, str) for key in made):
            raise refuse(
                NO_INPUTS,
                f"`inputs` of {name} gave a {type(made).__name__}",
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
        raise refuse(
            NO_INPUTS,
            f"nothing says what to call {name} with",
            help="give `inputs`, a function from a seed to keyword arguments of `forward`",
        )

    def inputs(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {argument: torch.randint(embedding.num_embeddings, (BATCH, seq_len), generator=generator)}

    try:
        module(**inputs(0))
    except Exception as error:  # the user's own forward
        raise refuse(
            NO_INPUTS,
            f"{name} cannot be called with token ids as {argument}",
            notes=(reason(error),),
            help="give `inputs`, a function from a seed to keyword arguments of `forward`",
        ) from error
    return inputs


def _on_cpu(model: FoundModel | nn.Module, name: str) -> nn.Module:
    if isinstance(model, FoundModel):
        return model.build("cpu")
    result = copy.deepcopy(model)
    if not any(t.is_meta for t in (*result.parameters(), *result.buffers())):
        return result.to("cpu")
    result.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*result.parameters(), *result.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    for module in result.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    unset = [n for n, b in result.named_buffers() if not b.is_floating_point() or bool(b.isnan().any())]
    if unset:
        raise refuse(
            NO_TWIN,
            f"{name} is on the meta device and nothing tells the values of its buffers",
            notes=tuple(unset),
            help="build it on the CPU, or name the callable that builds it (`module:callable`)",
        )
    return result
