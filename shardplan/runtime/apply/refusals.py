"""Calls that a split model cannot answer like the unsharded one: refused before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardplan.model.adapters import is_wrapper
from shardplan.model.float8 import is_float8
from shardplan.model.forward_code import parameters_of
from shardplan.styles.boundary import returns_tokens

from .watched import Looks, Watched

# Methods that would change or write parameters as if they were whole -> the alternative.
INSTEAD = {
    "resize_token_embeddings": "resize the embeddings before apply_plan",
    "set_input_embeddings": "replace the embeddings before apply_plan",
    "set_output_embeddings": "replace the output head before apply_plan",
    "save_pretrained": "call shardplan.save_checkpoint(model, folder), or pass a whole state_dict=",
}

_MERGE = "merge before apply_plan, or in an unsharded model that has read the adapters that were saved"
_ADD = "add all adapters before apply_plan, and choose among them with set_adapter"
_DELETE = "delete the adapter before apply_plan, or choose another one with set_adapter"
# The same for adapters: the names of peft's models, transformers' and diffusers'.
_OF_ADAPTERS = {
    **dict.fromkeys(("merge_and_unload", "merge_adapter", "unmerge_adapter", "unload"), _MERGE),
    **dict.fromkeys(("fuse_lora", "unfuse_lora", "unload_lora"), _MERGE),
    **dict.fromkeys(
        ("add_adapter", "inject_adapter", "load_adapter", "load_lora_adapter", "add_weighted_adapter"), _ADD
    ),
    **dict.fromkeys(("delete_adapter", "delete_adapters"), _DELETE),
}
# The same for one layer with adapters.
_OF_LAYERS = {"merge": _MERGE, "unmerge": _MERGE, "update_layer": _ADD, "delete_adapter": _DELETE}


# Switches of a forward that raise where ranks have different heads -> why.
REFUSED_SWITCHES = {"output_attentions": "every rank computes its own heads only"}


def no_attention_maps(watched: Watched) -> Looks:
    """Raise ValueError for `output_attentions=True` where each rank has only its own heads' attention maps: on several tp ranks, and where
    heads are exchanged over cp."""

    def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
            raise ValueError(
                f"output_attentions=True: {REFUSED_SWITCHES['output_attentions']}, and the "
                "attention maps are not gathered; get them from the unsharded model"
            )

    return {watched.inner: look} if watched.mesh.tp_size > 1 or watched.program.exchanges_heads else {}


def no_refused_arguments(watched: Watched) -> Looks:
    """Raise ValueError where a call gives an argument that the plan refuses another value than its default, or where the configuration's
    field of this name has another value now."""
    config = getattr(watched.inner, "config", None)
    places = list(enumerate(parameters_of(watched.inner).items()))
    known = {name: (place, one.default) for place, (name, one) in places if one.default is not one.empty}
    refused = {}
    for name in watched.program.resolved.plan.refused:
        place, default = known.get(name, (len(places), None))
        field = getattr(config, name, None)
        usual = (default,) if default is not None else (None, field)  # without a default, the configuration decides
        refused[name] = place, usual, field

    def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        for name, (place, usual, field) in refused.items():
            value = args[place] if place < len(args) else kwargs.get(name, usual[0])
            same = any(value is one or (type(value) is type(one) and value == one) for one in usual)
            if not same or getattr(config, name, None) != field:
                raise ValueError(
                    f"{name}: the plan's `refused_arguments` has it, as it is not proven for such calls; leave it at {usual[0]!r}"
                )

    return {watched.inner: look} if refused else {}


def no_whole_labels(watched: Watched) -> Looks:
    """Where a rank of cp has only the logits of its own tokens, raise ValueError for labels of the whole sequence and for
    `logits_to_keep`."""
    regime = watched.regime

    def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if regime is None or regime.variant != regime.home:
            return
        if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            raise ValueError(
                "labels: a rank of cp has the logits of its own tokens, so labels must be shifted and divided before the call: `with "
                "context_parallel(model, input_ids=ids, labels=labels) as inputs: loss = model(**inputs).loss; loss.backward()`. For "
                "a loop that cannot do so, add a rule `gather_seq_output` under `context_parallel`, for the module after the last "
                "block: logits and loss are then those of the whole sequence"
            )
        if kwargs.get("logits_to_keep"):
            raise ValueError(
                "logits_to_keep: each rank of cp has the logits of its own tokens, not the last ones of the sequence; leave it out"
            )

    return {watched.inner: look} if returns_tokens(watched.program.resolved.on_cp) else {}


def refuse_changes(model: nn.Module) -> None:
    """Make methods of the model that need whole parameters raise RuntimeError; the message names the alternative."""
    for name, instead in INSTEAD.items():
        if hasattr(model, name):
            setattr(model, name, partial(_refuse, getattr(model, name), name, instead))
    if isinstance(model, FSDPModule):
        model.__dict__["__deepcopy__"] = partial(_refuse_copy, type(model).__name__)
        model.__dict__["__reduce_ex__"] = partial(_refuse_pickling, type(model).__name__)


def refuse_adapter_changes(model: nn.Module, inner: nn.Module) -> None:
    """Make methods that add, merge or delete adapters raise RuntimeError before they change anything.

    Args:
        model: as the caller has it.
        inner: the model inside peft's wrappers; the same where there is none.
    """
    outside = {id(module) for module in inner.modules()} - {id(inner)}
    for module in model.modules():
        methods = _OF_LAYERS if is_wrapper(module) else _OF_ADAPTERS if id(module) not in outside else {}
        for name, instead in methods.items():
            if callable(method := getattr(module, name, None)):
                setattr(module, name, partial(_refuse, method, name, instead))


def no_later_adapters(watched: Watched) -> Looks:
    """Raise RuntimeError where adapters were added after the plan was applied: peft's additions are not part of the plan, and no
    rank reduces their gradients."""
    known = dict(adapters_of(watched.inner))

    def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        for name, adapter in adapters_of(module).items():
            if known.get(name) is not adapter:
                raise RuntimeError(f"the adapter {name!r} was added after a plan was applied to this model; {_ADD}")

    return {watched.inner: look} if watched.split else {}


def adapters_of(model: nn.Module) -> Mapping[str, Any]:
    """peft's configurations of the adapters in a model, by name."""
    return getattr(model, "peft_config", None) or {}


