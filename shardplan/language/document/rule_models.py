"""What a rule may say, apart from its key, the pattern."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from shardplan.core.module_program import Exchange
from shardplan.core.plan import Output, Rule
from shardplan.language.rule_options import moving_styles, option_rules, style_schema

from .field_values import AttributeName, ConditionText, Either, ExpressionText, Given, GlobText, Strict, default_of

StyleName = TypeAliasType("StyleName", Annotated[str, WithJsonSchema(style_schema())])

PartCount = Annotated[int, Field(ge=2, description="The number of parts, all of one size.")]
Count = Annotated[Annotated[int, Field(ge=1)] | ExpressionText, Either({int: "a whole number", str: "an expression"})]
PartSizes = Annotated[list[Count], Field(min_length=2, description="The sizes of the parts.")]
Packed = Annotated[
    PartCount | ExpressionText | PartSizes,
    Either({int: "a whole number", str: "an expression", list: "a list of sizes"}),
]
Counts = Annotated[
    Annotated[int, Field(ge=1)] | ExpressionText | Annotated[list[Count], Field(min_length=1)],
    Either({int: "a whole number", str: "an expression", list: "a list of them"}),
]
Expressions = Annotated[
    ExpressionText | Annotated[list[ExpressionText], Field(min_length=1)],
    Either({str: "an expression", list: "a list of them"}),
]
MovedArguments = Annotated[
    dict[AttributeName, Annotated[str, WithJsonSchema({"type": "string", "enum": list(moving_styles())})]],
    Field(min_length=1),
]

TENSOR_OR_GROUP: JsonDict = {
    "anyOf": [
        {"required": ["dim"], "not": {"anyOf": [{"required": ["groups"]}, {"required": ["heads", "like"]}]}},
        {"required": ["groups"], "maxProperties": 1},
    ]
}


class ShareOptions(Strict):
    """The share of a tensor, with `dim`, or of a norm's number, with `groups`."""

    model_config = ConfigDict(json_schema_extra=TENSOR_OR_GROUP)

    dim: Given[Annotated[int, Field(ge=0, le=8)]] = Field(
        default=None,
        description="The name is that of an argument of `forward` or of a buffer, and this the dim that has the heads or features.",
        examples=[0],
    )
    heads: Given[Count] = Field(
        default=None,
        description="Of an argument whose dim is [batch * heads]: how many heads follow each other in it.",
        examples=["n_head", 8],
    )
    like: Given[AttributeName] = Field(
        default=None,
        description="Of a buffer that has the output features of a module below: that module, whose rule says how they are split.",
        examples=["in_proj"],
    )
    groups: Given[Count] = Field(
        default=None,
        description="How many groups a norm has, each with a mean of its own; the name is that of the number of groups, or of the length of a "
        "group. With fewer groups than ranks, several neighbouring ranks share a group, and its length is divided by their number.",
        examples=["n_groups", 2],
    )

    @model_validator(mode="after")
    def _one_form(self) -> ShareOptions:
        of_tensor = self.dim is not None and self.groups is None and None in (self.heads, self.like)
        if not of_tensor and self.model_fields_set != {"groups"}:
            raise PydanticCustomError("share_form", "neither the share of a tensor nor that of a norm's number")
        return self


NamedShares = Annotated[
    dict[
        AttributeName,
        Annotated[
            ExpressionText | ShareOptions, Either({str: "an expression", dict: "a mapping with `dim` or `groups`"})
        ],
    ],
    Field(min_length=1),
]
Shares = Annotated[
    AttributeName
    | NamedShares
    | list[Annotated[AttributeName | NamedShares, Either({str: "the name of a number", dict: "a mapping"})]],
    Either({str: "the name of a number", dict: "a mapping", list: "a list of names and mappings"}),
]

ALONE = ("sum_outputs", "optional", "when", "having")  # what a rule without a style may say
NOT_EMPTY: JsonDict = {
    "anyOf": [{"required": ["style"]}, {"required": ["sum_outputs"], "propertyNames": {"enum": list(ALONE)}}]
}


