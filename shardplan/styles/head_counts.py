"""The heads of a split dimension, and the number of ranks that have each.

With fewer key-value heads than ranks, r = ranks / heads neighbouring ranks compute with one head (grouped-query
attention, arXiv 2305.13245). The query heads of a group are neighbours too, so these ranks have the queries of that
head. Each stores an r-th of the head's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardplan.core.expressions import count_of
from shardplan.core.layout import V
from shardplan.core.plan import Rule
from shardplan.core.tree import ModuleInfo, is_count

from .boundary import boundary
from .style_record import ParameterStyle

# Attributes for the number of features of one head,
WHOLE_HEAD = ("head_dim", "head_size", "attention_head_size", "dim_per_head", "d_head", "key_value_proj_dim")
HEAD_SIZES = (*WHOLE_HEAD, "qk_head_dim", "v_head_dim")  # or of its share in q and k, and in v
GROUPS = "num_key_value_groups"  # attribute for the number of query heads per key-value head


def head_counts(
    placement: ParameterStyle, rule: Rule, around: ModuleInfo, numbers: Mapping[str, int | float], sizes: Sequence[int]
) -> tuple[int | None, ...]:
    """For each length, its number of heads: as the rule declares it, else as `head_count` finds it. None for a
    declared number without a value (compiler/check/declared.py reports it)."""
    if rule.heads:
        return tuple(number_or_none(one, numbers) for one in rule.heads[: len(sizes)]) + (None,) * (
            len(sizes) - len(rule.heads)
        )
    return tuple(head_count(placement, rule, around, numbers, size) for size in sizes)


def number_or_none(expression: str, numbers: Mapping[str, int | float]) -> int | None:
    """The value of an expression that counts something; None if it has none."""
    count = count_of(expression, numbers)
    return count if isinstance(count, int) else None


def head_count(
    placement: ParameterStyle, rule: Rule, around: ModuleInfo, numbers: Mapping[str, int | float], size: int
) -> int | None:
    """The number of heads in a length, or None if its shards need not be whole heads.

    This is decided by structure: the module around knows the size of a head, and the value stays split between this
    matrix multiplication and the attention. It may know several sizes (multi-head latent attention has one for q and
    k and one for v). Then the size counts that gives a number of heads in the configuration. If none does, a length
    that is itself such a number has one feature for each head (a gate; not a part of a packed matrix).

    Args:
        around: the module that holds the parameter's owner.
        numbers: the numbers of the configuration.
        size: the length that is split.
    """
    if not stays_split(placement, rule):
        return None
    own = around.numbers
    head_sizes = {name: width for name in HEAD_SIZES if is_count(width := own.get(name))}
    counts = [size // width for width in head_sizes.values() if size % width == 0]
    configured = (numbers.get("num_attention_heads"), numbers.get("num_key_value_heads"))
    agreed = [count for count in counts if count in configured]
    if agreed:
        return max(agreed)
    if size in configured and not placement.packed:
        return size
    sure = len(head_sizes) == 1 and head_sizes.keys() <= set(WHOLE_HEAD)
    return counts[0] if counts and sure else None


def stays_split(placement: ParameterStyle, rule: Rule) -> bool:
    """Whether the split reaches beyond the module: its output stays split, or it reads a value that is split
    already."""
    if placement.computed != "V":  # gathered where it is read
        return False
    if placement.shard == "out":
        output = boundary(rule).output
        return output is not None and output.source == output.destination == V(-1)
    return any(V(-1) in move.sources for move in boundary(rule).inputs)


def can_share(heads: int, size: int, ranks: int) -> bool:
    """Whether several ranks can compute with one head of a length: the heads divide the ranks, the ranks the rows."""
    return heads < ranks and ranks % heads == 0 and size % ranks == 0


def copies_of(heads: Sequence[int | None], sizes: Sequence[int], most: int, ranks: int) -> tuple[int, ...]:
    """The number of neighbouring ranks that compute with the same slice of each length.

    Args:
        heads: the number of heads in each length.
        sizes: the lengths that are split separately.
        most: the largest number of heads among the module's matrices: its queries'.
        ranks: the size of the axis.
    """
    return tuple(
        ranks // count if count is not None and count < most and can_share(count, size, ranks) else 1
        for count, size in zip(heads, sizes, strict=True)
    )
