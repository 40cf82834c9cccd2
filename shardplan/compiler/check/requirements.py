"""What tp must divide: heads, features, packed parts, declared numbers and attributes, collected once.

A dimension that is split into whole heads needs tp to divide its number of heads, any other its number of features. The
rows of a vocabulary need nothing: they are split in ceil-chunks (Megatron-LM pads them, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Literal

from shardplan.core.expressions import count_of
from shardplan.core.mesh import Axis
from shardplan.core.plan import Rule
from shardplan.core.tree import parent
from shardplan.styles.divided_numbers import attribute, group_number
from shardplan.styles.head_counts import can_share, head_counts, number_or_none
from shardplan.styles.packed_lengths import packed_parts

from .check_words import feature_words, head_words
from .stored_by_rules import StorageFacts, StoredParameter
from .vocabulary_rows import leaves_rank_empty, vocabulary_rows

Kind = Literal["heads", "key_value_heads", "features", "declared", "attribute"]

LARGEST_LISTED = 4096  # tp sizes above this are not listed: no machine has that many ranks on one tp axis
WITHOUT_LIMIT = tuple(2**i for i in range(7))  # listed where nothing limits tp


@dataclass(frozen=True, slots=True)
class Requirement:
    """One count that the number of ranks on an axis must divide.

    Args:
        count: the number itself.
        what: its description: a config number ("num_key_value_heads") or a phrase.
        kind: its source.
        modules: what the rule names: modules, or single parameters.
        rule: the rule that splits or declares it.
        from_output: whether the output side of a matrix is split.
        axis: the axis over which it is split.
        shares: the total length of these heads, where several ranks may compute with one head; 0: none may.
    """

    count: int
    what: str
    kind: Kind
    modules: tuple[str, ...]
    rule: Rule
    from_output: bool = False
    axis: Axis = Axis.TP
    shares: int = 0

    def allows(self, ranks: int) -> bool:
        """Whether this number of ranks divides the count, or can share its heads."""
        return self.count % ranks == 0 or can_share(self.count, self.shares or 1, ranks)


def requirements(facts: StorageFacts) -> Iterator[Requirement]:
    """All requirements, in the tree's order: first those of the splits, then the declared ones."""
    numbers = facts.resolved.tree.numbers
    heads_of = [
        (stored, piece, heads, word)
        for stored in facts.splits
        if not vocabulary_rows(facts, stored)
        for piece, heads, word in _pieces(facts, stored)
    ]
    most_heads: dict[str, int] = defaultdict(int)
    for stored, _, heads, _ in heads_of:
        if heads is None:
            continue
        for name in stored.names:
            around = parent(facts.resolved.tree.owner(name))
            most_heads[around] = max(most_heads[around], heads)
    shared: dict[tuple[str, int], int] = {}  # (attention module, number of heads) -> their length
    for stored, piece, heads, word in heads_of:
        from_output = stored.placement.shard == "out"
        if heads is None:
            yield Requirement(
                piece, _features(facts, stored, piece), "features", stored.assigned, stored.rule, from_output
            )
            continue
        # Ranks that share a group of a norm add up its mean, whatever surrounds it.
        fewer = heads < most_heads[stored.around.name] or stored.rule.groups is not None
        what = (
            word
            or head_words(heads, fewer, numbers)
            or f"the number of heads of {facts.resolved.tree.named(stored.assigned)}"
        )
        kind: Kind = "key_value_heads" if fewer and what != "num_attention_heads" else "heads"
        shares = piece if from_output and kind == "key_value_heads" else 0
        if shares and stored.rule.groups is None:
            shared |= {(parent(facts.resolved.tree.owner(name)), heads): shares for name in stored.names}
        yield Requirement(heads, what, kind, stored.assigned, stored.rule, from_output, shares=shares)
    yield from _declared(facts, shared)