class RuleOptions(Strict):
    """A style together with options, or `sum_outputs` alone."""

    model_config = ConfigDict(json_schema_extra={"allOf": [NOT_EMPTY, *option_rules()]})

    style: Given[StyleName] = Field(
        default=None, description="What to do with the modules or parameters.", examples=["colwise"]
    )
    optional: bool = Field(
        default=default_of(Rule, "optional"),
        description="The rule may match nothing. Without it, a rule that matches no module and no parameter "
        "is an error.",
        examples=[True],
    )
    override: bool = Field(
        default=default_of(Rule, "override"),
        description="The rule may differ from an earlier rule of the same section for the same module, and "
        "replaces it there. Without it, two different rules for one module are an error.",
        examples=[True],
    )
    argument: Given[AttributeName] = Field(
        default=None,
        description="The argument of the module's `forward` that is moved. Without it, the first.",
        examples=["hidden_states"],
    )
    arguments: Given[MovedArguments] = Field(
        default=None,
        description="Further arguments of the module's `forward` that are moved, and the block input's style of each: the streams of a "
        "joint attention, the text of a cross-attention. `grad`, `seq_dim` and `regather` of the rule are theirs too.",
        examples=[{"encoder_hidden_states": "input_with_grad_allreduce"}],
    )
    grad: Given[Literal["partial", "complete"]] = Field(
        default=None,
        description="The gradient that the readers of a gathered value return: `partial` where each rank has a part "
        "of its gradient (column-wise matrices read it), `complete` where every rank has all of it. Without "
        "it, it is derived from the structure; of features that are gathered it is complete.",
        examples=["complete"],
    )
    output: Given[Output] = Field(
        default=None,
        description="The collective on the module's output: `gather` returns the whole sequence, "
        "`all_reduce` adds up the ranks' partial sums, `reduce_scatter` adds them up and splits the result "
        "along the sequence.",
        examples=["gather"],
    )
    packed: Given[Packed] = Field(
        default=None,
        description="The parts of a packed dimension; each is split by itself. Their sizes, or their number "
        "where they are equal. Without it, two equal parts.",
        examples=[3, ["hidden_size", "num_key_value_heads * head_dim", "num_key_value_heads * head_dim"]],
    )
    heads: Given[Counts] = Field(
        default=None,
        description="How many heads, or groups of a state space layer, the split dimension has; of packed parts, one for each. With fewer "
        "of them than ranks, several neighbouring ranks compute with one. Without it, the structure tells.",
        examples=[["num_heads", "num_heads", "n_groups", "n_groups", "num_heads"], "num_key_value_heads", 8],
    )
    shares: Given[Shares] = Field(
        default=None,
        description="Numbers, arguments and buffers of the module that are divided over the ranks. A number that its forward uses: its name "
        "alone divides it by tp; an expression over the module's own numbers computes it, from a rank's share of the numbers that "
        "have one. A norm's number, with `groups`. An argument of its forward or a buffer, with the `dim` that is split. A name with "
        "dots (`config.n_head`, `lengths.0`) is changed in a copy of what holds it. A rule of `sequence_parallel` keeps the shares of the rule "
        "that it is laid over; `[]` is none.",
        examples=[
            "config.num_attention_heads",
            ["num_heads", {"conv_dim": "intermediate_size + 2 * n_groups * ssm_state_size"}],
            {"alibi": {"dim": 0, "heads": "n_head"}},
        ],
    )
    fused: bool = Field(
        default=default_of(Rule, "fused"),
        description="False: the module does not take a path for training that computes modules below it in one kernel, which "
        "would skip their moves. `training` is False for it, not for the modules below, while its own code runs.",
        examples=[False],
    )
    divides: Given[Expressions] = Field(
        default=None,
        description="Numbers of the model's configuration that tp must divide.",
        examples=["num_key_value_heads"],
    )
    seq_dim: int = Field(
        default=default_of(Rule, "seq_dim"),
        ge=0,
        le=8,
        description="The sequence dimension of the value that is moved: 1 in [batch, sequence, hidden].",
        examples=[0],
    )
    read_outside: Given[list[Annotated[int, Field(ge=0, le=100)]]] = Field(
        default=None,
        min_length=1,
        description="Positions in the module's output that are also read outside the tensor-parallel region "
        "by something that every rank computes in full, like an auxiliary loss on router logits. Slices of tokens are gathered there.",
        examples=[[0]],
    )
    exchange: Given[Exchange] = Field(
        default=None,
        description="How tokens are sent to the ranks of their experts: `once` to each rank that has some of them, which adds "
        "up their weighted results (the default), `pairs` once for each of their experts.",
        examples=["pairs"],
    )
    regather: bool = Field(
        default=default_of(Rule, "regather"),
        description="Keep the rank's shard of the sequence for the backward pass instead of the gathered one, and gather "
        "it again there: less memory, one more all-gather.",
        examples=[True],
    )
    sum_outputs: Given[list[GlobText]] = Field(
        default=None,
        description="Modules below this block, named from it, in the order in which they run. The block's code adds up their partial sums and "
        "does nothing else with them: they are added on each rank and reduced once, at the last of the modules. With `optional`, "
        "each is reduced by itself where a model's block does something else. An empty list takes back what an earlier rule says.",
        examples=[["self_attn.o_proj", "mlp.down_proj"]],
    )

    having: Given[AttributeName] = Field(
        default=None,
        description="The rule is only for modules that have a module or a parameter of this name below them, or a number of this name: blocks of "
        "one kind among several, or a module as one release of its code has it.",
        examples=["experts"],
    )
    when: Given[ConditionText] = Field(
        default=None,
        description="The rule is for models of whose configuration this condition holds; for others the plan is without it.",
        examples=["use_qk_norm"],
    )

    @model_validator(mode="after")
    def _not_empty(self) -> RuleOptions:
        if self.style is None and (self.sum_outputs is None or not self.model_fields_set <= set(ALONE)):
            raise PydanticCustomError("without_style", "no style")
        return self


RuleList = Annotated[
    list[RuleOptions],
    Field(min_length=2, description="Rules of one key, for different configurations: each says `when`."),
]
Entry = TypeAliasType(
    "Entry",
    Annotated[
        StyleName | RuleOptions | RuleList,
        Either(
            {
                str: "the name of a style",
                dict: "a mapping with a style and its options",
                list: "a list of such mappings",
            }
        ),
    ],
)
