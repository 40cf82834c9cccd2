"""Whether a model can be run in chunks of the sequence: its tokens meet in causal attention, and nowhere else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardplan.core.diagnostics import Diagnostic, PlanError, Severity
from shardplan.model import FoundModel
from shardplan.model.reduced import make_reduced_model
from shardplan.torchlib.attention import attention_replaced, misfit

from .layout_codes import CHUNKS


class _OwnToken:
    """Attention in which every token sees itself alone; notes what was asked for."""

    def __init__(self) -> None:
        self.ran = False
        self.misfit: str | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        self.ran = True
        self.misfit = self.misfit or misfit(query, key, attn_mask, is_causal)
        if value.shape[1] != query.shape[1]:
            value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return value[:, :, -query.shape[2] :]


def context_findings(found: FoundModel) -> tuple[Diagnostic, ...]:
    """Why the model cannot be run in chunks of the sequence; one finding at most."""
    try:
        reduced_model = make_reduced_model(found, tp=1)
        with reduced_model.running():
            reason = _reason(reduced_model.build(), reduced_model.inputs())
    except PlanError as error:
        return tuple(error.diagnostics)
    if reason is None:
        return ()
    return (
        Diagnostic(
            code=CHUNKS.code,
            severity=Severity.ERROR,
            message=f"the model cannot run on chunks of the sequence: {reason}",
            help="use a mesh without a cp axis, or attn_implementation='sdpa'",
        ),
    )


def _reason(model: nn.Module, inputs: dict[str, Any]) -> str | None:
    ids = inputs.get("input_ids")
    if ids is None:
        return "it is not called with token ids"
    inputs = {name: value for name, value in inputs.items() if name not in ("labels", "attention_mask", "position_ids")}
    attention = _OwnToken()
    with attention_replaced(attention):
        meet = _tokens_meet(model, inputs, ids)
    if not attention.ran:
        return "it does not call torch's scaled_dot_product_attention"
    if attention.misfit is not None:
        return f"it has {attention.misfit}"
    if meet:
        return "its tokens meet outside attention"
    return None if _reads_positions(model, inputs, ids) else "it does not read position_ids"


def _tokens_meet(model: nn.Module, inputs: dict[str, Any], ids: Tensor) -> bool:
    """Whether a half of the sequence is changed by what stands in the other half."""
    half = ids.shape[1] // 2
    mirrored = ids.flip(0).flip(1)
    after = torch.cat([ids[:, :half], mirrored[:, half:]], 1)
    before = torch.cat([mirrored[:, :half], ids[:, half:]], 1)
    plain, other_after, other_before = (_logits(model, {**inputs, "input_ids": x}) for x in (ids, after, before))
    return not (
        torch.equal(plain[:, :half], other_after[:, :half]) and torch.equal(plain[:, half:], other_before[:, half:])
    )


def _reads_positions(model: nn.Module, inputs: dict[str, Any], ids: Tensor) -> bool:
    """Whether the model uses the positions that it is given."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    inputs = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    forward, backward = (_logits(model, {**inputs, "position_ids": p}) for p in (positions, positions.flip(1)))
    return not torch.equal(forward, backward)


def _logits(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        output = model(**inputs, use_cache=False)
    return output.logits if hasattr(output, "logits") else output[0]
