"""The sections of a plan besides its rules. Each field is defined only here. Made from it are the models that read a
document, the JSON Schema, and the configs with other projects' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from .diagnostics import Location
from .options import option, options

BackendName = Annotated[str, "the name of a record of `shardplan.styles.backends`"]
Dtype = Literal["bfloat16", "float16", "float32"]
Glob = Annotated[str, "a glob over whole dotted names"]
ZeroStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The base of all sections.

    Args:
        location: its place; None if it is in no document.
        given: the fields that the document sets, with the place of each. They decide what a child plan inherits
            (`shardplan.language.inherit`). The others have their defaults.
    """

    location: Location | None = field(default=None, compare=False)
    given: Mapping[str, Location] = field(default_factory=dict, compare=False, repr=False)

    @property
    def values(self) -> dict[str, Any]:
        """All options by name."""
        return {name: getattr(self, name) for name in options(type(self))}


@dataclass(frozen=True, slots=True)
class MixedPrecision(Section):
    """The dtypes of FSDP2's mixed precision. An omitted one stays the model's dtype."""

    param: Dtype | None = option(None, "The dtype in which layers compute.", "bfloat16")
    reduce: Dtype | None = option(None, "The dtype in which gradients are added up.", "float32")
    output: Dtype | None = option(None, "The dtype of the model's output.", "float32")
    cast_forward_inputs: bool = option(True, "Cast the inputs of each unit to `param`.")


@dataclass(frozen=True, slots=True)
class Prefetch(Section):
    """How many units to gather ahead of the one that computes."""

    forward: int | None = option(None, "Units ahead in the forward pass.", 1, least=0, most=1000)
    backward: int | None = option(None, "Units ahead in the backward pass.", 2, least=0, most=1000)


@dataclass(frozen=True, slots=True)
class MegatronFSDP(Section):
    """The options of Megatron-FSDP, with the defaults of the package megatron-fsdp 0.6."""

    zero_dp_strategy: int | ZeroStrategy = option(
        3,
        "What is sharded over `dp_shard`: 0 (`no_shard`) nothing, 1 (`optim`) optimizer state, 2 (`optim_grads`) gradients "
        "too, 3 (`optim_grads_params`) parameters too.",
        "optim_grads",
        least=0,
        most=3,
        number="a number from 0 to 3",
    )
    outer_dp_sharding_strategy: int | Literal["no_shard", "optim"] = option(
        0,
        "What is sharded over `dp_replicate`: 0 (`no_shard`) nothing, 1 (`optim`) optimizer state, which needs "
        "`zero_dp_strategy: 3`.",
        "optim",
        least=0,
        most=1,
        number="0 or 1",
    )
    init_model_with_meta_device: bool | None = option(
        None,
        "The model is on the meta device, and the package calls `reset_parameters`. Without it, the model decides.",
    )
    grad_reduce_in_fp32: bool = option(False, "Gradients are added up and kept in float32.")
    preserve_fp32_weights: bool = option(True, "The optimizer works on weights in float32.")
    overlap_grad_reduce: bool = option(True, "Gradients are reduced while backward computes.")
    overlap_param_gather: bool = option(True, "Parameters are gathered while the model computes.")
    check_for_nan_in_grad: bool = option(
        False, "Every gradient is checked for NaN (the package's `report_nan_in_param_grad`)."
    )
    average_in_collective: bool = option(False, "Collectives average, instead of scale and sum.")
    disable_bucketing: bool = option(False, "Each parameter is communicated on its own.")
    calculate_per_token_loss: bool = option(
        False, "Gradients are not scaled: the training code divides the loss by tokens."
    )
    keep_fp8_transpose_cache: bool = option(False, "The transposed FP8 weights are kept.")
    nccl_ub: bool = option(False, "NCCL's user buffers are used.")
    fsdp_double_buffer: bool = option(False, "Units are gathered into two buffers in turn.")


@dataclass(frozen=True, slots=True)
class DDP(Section):
    """The options of torch's DistributedDataParallel, with its defaults."""

    broadcast_buffers: bool = option(True, "Buffers are sent from the first rank before each forward.")
    find_unused_parameters: bool = option(False, "Trained parameters may be without a gradient in a step.")
    static_graph: bool = option(False, "The same parameters are used in every step.")
    bucket_cap_mb: int | None = option(
        None,
        "The size of a bucket of gradients in MiB. Without it, torch's own.",
        100,
        least=1,
        most=1_000_000,
    )
    gradient_as_bucket_view: bool = option(False, "Gradients are views of the buckets.")


