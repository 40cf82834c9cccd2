"""Why code cannot be split: the line that forbids it, and how to change it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardplan.compiler.layout.finding import Finding
from shardplan.compiler.layout.layout_diagnostics import diagnostic
from shardplan.model.reduced.fields import role

from .draft import FIXABLE, Draft, DraftTrials

SHAPES = frozenset(("view", "reshape", "unflatten", "expand", "repeat", "view_as", "as_strided"))
CUTS = frozenset(("split", "split_with_sizes", "chunk", "tensor_split", "narrow", "unbind", "__getitem__", "select"))
COMBINED = frozenset(("add", "sub", "mul", "div", "where", "masked_fill", "baddbmm", "scaled_dot_product_attention"))


@dataclass(frozen=True, slots=True)
class Forbidden:
    """The reason that forbids a split.

    Args:
        reason: in words, with the line.
        change: what to write instead; None where this is unknown.
    """

    reason: str
    change: str | None = None


def forbidden(trials: DraftTrials, draft: Draft) -> Forbidden:
    """The first error of a wrong draft, with the line of code and how to change it."""
    proof, resolved = trials.proof(draft), trials.bound(draft)
    hard = [found for found in (() if proof is None else proof.findings) if found.kind not in FIXABLE]
    if not hard or resolved is None:
        return Forbidden(trials.reason(draft))
    said = diagnostic(resolved, hard[:1], None, None)
    where = next((note for note in said.notes if "`" in note), "")
    change = _uneven(trials, hard[0].module) or _change(hard[0])
    return Forbidden(f"{said.message} ({where})" if where else said.message, change)


def _uneven(trials: DraftTrials, module: str) -> str | None:
    """Advice on tp, where a module counts heads that tp does not divide."""
    numbers = trials.tree.modules[module].numbers
    counted = next((n for n, size in numbers.items() if role(n) == "heads" and size % trials.tp), None)
    if counted is None:
        return None
    return (
        f"choose a tp that divides {counted}, which is {numbers[counted]} in {module}: a rank computes with whole heads"
    )


def _change(found: Finding) -> str | None:
    """How to change the line of a finding."""
    if found.source is None:
        return None
    name, line = found.operation.strip("_"), found.source.short
    if name in SHAPES and re.search(r"\([^()]*\bself\.\w+, -1\)", found.source.text):
        return (
            f"{line} counts with numbers of the module and with -1 already, and no rules were found for it: write them by hand, with these "
            "numbers in `shares`, and `packed` for a matrix whose parts lie side by side"
        )
    if name in SHAPES:
        return (
            f"in {line}, count what is split with -1 (`x.view(b, n, -1, head_dim)`), or read it from an attribute of the module, "
            "which `shares` names: a rank has its share of the heads"
        )
    if found.operation in CUTS or name in CUTS:
        return f"in {line}, cut into a number of equal parts (`chunk`), or by lengths that are numbers of the module, each an attribute"
    if name in COMBINED or name in {f"i{one}" for one in COMBINED} | {f"r{one}" for one in COMBINED}:
        return (
            f"in {line}, a value of all heads meets one of a rank's heads: make it a parameter, a buffer or an argument of "
            "the module, with a dim for the heads, which a rule can split"
        )
    if name == "einsum":
        return f"in {line}, multiply by matrices of two dims, [heads * head_dim, width], as nn.Linear has them"
    return None
