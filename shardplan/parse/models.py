"""The document as pydantic models: which fields there are and what each may hold.

The JSON Schema is made from them; the texts are what an editor shows. What a style takes is not said here: it
follows from the style records (`options`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from shardplan.backends import BACKENDS
from shardplan.core import expressions, globs
from shardplan.core.plan import DDP, ActivationCheckpointing, Compile, DataParallel, MegatronFSDP, MixedPrecision, Rule

from .options import none_rule, option_rules, style_schema

WORD = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
ATTRIBUTE = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"

TAGS: set[str] = set()  # the words for the types of fields that may have several


def either(*options: tuple[type, Any, str]) -> Any:
    """A field of several types.

    Args:
        options: for each the Python type of the value, the annotation, and its words in a message.
    """
    words = {cls: text for cls, _, text in options}
    literals = {cls: get_args(one) for cls, one, _ in options if get_origin(one) is Literal}
    tagged = tuple(Annotated[annotation, Tag(text)] for _, annotation, text in options)
    TAGS.update(words.values())

    def choose(value: Any) -> str:
        fits = type(value) in words and value in literals.get(type(value), (value,))
        return words[type(value)] if fits else ""

    return Annotated[Union[tagged], Discriminator(choose)]  # noqa: UP007  of a tuple


def one_of(words: Iterable[str]) -> Any:
    """A field that is one of some words."""
    return Literal[tuple(words)]


def _default(cls: type, name: str) -> Any:
    """The default of a dataclass's field, for documentation: no document is completed from here."""
    return cls.__dataclass_fields__[name].default


GlobText = Annotated[
    str,
    Field(
        min_length=1,
        max_length=globs.MAX_LENGTH,
        description="A glob over whole dotted names: `*`, `?` and `[...]` never match a dot, `**` matches "
        "zero or more segments, `{a,b}` are alternatives.",
        examples=["model.layers.*"],
    ),
]
ExpressionText = Annotated[
    str,
    Field(
        min_length=1,
        max_length=expressions.MAX_LENGTH,
        description="An expression over the numbers of the model's configuration, with + - * // and parentheses.",
        examples=["num_key_value_heads * (hidden_size // num_attention_heads)"],
    ),
]
AttributeName = Annotated[str, Field(pattern=ATTRIBUTE, max_length=200)]
StyleName = TypeAliasType("StyleName", Annotated[str, WithJsonSchema(style_schema())])
Dtype = Literal["bfloat16", "float16", "float32"]

PartCount = Annotated[int, Field(ge=2, description="The number of parts, all of one size.")]
PartSize = either((int, Annotated[int, Field(ge=1)], "a whole number"), (str, ExpressionText, "an expression"))
PartSizes = Annotated[list[PartSize], Field(min_length=2, description="The sizes of the parts.")]
Packed = either((int, PartCount, "a whole number"), (list, PartSizes, "a list of sizes"))
Expressions = either(
    (str, ExpressionText, "an expression"),
    (list, Annotated[list[ExpressionText], Field(min_length=1)], "a list of them"),
)
Attributes = either(
    (str, AttributeName, "the name of an attribute"),
    (list, Annotated[list[AttributeName], Field(min_length=1)], "a list of them"),
)
Reshard = either(
    (bool, bool, "true, false"),
    (str, Literal["all_but_last"], "`all_but_last`"),
    (int, Annotated[int, Field(ge=1)], "a number of ranks"),
)
BackendName = one_of(BACKENDS)
CpuOffload = either((bool, bool, "true, false"), (str, Literal["pinned"], "`pinned`"))


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


ALONE = ("sum_outputs", "optional")  # what a rule without a style may say
SAYS_SOMETHING = {
    "anyOf": [{"required": ["style"]}, {"required": ["sum_outputs"], "propertyNames": {"enum": list(ALONE)}}]
}


