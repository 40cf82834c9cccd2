"""What to change in the model's code, where no rule helps."""

from __future__ import annotations

import linecache
import re

from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ModuleInfo, starred
from shardplan.model.reduced.trace import SourceLine
from shardplan.styles import STYLES

from .finding import Finding

# A line that reads the length of the sequence, and perhaps more: `B, T, C = x.shape`, `T = x.size(1)`.
LENGTH = re.compile(r"([\w ,]+?)\s*=\s*(\w+)\.(?:shape(?:\[1\]|\[:2\])?|size\(1?\))")
SHAPING = ("view", "reshape", "unflatten", "expand", "split")
KINDS = ("crash", "slices")


def advice(plan: ResolvedPlan, finding: Finding) -> str | None:
    """What to change in code of the model that gives a slice the shape of the whole; None for other code."""
    module = plan.tree.modules.get(finding.module)
    if finding.kind not in KINDS or module is None or finding.source is None:
        return None
    if not any(word in finding.source.text for word in SHAPING):
        return None
    if (length := _length_of_slice(plan, finding.source)) is not None:
        return length
    if not _reads_split(plan, module):
        return None
    return (
        f"change {finding.source.short} in {starred(module.name)}: it reshapes a rank's slice as if it were the whole. "
        "Write -1 for the split dim: `.view(B, T, -1, C // self.n_head)` for the heads, where the size of a head comes from "
        "the whole width, and `.view(B, T, -1)` where they are joined; and cut by a number that `shares` names"
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


def _reads_split(plan: ResolvedPlan, module: ModuleInfo) -> bool:
    """Whether a matrix directly below a module is split by its output features."""
    children = (plan.tree.modules[name] for name in plan.tree.children[module.name])
    return any(
        child.kind in ("linear", "conv1d") and STYLES[plan.assignments[child.name].rule.style].weight.shard == "out"
        for child in children
        if child.name in plan.assignments
    )


def of_crash(plan: ResolvedPlan, finding: Finding) -> str | None:
    """What usually helps if no change of rules does: the line that raises needs a rank's part of each whole operand."""
    if finding.kind != "crash":
        return None
    where = plan.tree.pattern(finding.module) or "the model"
    return (
        f"give a rank its part of what is whole on this line: split the matrix that makes it, or name it in `shares` of the rule for {where} "
        "(`{name: {dim: 1}}` for a buffer or an argument, `[name]` for a number of the module); what the code makes itself from numbers "
        "must follow the shape of the slice (`q.shape[1]`)"
    )
