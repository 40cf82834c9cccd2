"""Small state space layers: heads, the groups of heads that share B and C, and the inner width that the heads make up."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from math import gcd
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from shardplan.model.config_numbers import config_value

from .counts import same_relation, small_counts
from .fields import Role, role

INNER = "mamba_d_ssm"  # the field for the inner width, where a configuration has it


def small_state_heads(
    by_role: Mapping[Role, Iterable[int]],
    tp: int,
    times: int,
    cp: int = 1,
    shared: Mapping[int, int] = MappingProxyType({}),
) -> tuple[dict[int, int], dict[int, int]]:
    """Small counts of attention heads, and of state space heads and their groups: original -> small.

    Both tables are one where a configuration has a single field for heads: the groups then divide these heads.

    Args:
        by_role: the numbers of the configuration with each role.
        tp: the number of ranks.
        times: the factor by which there are more heads than usual.
        cp, shared: as for `small_counts`.
    """
    attention = partial(small_counts, tp=tp, times=times, cp=cp, shared=shared)
    heads, own, groups = (set(by_role.get(what, ())) for what in ("heads", "mamba_heads", "mamba_groups"))
    if own:
        return attention(heads), small_counts(own | groups, tp, times=times, cp=cp)
    together = attention(heads | groups)
    return together, together if groups else {}


def ranks_of_a_group(groups: Iterable[int], tp: int) -> int:
    """The number of ranks that share a group: they split the numbers of its state."""
    return max((tp // count for count in groups if count < tp and tp % count == 0), default=1)


def state_space_widths(
    data: dict[str, Any], config: PreTrainedConfig, widths: Mapping[int, int], hidden: int | None, tp: int, cp: int = 1
) -> None:
    """Choose head count and head dim, in place: their product, the inner width, keeps its relation to the hidden size.

    Args:
        data: the fields made small, with the wanted count.
        config: the original.
        widths: original -> small.
        hidden: the original hidden size.
        tp, cp: the numbers of ranks; cp divides the heads of a tp rank.
    """
    names = {what: name for name in data if (what := role(name)) in ("mamba_heads", "mamba_head_dim", "mamba_groups")}
    if hidden is None or hidden not in widths or not {"mamba_heads", "mamba_head_dim"} <= names.keys():
        return
    heads, dim = names["mamba_heads"], names["mamba_head_dim"]
    large, wanted = config_value(config, heads), data[heads]
    product, small_hidden = large * config_value(config, dim), widths[hidden]
    expand = data.get("mamba_expand") or data.get("expand") or 1
    if product == int(expand * hidden):
        inner = int(expand * small_hidden)
    elif product % hidden == 0:
        inner = product // hidden * small_hidden
    else:
        others = {small for width, small in widths.items() if width != data.get(INNER) and width != product}
        inner = _other_width(wanted, others, small_hidden, larger=product > hidden)
    groups = data.get(names.get("mamba_groups", "")) or 1
    suitable = [n for n in range(groups, inner + 1, groups) if inner % n == 0 and same_relation(n, large, tp)]
    suitable = [n for n in suitable if n % (tp * cp) == 0] or suitable
    data[heads] = min(suitable, key=lambda n: abs(n - wanted), default=gcd(inner, wanted))
    data[dim] = inner // data[heads]
    if data.get(INNER):
        data[INNER] = inner


def _other_width(heads: int, others: Collection[int], hidden: int, *, larger: bool) -> int:
    """A multiple of the heads that equals no other width and, if a small multiple can be, is above or below the hidden size as the original is."""
    dims = [d for d in (*range(8, 68, 4), 4, 2, 1) if heads * d not in others]
    return heads * next((d for d in dims if (heads * d > hidden) == larger), dims[0])
