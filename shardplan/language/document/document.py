"""The whole document."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from shardplan.core.sections import Sections
from shardplan.language.rule_options import none_rule

from .field_values import WORD, AttributeName, ConditionText, Given, GlobText, Strict
from .rule_models import Entry
from .section_models import with_sections


class ExpertParallel(Strict):
    """Rules, and a section inside."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Entry]

    sequence_parallel: dict[GlobText, Entry] = Field(
        default={},
        description="Rules laid over `expert_parallel` when sequence parallelism is on too.",
        examples=[{"model.layers.*.mlp.shared_experts": {"style": "gather_seq_input", "output": "reduce_scatter"}}],
    )


class Document(Strict):
    """How to split a model over ranks: tensor, sequence and data parallelism, activation checkpointing."""

    model_config = ConfigDict(title="shardplan plan", json_schema_extra={"allOf": [none_rule()]})

    version: Literal["1"] = Field(
        description='The version of the plan language, as text: `version: "1"`.', examples=["1"]
    )
    name: Given[Annotated[str, Field(pattern=WORD, max_length=100)]] = Field(
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
    configurations: Given[ConditionText] = Field(
        default=None,
        alias="for",
        description="The plan is for models of whose configuration this condition holds; others are refused.",
        examples=["num_local_experts > 0"],
    )
    extends: Given[Annotated[str, Field(pattern=r"^[^/\\]+$", max_length=255)]] = Field(
        default=None,
        description="The plan that this one extends: the name of a built-in plan, or a file next to this one "
        "(a name that ends in .yaml, .yml or .json).",
        examples=["llama", "base.yaml"],
    )
    refused_arguments: list[AttributeName] = Field(
        default=[],
        description="Arguments of the model's `forward` that keep their defaults. The plan is not proven for calls with other values; the "
        "split model raises an error then.",
        examples=[["return_attention"]],
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
    expert_parallel: ExpertParallel = Field(
        default_factory=lambda: ExpertParallel.model_validate({}),
        description="Rules laid over the others when the mesh has several ranks on its axis `ep`.",
        examples=[{"model.layers.*.mlp.experts": "ep_dispatch"}],
    )
    context_parallel: dict[GlobText, Entry] = Field(
        default={},
        description="Rules for the axis `cp`, in addition to those for tp: where a sequence is split over it, where a module needs all of it, and "
        "where it is whole again. All other modules work token by token.",
        examples=[{"model.layers.0": "split_seq_input", "model.layers.*.self_attn": "replicate_seq"}],
    )


PlanDocument = with_sections("PlanDocument", Document.__doc__, Document, Sections)