@dataclass(frozen=True, slots=True)
class DataParallel(Section):
    """How the model is wrapped over the data-parallel ranks."""

    backend: BackendName = option("fsdp2", "", "fsdp2")
    units: tuple[Glob, ...] = option(
        (),
        "Modules whose parameters are gathered together, usually each layer. A list of modules means its elements.",
        ["model.layers.*"],
    )
    reshard_after_forward: bool | Literal["all_but_last"] | int = option(
        "all_but_last",
        "Whether a unit's gathered parameters are freed after its forward: true, false, `all_but_last` (the last unit, "
        "needed first in backward, is kept), or a number of ranks to keep them sharded over.",
        "all_but_last",
        least=1,
        number="a number of ranks",
    )
    mixed_precision: MixedPrecision | None = option(
        None,
        "Dtypes of parameters, gradient reduction and output.",
        {"param": "bfloat16", "reduce": "float32"},
    )
    cpu_offload: bool | Literal["pinned"] = option(
        False,
        "Keep parameters, gradients and optimizer state in host memory; `pinned`: in pinned memory.",
        "pinned",
    )
    prefetch: Prefetch | None = option(
        None,
        "How far ahead units are gathered. Without it, the backend's own choice.",
        {"forward": 1, "backward": 2},
    )
    frozen: Literal["own", "root", "replicated"] | None = option(
        None,
        "Where frozen modules go. `own`: each outside of the units is a unit of its own. `root`: they are gathered with "
        "the root, also where `units` names them. `replicated`: every data-parallel rank stores all frozen parameters "
        "whole. Without it, they are treated like all others.",
        "own",
    )
    ignored: tuple[Glob, ...] = option(
        (),
        "Frozen parameters, or modules of such, that data parallelism ignores: every data-parallel rank stores them whole.",
        ["model.vision_tower"],
    )
    megatron_fsdp: MegatronFSDP | None = option(
        None,
        "Options of `backend: megatron_fsdp`.",
        {"zero_dp_strategy": "optim_grads", "grad_reduce_in_fp32": True},
    )
    ddp: DDP | None = option(None, "Options of `backend: ddp`.", {"gradient_as_bucket_view": True})


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing(Section):
    """Modules whose activations are not kept but computed again in the backward pass."""

    modules: tuple[Glob, ...] = option(
        (),
        "The modules, usually each layer, or their attention or MLP alone. Without it, the data-parallel units.",
        ["model.layers.*"],
        ["model.layers.*.mlp"],
    )
    mode: Literal["full", "selective"] = option(
        "full",
        "`full`: everything inside is computed again. `selective`: the results of matrix products, of attention and of "
        "collectives are kept, the rest is computed again.",
        "selective",
    )
    every: int = option(
        1,
        "Of the modules that each pattern matches, each n-th alone: with 2 the second, the fourth, ...",
        2,
        least=1,
        most=1000,
    )


@dataclass(frozen=True, slots=True)
class Compile(Section):
    """Modules whose forward is compiled with torch.compile, each on its own."""

    modules: tuple[Glob, ...] = option(
        (), "The modules, usually each layer. Without it, the data-parallel units.", ["model.layers.*"]
    )
    fullgraph: bool = option(True, "A graph break is an error, as in torch.compile.")
    backend: str = option("inductor", "torch.compile's backend.", "inductor", least=1, most=200)
    async_tensor_parallel: bool = option(
        False,
        "Run matrix products while the sequence is gathered and scattered over tp. It needs sequence parallelism, the "
        "backend `inductor` and CUDA.",
    )


@dataclass(frozen=True, slots=True)
class PipelineParallel(Section):
    """How the model is cut into the stages of a pipeline, where the mesh has several ranks on its axis `pp`."""

    layers: Glob | None = option(
        None,
        "The repeated blocks, elements of one list, which run one after another; `none` removes an inherited section.",
        "model.layers.*",
    )
    first: tuple[Glob, ...] = option(
        (),
        "Modules and parameters outside of the blocks that belong to the first stage. Others that have parameters belong "
        "to the stage in which a recorded run of the reduced model reads them.",
        ["model.embed_tokens"],
    )
    last: tuple[Glob, ...] = option((), "The same for the last stage.", ["model.norm", "lm_head"])
    carry: tuple[Glob, ...] = option(
        (),
        "Modules whose output is handed on to the later stages, besides the first result of a block: code of the model "
        "outside of the blocks, or of later blocks, reads it.",
        ["model.layers.*.mlp.gate"],
    )
    sizes: tuple[int, ...] | None = option(
        None,
        "How many blocks each stage has; without it the same number, as far as it divides.",
        [9, 10, 10, 7],
        least=1,
        most=100_000,
    )


@dataclass(frozen=True, slots=True)
class SeparateMatrices(Section):
    """Parameters in which several matrices lie next to each other, and that an optimizer of whole matrices
    (`shardplan.optimizers.Muon`) steps one by one. Their sizes are those of the rules in `tensor_parallel`, on every mesh."""

    parts: tuple[Glob, ...] = option(
        (),
        "Modules and parameters whose rule is packed: each of its parts (queries, keys and values; gate and up) is a matrix.",
        ["model.layers.*.self_attn.qkv_proj", "model.layers.*.mlp.gate_up_proj"],
    )
    heads: tuple[Glob, ...] = option(
        (),
        "Modules and parameters whose split dimension has heads: each head is a matrix.",
        ["model.layers.*.self_attn.{q,k,v}_proj"],
    )


@dataclass(frozen=True, slots=True)
class Sections(Section):
    """The sections of a document; None where it has none."""

    data_parallel: DataParallel | None = option(
        None,
        "How the model is wrapped over the data-parallel ranks.",
        {"backend": "fsdp2", "units": ["model.layers.*"]},
    )
    activation_checkpointing: ActivationCheckpointing | None = option(
        None,
        "Modules whose activations are computed again in the backward pass.",
        {"modules": ["model.layers.*"], "mode": "full"},
    )
    compile: Compile | None = option(
        None, "Modules whose forward is compiled on its own.", {"modules": ["model.layers.*"]}
    )
    pipeline_parallel: PipelineParallel | None = option(
        None, "How the model is cut into the stages of a pipeline.", {"layers": "model.layers.*"}
    )
    separate_matrices: SeparateMatrices | None = option(
        None,
        "Parameters in which several matrices lie next to each other, for optimizers of whole matrices.",
        {"parts": ["model.layers.*.mlp.gate_up_proj"]},
    )
