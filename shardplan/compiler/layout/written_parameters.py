"""Parameters that the model's forward changes, in a plan with several data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardplan.compiler.check.check_words import field_label
from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import named, parent

from .model import ModelLayouts

WRITTEN = Code("SP414")


def written_findings(model: ModelLayouts, resolved: ResolvedPlan) -> tuple[Diagnostic, ...]:
    """SP414 where the plan has data-parallel ranks and the unsharded reduced model changes a parameter while it runs.

    Args:
        model: the reduced model; where it does not run, nothing is found.
        resolved: a variant, bound to the model itself.
    """
    ranks = resolved.sizes.data_parallel_ranks
    if resolved.data_parallel is None or ranks == 1 or not model.runs:
        return ()
    names = sorted(frozenset().union(*(recorded.reference.written for recorded in model.recorded_models)))
    if not names:
        return ()
    return (
        Diagnostic(
            code=WRITTEN,
            severity=Severity.ERROR,
            message=f"the forward of {model.found.name} changes {named(names)}, but each of the {ranks} data-parallel ranks has a batch of "
            "its own",
            primary=field_label(resolved.data_parallel, "backend"),
            notes=("a gathered parameter loses what a forward writes into it; whole copies drift apart",),
            help=_help(model.recorded_models[0].model, names),
            modules=model.names_in_model(names),
        ),
    )


def _help(model: nn.Module, names: Sequence[str]) -> str:
    """The lines to write."""
    bounded = [
        owner for owner in map(parent, names) if getattr(model.get_submodule(owner), "max_norm", None) is not None
    ]
    lines = "; ".join(f"`model.{owner}.max_norm = None`" for owner in bounded)
    after = "change it after the optimizer's step"
    return f"{lines}, and shorten its rows after the optimizer's step" if lines else f"{after}, not in forward"