class RuleOptions(_Model):
    """A style together with options, or `sum_outputs` alone."""

    model_config = ConfigDict(json_schema_extra={"allOf": [SAYS_SOMETHING, *option_rules()]})

    style: StyleName = Field(
        default=None, description="What to do with the modules or parameters.", examples=["colwise"]
    )
    optional: bool = Field(
        default=_default(Rule, "optional"),
        description="The rule may match nothing. Without it, a rule that matches no module and no parameter "
        "is an error.",
        examples=[True],
    )
    override: bool = Field(
        default=_default(Rule, "override"),
        description="The rule may differ from an earlier rule of the same section for the same module, and "
        "replaces it there. Without it, two different rules for one module are an error.",
        examples=[True],
    )
    argument: AttributeName = Field(
        default=None,
        description="The argument of the module's `forward` that is moved. Without it, the first.",
        examples=["hidden_states"],
    )
    grad: Literal["partial", "complete"] = Field(
        default=None,
        description="What the readers of a gathered value hand back: `partial` where each rank has a part "
        "of its gradient (column-wise matrices read it), `complete` where every rank has all of it. Without "
        "it, it is found from the structure.",
        examples=["complete"],
    )
    output: Literal["gather", "all_reduce", "reduce_scatter"] = Field(
        default=None,
        description="What the module's output goes through: `gather` hands the whole sequence on, "
        "`all_reduce` adds up the ranks' partial sums, `reduce_scatter` adds them up and splits the result "
        "along the sequence.",
        examples=["gather"],
    )
    packed: Packed = Field(
        default=None,
        description="The parts of a packed dimension, each of which is split: their sizes, or their number "
        "where they are equal. Without it, two equal parts.",
        examples=[3, ["hidden_size", "num_key_value_heads * head_dim", "num_key_value_heads * head_dim"]],
    )
    divide: Attributes = Field(
        default=None,
        description="Attributes of the module to divide by tp, because its forward counts with them. What "
        "begins with `config.` is changed in a copy of the configuration.",
        examples=[["num_heads"], "config.num_attention_heads"],
    )
    divides: Expressions = Field(
        default=None,
        description="Numbers of the model's configuration that tp must divide.",
        examples=["num_key_value_heads"],
    )
    seq_dim: int = Field(
        default=_default(Rule, "seq_dim"),
        ge=0,
        le=8,
        description="The sequence dimension of what is moved: 1 in [batch, sequence, hidden].",
        examples=[0],
    )
    read_outside: list[Annotated[int, Field(ge=0, le=100)]] = Field(
        default=None,
        min_length=1,
        description="Positions in the module's output that are also read outside the tensor-parallel region "
        "by something that every rank computes in full, like an auxiliary loss on router logits.",
        examples=[[0]],
    )
    regather: bool = Field(
        default=_default(Rule, "regather"),
        description="Keep the rank's shard of the sequence for the backward pass in place of the gathered one, and gather "
        "it again there: less memory for one more all-gather.",
        examples=[True],
    )
    sum_outputs: list[GlobText] = Field(
        default=None,
        description="Modules below this block, named from it in the order in which they run, whose partial sums the block's "
        "code adds up and does nothing else with: they are added on each rank and reduced once, at the last of them. With "
        "`optional`, each is reduced by itself where a model's block does something else. An empty list takes back what an "
        "earlier rule says.",
        examples=[["self_attn.o_proj", "mlp.down_proj"]],
    )

    @model_validator(mode="after")
    def _says_something(self) -> RuleOptions:
        if self.style is None and (self.sum_outputs is None or not self.model_fields_set <= set(ALONE)):
            raise PydanticCustomError("without_style", "no style")
        return self


Entry = TypeAliasType(
    "Entry",
    either((str, StyleName, "the name of a style"), (dict, RuleOptions, "a mapping with a style and its options")),
)


class MixedPrecisionFields(_Model):
    """The dtypes of FSDP2's mixed precision. What is left out keeps the model's dtype."""

    param: Dtype = Field(default=None, description="The dtype in which layers compute.", examples=["bfloat16"])
    reduce: Dtype = Field(default=None, description="The dtype in which gradients are added up.", examples=["float32"])
    output: Dtype = Field(default=None, description="The dtype of the model's output.", examples=["float32"])
    cast_forward_inputs: bool = Field(
        default=_default(MixedPrecision, "cast_forward_inputs"),
        description="Cast the inputs of each unit to `param`.",
        examples=[False],
    )


class PrefetchFields(_Model):
    """How many units to gather ahead of the one that computes."""

    forward: int = Field(default=None, ge=0, le=1000, description="Units ahead in the forward pass.", examples=[1])
    backward: int = Field(default=None, ge=0, le=1000, description="Units ahead in the backward pass.", examples=[2])


