"""The layouts on the axis cp: only its own rules apply, and they are typed like those of tp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardplan.core.diagnostics import Diagnostic
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import block, element

from .layout_check import LayoutReport, check_layout
from .run import RecordedModel


def with_cp(report: LayoutReport, rules: ResolvedPlan, recorded_models: Sequence[RecordedModel]) -> LayoutReport:
    """A report of the rules for tp, with the findings of those for cp.

    Args:
        rules: `ResolvedPlan.on_cp`, bound to the reduced model.
    """
    found = check_layout(rules, recorded_models, help=False)
    about = tuple(_with_help(rules, one) for one in found.diagnostics)
    return replace(
        report,
        diagnostics=(*report.diagnostics, *about),
        repairs=(*report.repairs, *(None for _ in about)),
        secondary=(*report.secondary, *found.secondary),
        read_results=found.read_results,
        on_cp=found,
        cross_module_reads=report.cross_module_reads
        or found.cross_module_reads,  # those of the model, whatever the axis
    )


def _with_help(rules: ResolvedPlan, finding: Diagnostic) -> Diagnostic:
    """The finding with the rule to write: a module that mixes tokens needs all of them."""
    tree = rules.tree
    for name in finding.modules:
        around = block(name)
        if element(around) and (part := name[len(around) + 1 :].partition(".")[0]):
            mixer = tree.address(tree.pattern(f"{around}.{part}"))
            return replace(finding, help=f"write `{mixer}: replicate_seq` under `context_parallel`")
    return finding
