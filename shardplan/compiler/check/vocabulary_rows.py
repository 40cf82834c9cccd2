"""How the rows of a vocabulary are dealt to the ranks: in ceil-chunks, one formula for embedding, head and
loss."""

from __future__ import annotations

from shardplan.styles.boundary import boundary

from .stored_by_rules import Held, HeldParameters


def vocabulary_rows(facts: HeldParameters, held: Held) -> bool:
    """Whether the split dim holds the rows of a vocabulary, which need not divide.

    By structure: rows that are looked up by id; or the output features of a head that hands on all of them
    (or a DTensor that knows them), as many as the config's `vocab_size` or as an embedding that is split by
    rows; or the same Parameter under another name (a head's bias that the module around it owns too).
    """
    names = {name for group in facts.resolved.tree.tied if not set(group).isdisjoint(held.names) for name in group}
    others = (facts.held[name] for name in names if name in facts.held)
    return any(_holds_rows(facts, one) for one in (held, *others))


def _holds_rows(facts: HeldParameters, held: Held) -> bool:
    if held.style.splits_rows:
        return True
    if held.module.kind == "embedding" or held.how.shard != "out" or held.how.packed:
        return False
    output = boundary(held.rule).output
    return output is not None and output.moves and held.size in facts.vocabularies


def chunks(rows: int, ranks: int) -> tuple[int, ...]:
    """The number of rows of each rank: chunks of ceil(rows / ranks) until nothing is left."""
    size = -(-rows // ranks)
    return tuple(max(0, min(size, rows - rank * size)) for rank in range(ranks))


def leaves_rank_empty(rows: int, ranks: int) -> bool:
    """Whether the last rank would get no row."""
    return (ranks - 1) * -(-rows // ranks) >= rows