Strategy = either(
    (int, Annotated[int, Field(ge=0, le=3)], "a number from 0 to 3"),
    (
        str,
        Literal["no_shard", "optim", "optim_grads", "optim_grads_params"],
        "`no_shard`, `optim`, `optim_grads`, `optim_grads_params`",
    ),
)
OuterStrategy = either(
    (int, Annotated[int, Field(ge=0, le=1)], "0 or 1"), (str, Literal["no_shard", "optim"], "`no_shard`, `optim`")
)


def _switch(name: str, description: str, cls: type = MegatronFSDP) -> Any:
    default = _default(cls, name)
    return Field(default=default, description=description, examples=[not default])


class MegatronFSDPFields(_Model):
    """The options of Megatron-FSDP, with the defaults of the package megatron-fsdp 0.6."""

    zero_dp_strategy: Strategy = Field(
        default=_default(MegatronFSDP, "zero_dp_strategy"),
        description="What is sharded over `dp_shard`: 0 (`no_shard`) nothing, 1 (`optim`) optimizer state, 2 "
        "(`optim_grads`) gradients too, 3 (`optim_grads_params`) parameters too.",
        examples=["optim_grads"],
    )
    outer_dp_sharding_strategy: OuterStrategy = Field(
        default=_default(MegatronFSDP, "outer_dp_sharding_strategy"),
        description="What is sharded over `dp_replicate`: 0 (`no_shard`) nothing, 1 (`optim`) optimizer state, which "
        "needs `zero_dp_strategy: 3`.",
        examples=["optim"],
    )
    init_model_with_meta_device: bool = Field(
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


class DDPFields(_Model):
    """The options of torch's DistributedDataParallel, with its defaults."""

    broadcast_buffers: bool = _switch(
        "broadcast_buffers", "Buffers are sent from the first rank before each forward.", DDP
    )
    find_unused_parameters: bool = _switch(
        "find_unused_parameters", "Trained parameters may be without a gradient in a step.", DDP
    )
    static_graph: bool = _switch("static_graph", "The same parameters are used in every step.", DDP)
    bucket_cap_mb: int = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="The size of a bucket of gradients in MiB. Without it, torch's own.",
        examples=[100],
    )
    gradient_as_bucket_view: bool = _switch("gradient_as_bucket_view", "Gradients are views of the buckets.", DDP)


class DataParallelFields(_Model):
    """How the model is wrapped over the data-parallel ranks."""

    backend: BackendName = Field(
        default=_default(DataParallel, "backend"),
        description=" ".join(f"`{backend.name}`: {backend.summary}." for backend in BACKENDS.values()),
        examples=["fsdp2"],
    )
    units: list[GlobText] = Field(
        default=list(_default(DataParallel, "units")),
        description="Modules whose parameters are gathered together, usually each layer. A list of modules stands "
        "for its elements.",
        examples=[["model.layers.*"]],
    )
    reshard_after_forward: Reshard = Field(
        default=_default(DataParallel, "reshard_after_forward"),
        description="Whether a unit's gathered parameters are freed after its forward: true, false, "
        "`all_but_last` (the last unit, needed first in backward, is kept), or a number of ranks to keep "
        "them sharded over.",
        examples=["all_but_last"],
    )
    mixed_precision: MixedPrecisionFields = Field(
        default=None,
        description="Dtypes of parameters, gradient reduction and output.",
        examples=[{"param": "bfloat16", "reduce": "float32"}],
    )
    cpu_offload: CpuOffload = Field(
        default=_default(DataParallel, "cpu_offload"),
        description="Keep parameters, gradients and optimizer state in host memory; `pinned`: in pinned memory.",
        examples=["pinned"],
    )
    prefetch: PrefetchFields = Field(
        default=None,
        description="How far ahead units are gathered. Without it, the backend's own choice.",
        examples=[{"forward": 1, "backward": 2}],
    )
    frozen: Literal["own", "root", "replicated"] = Field(
        default=None,
        description="Where frozen modules go. `own`: each outside of the units is a unit of its own. `root`: they are "
        "gathered with the root, also where `units` names them. `replicated`: every data-parallel rank holds all frozen "
        "parameters whole. Without it, they are treated as all others.",
        examples=["own"],
    )
    ignored: list[GlobText] = Field(
        default=list(_default(DataParallel, "ignored")),
        description="Frozen parameters, or modules of such, that are left alone: every data-parallel rank holds them whole.",
        examples=[["model.vision_tower"]],
    )
    megatron_fsdp: MegatronFSDPFields = Field(
        default=None,
        description="Options of `backend: megatron_fsdp`.",
        examples=[{"zero_dp_strategy": "optim_grads", "grad_reduce_in_fp32": True}],
    )
    ddp: DDPFields = Field(
        default=None, description="Options of `backend: ddp`.", examples=[{"gradient_as_bucket_view": True}]
    )


