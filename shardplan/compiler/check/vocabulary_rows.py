"""How the rows of a vocabulary are distributed over the ranks: in ceil-chunks, by one formula for embedding, head and
loss."""

from __future__ import annotations

from shardplan.styles.boundary import boundary

from .stored_by_rules import StorageFacts, StoredParameter


def vocabulary_rows(facts: StorageFacts, stored: StoredParameter) -> bool:
    """Whether the split dim holds the rows of a vocabulary, which tp need not divide.

    This is decided by structure. The dim holds rows that are looked up by id; or the output features of a head whose output
    has all of them (or is a DTensor of all), if they are as many as the config's `vocab_size` or as the rows of an embedding
    that is split by rows; or the same Parameter under another name (a head's bias that the module around it owns too).
    """
    names = {name for group in facts.resolved.tree.tied if not set(group).isdisjoint(stored.names) for name in group}
    others = (facts.stored[name] for name in names if name in facts.stored)
    return any(_splits_rows(facts, one) for one in (stored, *others))


def _splits_rows(facts: StorageFacts, stored: StoredParameter) -> bool:
    if stored.style.splits_rows:
        return True
    if stored.module.kind == "embedding" or stored.placement.shard != "out" or stored.placement.packed:
        return False
    output = boundary(stored.rule).output
    return output is not None and output.moves and stored.size in facts.vocabularies


def chunk_rows(rows: int, ranks: int) -> int:
    """The number of rows of each rank, until none are left: ceil(rows / ranks)."""
    return -(-rows // ranks)


def leaves_rank_empty(rows: int, ranks: int) -> bool:
    """Whether the last rank would get no row."""
    return (ranks - 1) * chunk_rows(rows, ranks) >= rows
