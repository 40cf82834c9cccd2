"""What to change in the model's code, where no rule helps."""

from __future__ import annotations

import linecache
import re

from shardplan.core.plan import ResolvedPlan
from shardplan.model.reduced.fields import role
from shardplan.model.reduced.trace import SourceLine

from .finding import Finding

# A line that reads the length of the sequence, and perhaps more: `B, T, C = x.shape`, `T = x.size(1)`.
LENGTH = re.compile(r"([\w ,]+?)\s*=\s*(\w+)\.(?:shape(?:\[1\]|\[:2\])?|size\(1?\))")
SHAPES = ("view", "reshape", "unflatten", "expand", "repeat", "as_strided")
CUTS = frozenset(("split", "split_with_sizes", "chunk", "tensor_split", "narrow", "unbind", "getitem", "select"))
KINDS = ("crash", "slices", "untyped")


def advice(plan: ResolvedPlan, finding: Finding) -> str | None:
    """What to change on a line that does not give a rank its part of the result; None for other findings, and where this is unknown."""
    if finding.kind not in KINDS or finding.module not in plan.tree.modules:
        return None
    return _uneven(plan, finding.module) or _of_line(plan, finding) or _of_crash(plan, finding)


def _uneven(plan: ResolvedPlan, module: str) -> str | None:
    """Another tp, where a module counts heads that tp does not divide."""
    heads = ((name, size) for name, size in plan.tree.modules[module].numbers.items() if role(name) == "heads")
    said = "choose a tp that divides {}, which is {} in {}: a rank computes with whole heads"
    return next((said.format(name, n, module) for name, n in heads if n % (plan.sizes.tp or 1)), None)


def _of_line(plan: ResolvedPlan, finding: Finding) -> str | None:
    """How to write the line of a finding."""
    if finding.source is None:
        return None
    name, source = finding.operation.strip("_"), finding.source
    shapes = any(shape in source.text for shape in SHAPES)
    if shapes and (length := _length_of_slice(plan, source)) is not None:
        return length
    if name in CUTS:
        return (
            f"in {source.short}, cut into a number of equal parts (`chunk`), or by lengths that are numbers of the module "
            "(`self.q_size`, `self.sizes[0]`), which `shares` names"
        )
    if name == "einsum":
        return f"in {source.short}, multiply by matrices of two dims, [heads * head_dim, width], as nn.Linear has them"
    if not shapes and name not in SHAPES:
        return None
    if re.search(r"\([^()]*\bself\.\w+, -1\)", source.text):
        return (
            f"{source.short} counts with numbers of the module and with -1 already, and no rules were found for it: write them by hand, with "
            "these numbers in `shares`, and `packed` for a matrix whose parts lie side by side"
        )
    return (
        f"change {source.short} in {_where(plan, finding)}: count what is split with -1 (`.view(B, T, -1, C // self.n_head)` for heads, "
        "`.view(B, T, -1)` where they are joined), or with an attribute of the module, which `shares` names. Now a rank's slice would get "
        "the shape of the whole"
    )


def _length_of_slice(plan: ResolvedPlan, source: SourceLine) -> str | None:
    """What to change if a line reshapes by a length of the sequence that the code reads from a rank's slice."""
    lines = linecache.getlines(source.file)[: source.line]
    for number, text in reversed(list(enumerate(lines, 1))) if plan.sequence_parallel else ():
        read = LENGTH.fullmatch(text.strip())
        names = [name.strip() for name in read[1].split(",")] if read else []
        length = names[0] if len(names) == 1 else names[1] if len(names) > 1 else ""
        if read and length.isidentifier() and re.search(rf"\b{length}\b", source.text):
            return (
                f"change `{text.strip()}` (line {number}): `{read[2]}` is a rank's slice of the sequence in front of the norm that "
                f"gathers it. Read {length} from what is gathered, as in `{length} = h.shape[1]` where h is the norm's result"
            )
        if text.lstrip().startswith("def "):
            return None
    return None


def _of_crash(plan: ResolvedPlan, finding: Finding) -> str | None:
    """What usually helps if no change of rules does: the line that raises needs a rank's part of each whole operand."""
    if finding.kind != "crash":
        return None
    return (
        "give a rank its part of what is whole on this line: split the matrix that makes it, or name it in `shares` of the rule for "
        f"{_where(plan, finding)} "
        "(`{name: {dim: 1}}` for a buffer, a parameter or an argument, `[name]` for a number of the module); what the code makes itself from "
        "numbers must follow the shape of the slice (`q.shape[1]`)"
    )


def _where(plan: ResolvedPlan, finding: Finding) -> str:
    return plan.tree.pattern(finding.module) or "the model"
