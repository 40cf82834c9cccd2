"""What tp must divide: heads, features, packed parts, declared numbers and attributes, collected once.

A dimension that is split into whole heads needs its number of heads divided, any other its number of
features. The rows of a vocabulary need nothing: they are split in ceil-chunks (Megatron-LM pads them, arXiv
1909.08053, section 3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Literal

from shardplan.core.layout import V
from shardplan.core.mesh import Axis
from shardplan.core.plan import Rule
from shardplan.core.tree import named, parent
from shardplan.styles.boundary import boundary

from .check_words import feature_words, head_words, is_count
from .declared_numbers import attribute, declared, packed_parts
from .stored_by_rules import HEAD_SIZES, WHOLE_HEAD, StorageFacts, StoredParameter
from .vocabulary_rows import leaves_rank_empty, vocabulary_rows

Kind = Literal["heads", "key_value_heads", "features", "declared", "attribute"]

LARGEST_LISTED = 4096  # tp sizes above this are not listed: no machine has that many ranks on one tp axis
WITHOUT_LIMIT = tuple(2**i for i in range(7))  # what is listed where nothing limits tp


@dataclass(frozen=True, slots=True)
class Requirement:
    """One count that the number of ranks on an axis must divide.

    Args:
        count: the number itself.
        what: words for it: a config number ("num_key_value_heads") or a phrase.
        kind: where it comes from.
        modules: what the rule names: modules, or single parameters.
        rule: the rule that splits or declares.
        from_output: whether the output side of a matrix is split.
        axis: the axis that it is split over.
    """

    count: int
    what: str
    kind: Kind
    modules: tuple[str, ...]
    rule: Rule
    from_output: bool = False
    axis: Axis = Axis.TP


def requirements(facts: StorageFacts) -> Iterator[Requirement]:
    """All requirements, in the tree's order: those of the splits, then the declared ones."""
    numbers = facts.resolved.tree.numbers
    pieces = [
        (stored, piece)
        for stored in facts.splits
        if not vocabulary_rows(facts, stored)
        for piece in _pieces(facts, stored)
    ]
    heads_of = [(stored, piece, head_count(facts, stored, piece)) for stored, piece in pieces]
    most_heads: dict[str, int] = defaultdict(int)
    for stored, _, heads in heads_of:
        if heads is None:
            continue
        for name in stored.names:
            around = parent(facts.resolved.tree.owner(name))
            most_heads[around] = max(most_heads[around], heads)
    for stored, piece, heads in heads_of:
        from_output = stored.placement.shard == "out"
        if heads is None:
            yield Requirement(
                piece, _features(facts, stored, piece), "features", stored.assigned, stored.rule, from_output
            )
            continue
        fewer = heads < most_heads[stored.around.name]
        what = head_words(heads, fewer, numbers) or f"the number of heads of {named(stored.assigned)}"
        kind: Kind = "key_value_heads" if fewer and what != "num_attention_heads" else "heads"
        yield Requirement(heads, what, kind, stored.assigned, stored.rule, from_output)
    yield from _declared(facts)


def _declared(facts: StorageFacts) -> Iterator[Requirement]:
    resolved = facts.resolved
    groups: dict[tuple[int, str, int, Kind], tuple[Rule, list[str]]] = {}
    for assignment in resolved.assignments.values():
        rule = assignment.rule
        for expression in rule.divides:
            count: int | str | None = declared(expression, resolved.tree.numbers)
            if isinstance(count, int):
                groups.setdefault((id(rule), expression, count, "declared"), (rule, []))[1].append(assignment.name)
        for path in rule.divide:
            count = attribute(resolved, assignment, path)
            if isinstance(count, int):
                groups.setdefault((id(rule), path, count, "attribute"), (rule, []))[1].append(assignment.name)
    for (_, path, count, kind), (rule, names) in groups.items():
        what = path if kind == "declared" else f"{path} of {named(names)}"
        yield Requirement(count, what, kind, tuple(names), rule)


def _pieces(facts: StorageFacts, stored: StoredParameter) -> tuple[int, ...]:
    """The lengths that are split each on its own: the packed parts, or the dim."""
    if not stored.placement.packed:
        return (stored.size,)
    parts = packed_parts(facts.resolved, stored)
    return parts if isinstance(parts, tuple) else ()


def head_count(facts: StorageFacts, stored: StoredParameter, size: int) -> int | None:
    """How many heads a length splits into, or None where its shards need not be whole heads.

    By structure: the module around knows the size of a head, and the value stays split between this matrix
    multiplication and the attention. Where it knows several sizes (multi-head latent attention has one for q
    and k and one for v), that which gives a number of heads of the configuration. Where none does, a length that is
    itself such a number has one feature for each head (a gate).
    """
    if not stays_split(stored):
        return None
    numbers, own = facts.resolved.tree.numbers, stored.around.numbers
    head_sizes = {name: width for name in HEAD_SIZES if is_count(width := own.get(name))}
    counts = [size // width for width in head_sizes.values() if size % width == 0]
    configured = (numbers.get("num_attention_heads"), numbers.get("num_key_value_heads"))
    agreed = [count for count in counts if count in configured]
    if agreed:
        return max(agreed)
    if size in configured:
        return size
    sure = len(head_sizes) == 1 and head_sizes.keys() <= set(WHOLE_HEAD)
    return counts[0] if counts and sure else None


def stays_split(stored: StoredParameter) -> bool:
    """Whether the split reaches beyond the module: its output stays split, or it reads a value that already
    is."""
    if stored.placement.computed != "V":  # gathered where it is read
        return False
    if stored.placement.shard == "out":
        output = boundary(stored.rule).output
        return output is not None and output.source == output.destination == V(-1)
    return any(V(-1) in move.sources for move in boundary(stored.rule).inputs)


def _features(facts: StorageFacts, stored: StoredParameter, size: int) -> str:
    near = (stored.module, stored.around) if stored.module.kind == "other" else (stored.around,)
    found = feature_words(size, near, facts.resolved.tree.numbers)
    if found:
        return found
    side = "output" if stored.placement.shard == "out" else "input"
    part = "the length of a part of the" if stored.placement.packed else "the number of"
    return f"{part} {side} features of {named(stored.assigned)}"


def allowed_sizes(facts: StorageFacts, required: Iterable[Requirement], axis: Axis) -> tuple[int, ...]:
    """The sizes of an axis that divide every requirement on it and leave no rank without a row of a vocabulary; (1,) where
    the plan splits nothing."""
    if not facts.splits:
        return (1,)
    common = gcd(*(requirement.count for requirement in required if requirement.axis is axis))
    sizes = WITHOUT_LIMIT if common == 0 else range(1, min(common, LARGEST_LISTED) + 1)
    rows = {stored.size for stored in facts.splits if vocabulary_rows(facts, stored)}
    return tuple(
        size
        for size in sizes
        if (common == 0 or common % size == 0) and not any(leaves_rank_empty(n, size) for n in rows)
    )
