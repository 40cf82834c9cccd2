"""The table of exports as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

import transformers

from .entry import Entry

HEAD = """# Which built-in plans cross to transformers

Made by `python -m tests.exports --all --table reports/export-types.md` with transformers {version}; do not edit. The built-in plan of every causal
language model type, [exported](../docs/export.md) as a `tp_plan` of transformers for its default configuration (where that cannot be built, the nearest that
can), without dropout: {right} of {types} types cross and were run in transformers' own code on two processes, and {back} of them were seen to come back
as the same program; {idle} more have words for all rules and were not run.

- "as unsharded": how many tensors (loss, outputs, buffers, every gradient) were compared with the unsharded model's. "one backward a step": gradients that
  accumulate over micro-batches differ there.
- "no": the first rule that cannot cross, or the tensors that differ when it is run. "not run": it has words for all rules, and nothing tells that it
  computes the same.
- "and back": what [`convert`](../docs/converting.md) makes of it is the same program as the plan; "not back": it is another one, or none.

| model type | as unsharded |
|---|---|
"""


def page(found: Sequence[Entry]) -> str:
    """A line for each type."""
    right = [one for one in found if one.right]
    idle = sum(not one.refused and not one.tensors for one in found)
    rows = [f"| {one.name} | {one.said.replace('|', chr(92) + '|')} |" for one in found]
    head = HEAD.format(
        version=transformers.__version__,
        right=len(right),
        types=len(found),
        back=sum(not one.back for one in right),
        idle=idle,
    )
    return head + "\n".join(rows) + "\n"
