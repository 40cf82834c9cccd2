"""Calls that a split model cannot answer as the unsharded one does: refused before anything is computed."""

from __future__ import annotations

from torch import nn


def refuse_attention_maps(model: nn.Module) -> None:
    """Make the model raise ValueError for `output_attentions=True`: each rank has its own heads' maps only."""

    def refuse(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
            raise ValueError(
                "output_attentions=True: under tensor parallelism every rank computes its own heads only, and their "
                "maps are not gathered; ask the unsharded model for them"
            )

    model.register_forward_pre_hook(refuse, with_kwargs=True)
