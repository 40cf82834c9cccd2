"""Calls that a split model cannot answer as the unsharded one does: refused before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

# Methods that would change or write parameters as if they were whole -> what to do instead.
INSTEAD = {
    "resize_token_embeddings": "resize the embeddings before apply_plan",
    "set_input_embeddings": "replace the embeddings before apply_plan",
    "set_output_embeddings": "replace the output head before apply_plan",
    "save_pretrained": "call shardplan.save_checkpoint(model, folder), or pass a whole state_dict=",
}


def refuse_attention_maps(model: nn.Module) -> None:
    """Make the model raise ValueError for `output_attentions=True`: each rank has the maps of its own heads only."""

    def refuse(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
            raise ValueError(
                "output_attentions=True: under tensor parallelism every rank computes its own heads only, and the "
                "attention maps are not gathered; get them from the unsharded model"
            )

    model.register_forward_pre_hook(refuse, with_kwargs=True)


def refuse_changes(model: nn.Module) -> None:
    """Make methods of the model that need whole parameters raise RuntimeError; the message names the alternative."""
    for name, instead in INSTEAD.items():
        if hasattr(model, name):
            setattr(model, name, partial(_refuse, getattr(model, name), name, instead))
    if isinstance(model, FSDPModule):
        model.__dict__["__deepcopy__"] = partial(_refuse_copy, type(model).__name__)


def _refuse(method: MethodType, name: str, instead: str, *args: Any, **options: Any) -> Any:
    if HARMLESS[name](method.__self__, *args, **options):
        return method(*args, **options)
    raise RuntimeError(f"{name}: a plan was applied to this model, and its parameters are split; {instead}")


def _same_size(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *rest: Any, **options: Any
) -> bool:
    rows = model.get_input_embeddings().weight.shape[0]
    return pad_to_multiple_of is None and new_num_tokens in (None, rows)


# Calls of these methods that remain correct.
HARMLESS: dict[str, Callable[..., bool]] = {
    "resize_token_embeddings": _same_size,
    "set_input_embeddings": lambda model, value: value is model.get_input_embeddings(),
    "set_output_embeddings": lambda model, new_embeddings: new_embeddings is model.get_output_embeddings(),
    "save_pretrained": lambda model, *args, state_dict=None, **options: state_dict is not None,
}


def _refuse_copy(name: str, memo: dict) -> Any:
    raise RuntimeError(
        f"a {name} under FSDP2 cannot be copied: copy it before apply_plan, or build a second one, apply the plan to it, and "
        "load this one's state_dict() into it"
    )
