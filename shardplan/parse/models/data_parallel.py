"""The section `data_parallel`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from shardplan.backends import BACKENDS
from shardplan.core.plan import DDP, DataParallel, MegatronFSDP, MixedPrecision

from .values import Either, Given, GlobText, OneOf, Section, default_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Dtype = Literal["bfloat16", "float16", "float32"]
Reshard = Annotated[
    bool | Literal["all_but_last"] | Annotated[int, Field(ge=1)],
    Either({bool: "true, false", str: "`all_but_last`", int: "a number of ranks"}),
]
BackendName = Annotated[str, OneOf(BACKENDS)]
CpuOffload = Annotated[bool | Literal["pinned"], Either({bool: "true, false", str: "`pinned`"})]


class MixedPrecisionFields(Section):
    """The dtypes of FSDP2's mixed precision. What is left out keeps the model's dtype."""

    param: Given[Dtype] = Field(default=None, description="The dtype in which layers compute.", examples=["bfloat16"])
    reduce: Given[Dtype] = Field(
        default=None, description="The dtype in which gradients are added up.", examples=["float32"]
    )
    output: Given[Dtype] = Field(default=None, description="The dtype of the model's output.", examples=["float32"])
    cast_forward_inputs: bool = Field(
        default=default_of(MixedPrecision, "cast_forward_inputs"),
        description="Cast the inputs of each unit to `param`.",
        examples=[False],
    )


class PrefetchFields(Section):
    """How many units to gather ahead of the one that computes."""

    forward: Given[int] = Field(
        default=None, ge=0, le=1000, description="Units ahead in the forward pass.", examples=[1]
    )
    backward: Given[int] = Field(
        default=None, ge=0, le=1000, description="Units ahead in the backward pass.", examples=[2]
    )


Strategy = Annotated[
    Annotated[int, Field(ge=0, le=3)] | Literal["no_shard", "optim", "optim_grads", "optim_grads_params"],
    Either({int: "a number from 0 to 3", str: "`no_shard`, `optim`, `optim_grads`, `optim_grads_params`"}),
]
OuterStrategy = Annotated[
    Annotated[int, Field(ge=0, le=1)] | Literal["no_shard", "optim"],
    Either({int: "0 or 1", str: "`no_shard`, `optim`"}),
]


def _switch(name: str, description: str, cls: type[DataclassInstance] = MegatronFSDP) -> Any:
    default = default_of(cls, name)
    return Field(default=default, description=description, examples=[not default])


class MegatronFSDPFields(Section):
    """The options of Megatron-FSDP, with the defaults of the package megatron-fsdp 0.6."""

    zero_dp_strategy: Strategy = Field(
        default=default_of(MegatronFSDP, "zero_dp_strategy"),
        description="What is sharded over `dp_shard`: 0 (`no_shard`) nothing, 1 (`optim`) optimizer state, 2 "
        "(`optim_grads`) gradients too, 3 (`optim_grads_params`) parameters too.",
        examples=["optim_grads"],
    )
    outer_dp_sharding_strategy: OuterStrategy = Field(
        default=default_of(MegatronFSDP, "outer_dp_sharding_strategy"),
        description="What is sharded over `dp_replicate`: 0 (`no_shard`) nothing, 1 (`optim`) optimizer state, which "
        "needs `zero_dp_strategy: 3`.",
        examples=["optim"],
    )
    init_model_with_meta_device: Given[bool] = Field(
        default=None,
        description="The model is on the meta device, and the package calls `reset_parameters`. Without it, it is seen "
        "from the model.",
        examples=[True],
    )
    grad_reduce_in_fp32: bool = _switch("grad_reduce_in_fp32", "Gradients are added up and kept in float32.")
    preserve_fp32_weights: bool = _switch("preserve_fp32_weights", "The optimizer works on weights in float32.")
    overlap_grad_reduce: bool = _switch("overlap_grad_reduce", "Gradients are reduced while backward computes.")
    overlap_param_gather: bool = _switch("overlap_param_gather", "Parameters are gathered while the model computes.")
    check_for_nan_in_grad: bool = _switch(
        "check_for_nan_in_grad", "Every gradient is looked at for NaN (the package's `report_nan_in_param_grad`)."
    )
    average_in_collective: bool = _switch("average_in_collective", "Collectives average, instead of scale and sum.")
    disable_bucketing: bool = _switch("disable_bucketing", "Each parameter is communicated on its own.")
    calculate_per_token_loss: bool = _switch(
        "calculate_per_token_loss", "Gradients are not scaled: the loss is divided by tokens elsewhere."
    )
    keep_fp8_transpose_cache: bool = _switch("keep_fp8_transpose_cache", "The transposed FP8 weights are kept.")
    nccl_ub: bool = _switch("nccl_ub", "NCCL's user buffers are used.")
    fsdp_double_buffer: bool = _switch("fsdp_double_buffer", "Units are gathered into two buffers in turn.")


class DDPFields(Section):
    """The options of torch's DistributedDataParallel, with its defaults."""

    broadcast_buffers: bool = _switch(
        "broadcast_buffers", "Buffers are sent from the first rank before each forward.", DDP
    )
    find_unused_parameters: bool = _switch(
        "find_unused_parameters", "Trained parameters may be without a gradient in a step.", DDP
    )
    static_graph: bool = _switch("static_graph", "The same parameters are used in every step.", DDP)
    bucket_cap_mb: Given[int] = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="The size of a bucket of gradients in MiB. Without it, torch's own.",
        examples=[100],
    )
    gradient_as_bucket_view: bool = _switch("gradient_as_bucket_view", "Gradients are views of the buckets.", DDP)