def _refuse(method: MethodType, name: str, instead: str, *args: Any, **options: Any) -> Any:
    if name in HARMLESS and HARMLESS[name](method.__self__, *args, **options):
        return method(*args, **options)
    raise RuntimeError(f"{name}: a plan was applied to this model, and its parameters are split; {instead}")


def _same_size(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *rest: Any, **options: Any
) -> bool:
    rows = model.get_input_embeddings().weight.shape[0]
    return pad_to_multiple_of is None and new_num_tokens in (None, rows)


# Calls of these methods that stay correct.
HARMLESS: dict[str, Callable[..., bool]] = {
    "resize_token_embeddings": _same_size,
    "set_input_embeddings": lambda model, value: value is model.get_input_embeddings(),
    "set_output_embeddings": lambda model, new_embeddings: new_embeddings is model.get_output_embeddings(),
    "save_pretrained": lambda model, *args, state_dict=None, **options: state_dict is not None,
    "load_adapter": lambda model, *args, **options: _name_of_adapter(*args, **options) in adapters_of(model),
}


def _name_of_adapter(model_id: object = None, adapter_name: object = None, *args: Any, **options: Any) -> object:
    """The second argument of peft's and transformers' `load_adapter`: weights for an existing adapter."""
    return adapter_name


def _refuse_copy(name: str, memo: dict) -> Any:
    raise RuntimeError(
        f"a {name} under FSDP2 cannot be copied: copy it before apply_plan, or build a second one, apply the plan to it, and "
        "load this one's state_dict() into it"
    )


def _refuse_pickling(name: str, protocol: int) -> Any:
    raise RuntimeError(
        f"a {name} under FSDP2 cannot be pickled (pickle, torch.save): each rank has its shards alone. Call "
        "shardplan.save_checkpoint(model, folder), or save model.state_dict() with torch.distributed.checkpoint"
    )


def weights_are_there(watched: Watched) -> Looks:
    """Raise RuntimeError at a forward of the model, or of one of its FSDP2 units, while a parameter is on the meta device.

    It is raised before FSDP2 first looks at its parameters, so the model can still be loaded.
    """
    model, ready = watched.outer, False
    if not any(parameter.is_meta for parameter in model.parameters()):
        return {}

    def look(module: nn.Module, args: Any, kwargs: Any) -> bool:
        nonlocal ready
        if ready:
            return True
        if missing := next((name for name, parameter in module.named_parameters() if parameter.is_meta), None):
            raise RuntimeError(
                f"the model has no weights yet ({missing} is on the meta device): call materialize(model, device), or "
                "load_checkpoint(model, folder), before its first forward"
            )
        ready = module is model
        return ready

    return dict.fromkeys([model, *(module for module in model.modules() if isinstance(module, FSDPModule))], look)


def no_later_float8(watched: Watched) -> Looks:
    """Raise RuntimeError where a linear layer was converted to float8 after the plan was applied: it would take this rank's part of a weight
    for the whole weight."""
    known = {id(module) for module in watched.outer.modules() if is_float8(module)}

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        for name, layer in module.named_modules():
            if is_float8(layer) and id(layer) not in known and isinstance(layer.weight, DTensor):
                raise RuntimeError(
                    f"{name} was converted to float8 after apply_plan, which split its weight: convert the model first, then apply "
                    "the plan (convert_to_float8_training(model), then apply_plan(model, ...))"
                )

    return {watched.outer: look}
