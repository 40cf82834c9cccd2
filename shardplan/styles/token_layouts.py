"""The layouts of the tokens that a module reads."""

from __future__ import annotations

from shardplan.core.layout import SEQ, I, Layout, R, V
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ancestors

from . import STYLES
from .boundary import boundary


def tokens_layout(plan: ResolvedPlan, module: str) -> Layout:
    """I, R or V(0), as the layout check saw it. If it did not see it, the layout inside the nearest block input;
    outside of all block inputs, slices with sequence parallelism, else I.
    """
    if (plan.sizes.tp or 1) == 1:
        return I
    if plan.incoming is not None and module in plan.incoming:
        return plan.incoming[module]
    for above in ancestors(module):
        assignment = plan.modules.get(above)
        if assignment is not None and STYLES[assignment.rule.style].is_block_input:
            within = boundary(assignment.rule).within
            if within in (I, R):
                return within
    return V(0) if plan.sequence_parallel else I


def has_own_tokens(plan: ResolvedPlan, module: str) -> bool:
    """Whether each rank of cp has other tokens at a module: rules for cp split the sequence, and no rule at the module or around it gathers it."""
    if plan.on_cp is None:
        return False
    assigned = (plan.on_cp.modules.get(name) for name in (module, *ancestors(module)))
    inputs = (one for a in assigned if a is not None for one in boundary(a.rule).inputs)
    return not any(one.destination.kind != "V" and V(SEQ) in one.sources for one in inputs)
