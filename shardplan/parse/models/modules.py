"""The sections that name modules and what is done to each: `activation_checkpointing` and `compile`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardplan.core.plan import ActivationCheckpointing, Compile

from .values import GlobText, Section, default_of


class ActivationCheckpointingFields(Section):
    """Modules whose activations are not kept but computed again in the backward pass."""

    modules: list[GlobText] = Field(
        default=list(default_of(ActivationCheckpointing, "modules")),
        description="The modules, usually each layer, or their attention or MLP alone. Without it, the data-parallel "
        "units.",
        examples=[["model.layers.*"], ["model.layers.*.mlp"]],
    )
    mode: Literal["full", "selective"] = Field(
        default=default_of(ActivationCheckpointing, "mode"),
        description="`full`: everything inside is computed again. `selective`: the results of matrix products, of "
        "attention and of collectives are kept, the rest is computed again.",
        examples=["selective"],
    )
    every: int = Field(
        default=default_of(ActivationCheckpointing, "every"),
        ge=1,
        le=1000,
        description="Of the modules that each pattern matches, each n-th alone: with 2 the second, the fourth, ...",
        examples=[2],
    )


class CompileFields(Section):
    """Modules whose forward is compiled with torch.compile, each on its own."""

    modules: list[GlobText] = Field(
        default=list(default_of(Compile, "modules")),
        description="The modules, usually each layer. Without it, the data-parallel units.",
        examples=[["model.layers.*"]],
    )
    fullgraph: bool = Field(
        default=default_of(Compile, "fullgraph"),
        description="A graph break is an error, as in torch.compile.",
        examples=[False],
    )
    backend: str = Field(
        default=default_of(Compile, "backend"),
        min_length=1,
        max_length=200,
        description="torch.compile's backend.",
        examples=["inductor"],
    )
    async_tensor_parallel: bool = Field(
        default=default_of(Compile, "async_tensor_parallel"),
        description="Run matrix products while the sequence is gathered and scattered over tp. It needs sequence "
        "parallelism, the backend `inductor` and CUDA.",
        examples=[True],
    )
