"""torch's attention of nn.MultiheadAttention, step by step: a rank computes with the heads of its matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ATTENTION = F.multi_head_attention_forward


def attention_of_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward` for matrices that may have some of the heads; it then returns this rank's partial sum.

    torch's own function takes the width of all heads from the query. Here a head has `embed_dim_to_check / num_heads` features, both
    of the whole model, and there are as many heads as the matrices have rows for. If they have all heads, the results are torch's.

    Args:
        query: [length, batch, features], or without batch; key and value likewise, with a length of their own.
        embed_dim_to_check, num_heads: of the unsharded model.
        in_proj_weight: [3 * heads * head size, features], a rank's rows of each third; or three matrices.
        out_proj_weight: [features, heads * head size].
        key_padding_mask: [batch, key length]; for bool, keys with True are left out; a float mask is added.
        attn_mask: [query length, key length], or [batch * heads, query length, key length] for all heads on this rank.

    Returns:
        [length, batch, features]; and with `need_weights` the weights of all heads on this rank: averaged over the unsharded
        model's heads, [batch, query length, key length], or for each head, [batch, heads, query length, key length].

    Raises:
        ValueError: `static_k` or `static_v`, which nn.MultiheadAttention does not pass.
        RuntimeError: `is_causal` without a mask, as torch's.
    """
    if static_k is not None or static_v is not None:
        raise ValueError("keys and values that are given, not computed (static_k, static_v), cannot be split by heads")
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    size = embed_dim_to_check // num_heads
    bias: Sequence[Tensor | None] = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    if use_separate_proj_weight:
        matrices = tuple(map(_given, (q_proj_weight, k_proj_weight, v_proj_weight)))
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), matrices, bias, strict=True))
    elif query is key and key is value:
        q, k, v = F.linear(query, _given(in_proj_weight), in_proj_bias).chunk(3, -1)
    else:
        matrices = _given(in_proj_weight).chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), matrices, bias, strict=True))
    added = 0
    if bias_k is not None and bias_v is not None:
        k, v = (torch.cat([x, b.expand(1, x.shape[1], -1)]) for x, b in ((k, bias_k), (v, bias_v)))
        added += 1
    q, k, v = (x.unflatten(-1, (-1, size)).permute(1, 2, 0, 3) for x in (q, k, v))  # [batch, heads, length, size]
    if add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        added += 1
    hint = is_causal and key_padding_mask is None and not need_weights
    mask = None if hint else _mask(attn_mask, key_padding_mask, q, added)
    probability = dropout_p if training else 0.0
    if not need_weights:
        result, weights = F.scaled_dot_product_attention(q, k, v, mask, probability, hint), None
    else:
        products = q * size**-0.5 @ k.transpose(-2, -1)
        weights = F.dropout((products if mask is None else products + mask).softmax(-1), probability)
        result = weights @ v
    result = F.linear(result.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if weights is not None and average_attn_weights:
        weights = weights.sum(1) / num_heads
    return (result, weights) if batched else (result.squeeze(1), None if weights is None else weights.squeeze(0))


class HeadsOfWeights(TorchFunctionMode):
    """While active, torch's attention computes with the heads of the matrices."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return (attention_of_heads if func is ATTENTION else func)(*args, **(kwargs or {}))


def _given(matrix: Tensor | None) -> Tensor:
    assert matrix is not None  # nn.MultiheadAttention has one matrix, or three
    return matrix


def _mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, added: int) -> Tensor | None:
    """Both masks as one that is added to the products of queries and keys.

    Args:
        q: [batch, heads, query length, size].
        added: keys after those that the masks cover; every query sees them.
    """
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, q.shape[:2]))
    if padding is not None:
        masks.append(padding[:, None, None])
    padded = [F.pad(_added(mask, q.dtype), (0, added)) for mask in masks]
    return padded[0] + padded[1] if len(padded) == 2 else next(iter(padded), None)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