class DataParallelFields(Section):
    """How the model is wrapped over the data-parallel ranks."""

    backend: BackendName = Field(
        default=default_of(DataParallel, "backend"),
        description=" ".join(f"`{backend.name}`: {backend.summary}." for backend in BACKENDS.values()),
        examples=["fsdp2"],
    )
    units: list[GlobText] = Field(
        default=list(default_of(DataParallel, "units")),
        description="Modules whose parameters are gathered together, usually each layer. A list of modules stands "
        "for its elements.",
        examples=[["model.layers.*"]],
    )
    reshard_after_forward: Reshard = Field(
        default=default_of(DataParallel, "reshard_after_forward"),
        description="Whether a unit's gathered parameters are freed after its forward: true, false, "
        "`all_but_last` (the last unit, needed first in backward, is kept), or a number of ranks to keep "
        "them sharded over.",
        examples=["all_but_last"],
    )
    mixed_precision: Given[MixedPrecisionFields] = Field(
        default=None,
        description="Dtypes of parameters, gradient reduction and output.",
        examples=[{"param": "bfloat16", "reduce": "float32"}],
    )
    cpu_offload: CpuOffload = Field(
        default=default_of(DataParallel, "cpu_offload"),
        description="Keep parameters, gradients and optimizer state in host memory; `pinned`: in pinned memory.",
        examples=["pinned"],
    )
    prefetch: Given[PrefetchFields] = Field(
        default=None,
        description="How far ahead units are gathered. Without it, the backend's own choice.",
        examples=[{"forward": 1, "backward": 2}],
    )
    frozen: Given[Literal["own", "root", "replicated"]] = Field(
        default=None,
        description="Where frozen modules go. `own`: each outside of the units is a unit of its own. `root`: they are "
        "gathered with the root, also where `units` names them. `replicated`: every data-parallel rank holds all frozen "
        "parameters whole. Without it, they are treated as all others.",
        examples=["own"],
    )
    ignored: list[GlobText] = Field(
        default=list(default_of(DataParallel, "ignored")),
        description="Frozen parameters, or modules of such, that are left alone: every data-parallel rank holds them whole.",
        examples=[["model.vision_tower"]],
    )
    megatron_fsdp: Given[MegatronFSDPFields] = Field(
        default=None,
        description="Options of `backend: megatron_fsdp`.",
        examples=[{"zero_dp_strategy": "optim_grads", "grad_reduce_in_fp32": True}],
    )
    ddp: Given[DDPFields] = Field(
        default=None, description="Options of `backend: ddp`.", examples=[{"gradient_as_bucket_view": True}]
    )
