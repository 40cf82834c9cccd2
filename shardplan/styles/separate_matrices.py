"""The matrices that lie next to each other in one parameter."""

from __future__ import annotations

from typing import Literal

from shardplan.core.plan import MatrixParts, ResolvedPlan

from .packed_lengths import packed_parts
from .stored_parameters import heads_of, parameter_style, ruled, split_dim

LEAST = 2  # dims of a matrix


def separate_matrices(plan: ResolvedPlan, name: str, by: Literal["parts", "heads"]) -> MatrixParts | str:
    """The matrices in a parameter, or the reason why there are none.

    Args:
        plan: with the rules of `tensor_parallel` alone, whose sizes hold on every mesh.
        name: the parameter's full name.
        by: whether each part of a packed dimension is a matrix, or each head.
    """
    module, parameter = plan.tree.parameters[name]
    assignment = next((assignment for assignment, _, one in ruled(plan, module) if one is parameter), None)
    if assignment is None:
        return "no rule of `tensor_parallel` says how it is split"
    rule, placement = assignment.rule, parameter_style(assignment, parameter)
    dim = split_dim(module, parameter, placement)
    if dim is None or placement.shard == "expert":
        return f"its rule `{rule.style}` splits no matrix"
    if len(parameter.shape) - dim > LEAST:
        return f"its rule `{rule.style}` splits a stack of matrices, and not their rows or columns"
    size = parameter.shape[dim]
    lengths = packed_parts(rule, size, plan.tree.numbers) if placement.packed else (size,)
    if isinstance(lengths, str):
        return lengths
    if by == "parts":
        return MatrixParts(by, dim, lengths) if placement.packed else f"its rule `{rule.style}` is not packed"
    sizes: list[int] = []
    for length, count in zip(lengths, heads_of(plan, module, placement, rule, lengths), strict=True):
        if count is None:
            return f"the number of heads in {length} features is not known"
        if length % count:
            return f"{count} heads do not divide {length} features"
        sizes += [length // count] * count
    return MatrixParts(by, dim, tuple(sizes))