def _declared(facts: StorageFacts, shared: Mapping[tuple[str, int], int]) -> Iterator[Requirement]:
    """The requirements that rules declare.

    Args:
        shared: (module, its number of heads that several ranks may compute with) -> their total length.
    """
    resolved = facts.resolved
    groups: dict[tuple[int, str, int, Kind], tuple[Rule, list[str]]] = {}
    for assignment in resolved.assignments.values():
        rule = assignment.rule
        for expression in rule.divides:
            count: int | str | None = count_of(expression, resolved.tree.numbers)
            if isinstance(count, int):
                groups.setdefault((id(rule), expression, count, "declared"), (rule, []))[1].append(assignment.name)
        for path in rule.divided:
            count = attribute(resolved, assignment, path)
            if group_number(resolved, assignment, path):
                continue  # divided as its groups are
            if isinstance(count, int):
                groups.setdefault((id(rule), path, count, "attribute"), (rule, []))[1].append(assignment.name)
    for (_, path, count, kind), (rule, names) in groups.items():
        what = path if kind == "declared" else f"{path} of {facts.resolved.tree.named(names)}"
        shares = shared.get((names[0], count), 0) if kind == "attribute" else 0
        yield Requirement(count, what, kind, tuple(names), rule, shares=shares)


def _pieces(facts: StorageFacts, stored: StoredParameter) -> tuple[tuple[int, int | None, str], ...]:
    """Each length that is split on its own (a packed part, or the whole dim), with the number of heads, or of a
    mean's groups, in it, and the rule's name for that number."""
    parts = (
        packed_parts(stored.rule, stored.size, facts.resolved.tree.numbers)
        if stored.placement.packed
        else (stored.size,)
    )
    if isinstance(parts, str):
        return ()
    rule, numbers = stored.rule, facts.resolved.tree.numbers
    if rule.groups is not None:
        return ((stored.size, number_or_none(rule.groups, numbers), rule.groups),)
    counts = head_counts(stored.placement, rule, stored.around, numbers, parts)
    words = rule.heads if len(rule.heads) == len(parts) else ("",) * len(parts)
    return tuple(zip(parts, counts, words, strict=True))


def _features(facts: StorageFacts, stored: StoredParameter, size: int) -> str:
    near = (stored.module, stored.around) if stored.module.kind == "other" else (stored.around,)
    found = feature_words(size, near, facts.resolved.tree.numbers) if size > 1 else ""  # many numbers are 1
    if found:
        return found
    side = "output" if stored.placement.shard == "out" else "input"
    part = "the length of a part of the" if stored.placement.packed else "the number of"
    return f"{part} {side} features of {facts.resolved.tree.named(stored.assigned)}"


def _shared_lengths(facts: StorageFacts) -> Iterator[int]:
    """The lengths of the dims of buffers, and the numbers of heads of arguments: each rank reads an even share of them."""
    tree = facts.resolved.tree
    for name, assignment in facts.resolved.modules.items():
        for one in assignment.rule.shares:
            shape = tree.modules[name].buffers.get(one.name, ())
            count = count_of(one.heads, tree.numbers) if one.heads is not None else None
            if isinstance(count, int):
                yield count
            elif one.dim is not None and one.like is None and one.dim < len(shape):
                yield shape[one.dim]


def allowed_sizes(facts: StorageFacts, required: Iterable[Requirement], axis: Axis) -> tuple[int, ...]:
    """The sizes of an axis that every requirement on it allows, and that leave no rank without a row of a vocabulary;
    (1,) where the plan splits nothing."""
    if not facts.splits:
        return (1,)
    required = [requirement for requirement in required if requirement.axis is axis]
    common = gcd(*(requirement.count for requirement in required if not requirement.shares))
    sizes = WITHOUT_LIMIT if common == 0 else range(1, min(common, LARGEST_LISTED) + 1)
    rows = {stored.size for stored in facts.splits if vocabulary_rows(facts, stored)}
    lengths = set(_shared_lengths(facts)) if axis is Axis.TP else set()
    return tuple(
        size
        for size in sizes
        if all(requirement.allows(size) for requirement in required)
        and all(length % size == 0 for length in lengths)
        and not any(leaves_rank_empty(n, size) for n in rows)
    )
