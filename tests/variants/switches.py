"""The switches of a model type: single fields of its configuration that change its modules or its forward."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES

from shardplan.compiler.layout import RecordedModel
from shardplan.core.diagnostics import PlanError
from shardplan.model import find_any
from shardplan.model.build_tree import tree_of
from shardplan.model.reduced.reduced_model import ReducedModel, make_reduced_model
from tests.model_settings import SETTINGS

from .outcome import configured

# Fields that say how a model is called or trained, not what it computes.
IGNORED = re.compile(
    r"_.*|allow_global_per_layer_attribute_access|use_cache|return_dict|output_.*|torchscript|is_decoder|is_encoder_decoder|add_cross_attention|use_bfloat16"
    r"|tie_encoder_decoder|use_mamba_kernels|use_mambapy|use_associative_scan|use_falcon_mambapy|use_xlstm_kernels"
    r"|cross_attention_hidden_size|rescale_prenorm_residual|.*_loss|num_logits_to_keep|return_last_states"
)
EXPERTS = re.compile(r"(moe_)?(num|n)_(local_|routed_|shared_)?experts|moe_num_(shared_)?experts")
CHOSEN = re.compile(r"(num_)?experts_per_tok(en)?|moe_k|moe_top_?k|num_experts_per_token|top_k_experts|num_selects")
DENSE = re.compile(r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_first_dense_layers")
KEYS = re.compile(r"num_key_value_heads|num_kv_heads")
WINDOW = re.compile(r"(use_)?sliding_window(_size)?|attention_window_size")
RANK = re.compile(r"(q|kv|o)_lora_rank|.*_latent_size")
STEPS = re.compile(
    r"decoder_sparse_step|moe_layer_freq|expert_layer_period|moe_layer_interval|interleave_moe_layer_step"
)
ZERO = re.compile(r"num_kv_shared_layers|hidden_size_per_layer_input|shared_(expert_)?intermediate_size")
LAYERS = re.compile(r"(.*_)?layer_types|layers_block_type|block_types|mlp_only_layers|.*_layer_indices|no_rope_layers")
WIDTH = 256  # of a rank that is set where there is none
# What is changed; by default the router of these has one expert, and no gradient.
BASES = SETTINGS | {"hunyuan_v1_moe": SETTINGS["hunyuan_v1_moe"] | {"num_experts": 8, "moe_topk": 2}}


def candidates(model_type: str) -> dict[str, dict[str, Any]]:
    """Name -> the fields that are changed, of the default configuration of the type or the nearest that can be built. The name
    is the field and its value. Some change nothing that a plan is about.
    """
    config = configured(model_type, BASES.get(model_type, {}))
    return {f"{field}={_text(value)}": _change(config, field, value) for field, value in _values_of(config)}


def switches(model_type: str) -> dict[str, dict[str, Any]]:
    """The candidates that change a module or an operation, each such change once; and those that cannot be built."""
    base = BASES.get(model_type, {})
    seen = {_shape(configured(model_type, base))}
    found: dict[str, dict[str, Any]] = {}
    for name, change in candidates(model_type).items():
        shape = _shape_of(model_type, {**base, **change})
        if shape is None or shape not in seen:
            found[name] = change
        seen.add(shape)
    return found


def _values_of(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    config.allow_global_per_layer_attribute_access = True
    heads = getattr(config, "num_attention_heads", None)
    depth = getattr(config, "num_hidden_layers", None)
    for field, now in sorted(vars(config).items()):
        for value in _values(field, now, heads, depth):
            if value != now:
                yield field, value
    for field, now in sorted(vars(config).items()):
        if LAYERS.fullmatch(field) and isinstance(now, (list, tuple)) and now and isinstance(now[0], str):
            for kind in sorted(layer_kinds(config, field) - {*now}):
                yield field, [kind if i % 2 else now[0] for i in range(len(now))]


def layer_kinds(config: PreTrainedConfig, field: str) -> set[str]:
    """The kinds of layers that the code of a model type names, of those that a field may have."""
    folder = Path(inspect.getfile(type(config))).parent
    code = " ".join(file.read_text("utf-8") for file in folder.glob("*.py") if not file.name.startswith("modular"))
    return {
        kind
        for kind in (ALLOWED_MLP_LAYER_TYPES if "mlp" in field else ALLOWED_ATTN_LAYER_TYPES)
        if f'"{kind}"' in code
    }


def _values(field: str, now: Any, heads: int | None, depth: int | None) -> tuple[Any, ...]:
    if IGNORED.fullmatch(field):
        return ()
    if isinstance(now, bool):
        return (not now,)
    if EXPERTS.fullmatch(field):
        return (0, 1, 2) if "shared" in field else (0, 8)
    if DENSE.fullmatch(field) and depth:
        return (0, 1, depth)
    if KEYS.fullmatch(field) and heads:
        return (1, heads)
    if WINDOW.fullmatch(field):
        return (None, 8)
    if RANK.fullmatch(field):
        return (None, WIDTH)
    if STEPS.fullmatch(field):
        return (1, 2)
    if ZERO.fullmatch(field):
        return (0, WIDTH) if "intermediate" in field else (0,)
    if LAYERS.fullmatch(field):
        return tuple(_patterns(now))
    return ()


def _change(config: PreTrainedConfig, field: str, value: Any) -> dict[str, Any]:
    """The field, and how many experts read a token, where there would be fewer experts than that."""
    if not EXPERTS.fullmatch(field) or "shared" in field or not value:
        return {field: value}
    read = {name: now for name, now in vars(config).items() if CHOSEN.fullmatch(name) and isinstance(now, int)}
    return {field: value} | {name: value for name, now in read.items() if now > value}


def _patterns(now: Any) -> Iterator[Any]:
    """All layers of one kind, each kind; and the kinds in the reverse order."""
    if isinstance(now, (list, tuple)) and now and all(isinstance(kind, str) for kind in now):
        for kind in sorted(set(now)):
            yield [kind] * len(now)
        yield list(reversed(now))
    elif now is None or now == []:
        yield [0]
    else:
        yield []


def _shape_of(model_type: str, settings: Mapping[str, Any]) -> tuple[Any, ...] | None:
    try:
        return _shape(configured(model_type, settings))
    except Exception:  # of the configuration or of the model's own code
        return None


def _shape(config: PreTrainedConfig) -> tuple[Any, ...]:
    """The modules and parameters of the model, and the operations of its reduced model."""
    found = find_any(config)
    parameters = tuple((name, parameter.shape) for name, (_, parameter) in found.tree.parameters.items())
    try:
        reduced = make_reduced_model(found, tp=2, experts_implementation="eager")
    except PlanError as error:
        return (parameters, found.tree.tied, error.diagnostics[0].message)
    return (parameters, found.tree.tied, _operations(reduced))


def _operations(reduced: ReducedModel) -> tuple[Any, ...]:
    model = reduced.build()
    events = RecordedModel(model, reduced.inputs(), tree_of(model)).reference.events
    return tuple((event.kind, event.name, event.place) for event in events)


def _text(value: Any) -> str:
    """A value in a name; of a list its kinds, in their order."""
    if isinstance(value, list) and len(value) > 1:
        return " and ".join(dict.fromkeys(map(str, value))) + " layers"
    return str(value)