class ActivationCheckpointingFields(_Model):
    """Modules whose activations are not kept but computed again in the backward pass."""

    modules: list[GlobText] = Field(
        default=list(_default(ActivationCheckpointing, "modules")),
        description="The modules, usually each layer, or their attention or MLP alone. Without it, the data-parallel "
        "units.",
        examples=[["model.layers.*"], ["model.layers.*.mlp"]],
    )
    mode: Literal["full", "selective"] = Field(
        default=_default(ActivationCheckpointing, "mode"),
        description="`full`: everything inside is computed again. `selective`: the results of matrix products, of "
        "attention and of collectives are kept, the rest is computed again.",
        examples=["selective"],
    )
    every: int = Field(
        default=_default(ActivationCheckpointing, "every"),
        ge=1,
        le=1000,
        description="Of the modules that each pattern matches, each n-th alone: with 2 the second, the fourth, ...",
        examples=[2],
    )


class CompileFields(_Model):
    """Modules whose forward is compiled with torch.compile, each on its own."""

    modules: list[GlobText] = Field(
        default=list(_default(Compile, "modules")),
        description="The modules, usually each layer. Without it, the data-parallel units.",
        examples=[["model.layers.*"]],
    )
    fullgraph: bool = Field(
        default=_default(Compile, "fullgraph"),
        description="A graph break is an error, as in torch.compile.",
        examples=[False],
    )
    backend: str = Field(
        default=_default(Compile, "backend"),
        min_length=1,
        max_length=200,
        description="torch.compile's backend.",
        examples=["inductor"],
    )
    async_tensor_parallel: bool = Field(
        default=_default(Compile, "async_tensor_parallel"),
        description="Run matrix products while the sequence is gathered and scattered over tp. It needs sequence "
        "parallelism, the backend `inductor` and CUDA.",
        examples=[True],
    )


class PlanDocument(_Model):
    """How to split a model over ranks: tensor, sequence and data parallelism, activation checkpointing."""

    model_config = ConfigDict(title="shardplan plan", json_schema_extra={"allOf": [none_rule()]})

    version: Literal["1"] = Field(
        description='The version of the plan language, as text: `version: "1"`.', examples=["1"]
    )
    name: Annotated[str, Field(pattern=WORD, max_length=100)] = Field(
        default=None, description="The plan's name. Without it, the file's name.", examples=["llama"]
    )
    description: str = Field(
        default="", description="What the plan is for, in a sentence.", examples=["Llama-like dense decoders"]
    )
    models: list[Annotated[str, Field(pattern=WORD, max_length=100)]] = Field(
        default=[],
        description="The models that the plan is for: Hugging Face model types (`config.model_type`) or class names.",
        examples=[["llama", "LlamaForCausalLM"]],
    )
    extends: Annotated[str, Field(pattern=r"^[^/\\]+$", max_length=255)] = Field(
        default=None,
        description="The plan that this one extends: the name of a built-in plan, or a file beside this one "
        "(a name that ends in .yaml, .yml or .json).",
        examples=["llama", "base.yaml"],
    )
    tensor_parallel: dict[GlobText, Entry] = Field(
        default={},
        description="A style for each glob over names of modules or parameters.",
        examples=[{"model.layers.*.mlp.down_proj": "rowwise"}],
    )
    sequence_parallel: dict[GlobText, Entry] = Field(
        default={},
        description="Rules laid over `tensor_parallel` when sequence parallelism is on.",
        examples=[{"model.layers.*.mlp.down_proj": "rowwise_seq"}],
    )
    data_parallel: DataParallelFields = Field(
        default=None,
        description="How the model is wrapped over the data-parallel ranks.",
        examples=[{"backend": "fsdp2", "units": ["model.layers.*"]}],
    )
    activation_checkpointing: ActivationCheckpointingFields = Field(
        default=None,
        description="Modules whose activations are computed again in the backward pass.",
        examples=[{"modules": ["model.layers.*"], "mode": "full"}],
    )
    compile: CompileFields = Field(
        default=None,
        description="Modules whose forward is compiled on its own.",
        examples=[{"modules": ["model.layers.*"]}],
    )
