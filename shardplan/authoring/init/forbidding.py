"""Why code cannot be split: the line that forbids it, and what to change in it."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.compiler.layout.finding import Finding
from shardplan.compiler.layout.layout_diagnostics import diagnostic
from shardplan.core.tree import ModuleTree

from .draft import FIXABLE, Board, Draft
from .flow import Flow

SHAPES = frozenset(("view", "reshape", "unflatten", "expand", "repeat", "view_as", "as_strided"))
CUTS = frozenset(("split", "split_with_sizes", "chunk", "tensor_split", "narrow", "unbind", "__getitem__", "select"))
COMBINED = frozenset(("add", "sub", "mul", "div", "where", "masked_fill", "baddbmm", "scaled_dot_product_attention"))
ATTENTION = "multi_head_attention_forward"  # of nn.MultiheadAttention: one function for matrices and heads
LEAST = 0.01  # of the parameters of all blocks: a matrix that is named


@dataclass(frozen=True, slots=True)
class Forbidden:
    """What forbids a split.

    Args:
        reason: in words, with the line.
        change: what to write there; None where that is not known.
    """

    reason: str
    change: str | None = None


def forbidden(board: Board, draft: Draft) -> Forbidden:
    """What is wrong with a draft that is not right."""
    proof, resolved = board.proof(draft), board.bound(draft)
    hard = [found for found in (() if proof is None else proof.findings) if found.kind not in FIXABLE]
    if not hard or resolved is None:
        return Forbidden(board.reason(draft))
    said = diagnostic(resolved, hard[:1], None, None)
    where = next((note for note in said.notes if "`" in note), "")
    return Forbidden(f"{said.message} ({where})" if where else said.message, _change(hard[0]))


def _change(found: Finding) -> str | None:
    """What to write in the line of a finding."""
    if found.source is None:
        return None
    name, line = found.operation.strip("_"), found.source.short
    if found.operation == ATTENTION:
        return own_attention(line)
    if name in SHAPES:
        return (
            f"in {line}, count what is split with -1 (`x.view(b, n, -1, head_dim)`), or read it from an attribute of the module, "
            "which `divide` divides: a rank has its share of the heads"
        )
    if found.operation in CUTS or name in CUTS:
        return f"in {line}, cut into a number of equal parts (`chunk`), or by lengths that are numbers of the module, each an attribute"
    if name in COMBINED or name in {f"i{one}" for one in COMBINED} | {f"r{one}" for one in COMBINED}:
        return (
            f"in {line}, a value of all heads meets one of a rank's heads: make it a parameter of the module, with a dim for the "
            "heads, which a rule can split"
        )
    if name == "einsum":
        return f"in {line}, multiply by matrices of two dims, [heads * head_dim, width], as nn.Linear has them"
    return None


def own_attention(line: str) -> str:
    """What to write instead of torch's attention."""
    return (
        f"{line} takes the width of all heads from its input: write the attention with nn.Linear for queries, keys and values, "
        "one each or one for all, -1 for the number of heads, and F.scaled_dot_product_attention"
    )


def unread(flow: Flow, tree: ModuleTree, known: frozenset[str]) -> dict[str, Forbidden]:
    """Matrices of blocks that belong to no group, each with the operation that reads it.

    Args:
        tree: the model's own.
        known: patterns of what has rules, or a reason of its own.
    """
    numbers = {name: number for number, name in flow.run.parameters.items()}
    found: dict[str, Forbidden] = {}
    blocks = [name for name in tree.parameters if tree.pattern(name) != name]
    least = LEAST * sum(tree.parameters[name][1].numel for name in blocks)
    sizes: dict[str, int] = {}
    for name in blocks:
        sizes[tree.pattern(name)] = sizes.get(tree.pattern(name), 0) + tree.parameters[name][1].numel
    for name in blocks:
        owner, parameter = tree.parameters[name]
        pattern = tree.pattern(name)
        outside = pattern in known or tree.pattern(owner.name) in known or pattern in found or owner.kind == "embedding"
        if outside or len(parameter.shape) < 2 or sizes[pattern] < least or name not in numbers:
            continue
        event = next(iter(flow.readers.get(numbers[name], ())), None)
        if event is None or event.name != ATTENTION or event.source is None:
            continue
        where = f"{event.module}, {event.source.short}: `{event.source.text}`"
        found[pattern] = Forbidden(
            f"torch's {event.name} splits heads by the width of its input ({where})", own_attention(event.source.short)
        )
    return found
