"""A plan meets a model: globs become assignments, one for each module or parameter that a rule reaches."""

from __future__ import annotations

from dataclasses import replace

from shardplan.core.diagnostics import Diagnostic
from shardplan.core.mesh import Axis, MeshSizes
from shardplan.core.plan import NO_OVERLAYS, Overlays, PlanFile, ResolvedPlan
from shardplan.core.tree import ModuleTree
from shardplan.language.inherit import effective_sections
from shardplan.language.parse_findings import first_of
from shardplan.styles import NONE, STYLES

from .assignments import assign, findings, in_order, layers
from .combine import contradictions
from .conditions import admits, decided, names_any, other_model
from .dead import dead_arguments
from .heads_below import with_heads_below
from .matching import Names
from .section_globs import expand, may_match_nothing, pipeline_parts, wrapped
from .separated import separated
from .summed_blocks import declared_sums
from .units import ignored, units_and_parts


def bind(
    plan: PlanFile, tree: ModuleTree, sizes: MeshSizes, overlays: Overlays = NO_OVERLAYS
) -> tuple[ResolvedPlan, tuple[Diagnostic, ...]]:
    """Bind a plan to a model. Everything that does not fit is a finding; the rest is bound.

    Args:
        plan: the plan, with what it extends. This tree's configuration decides the conditions that are still open.
        tree: the model's module tree.
        sizes: the sizes of the mesh.
        overlays: the sections that override the tensor-parallel rules.
    """
    optional = may_match_nothing(plan)
    plan, undecided = decided(plan, tree)
    names = Names(tree)
    stack = layers(plan, names, overlays)
    sections = effective_sections(plan)
    units, about_units = expand(sections.data_parallel, "units", names)
    left_out, about_left_out = ignored(sections.data_parallel, names)
    units, apart = units_and_parts(sections.data_parallel, units, left_out, tree)
    recomputed = sections.activation_checkpointing
    checkpointed, about_checkpointed = wrapped(recomputed, names, units, every=recomputed.every if recomputed else 1)
    compiled, about_compiled = wrapped(sections.compile, names, units)
    sums, about_sums = declared_sums(plan, tree, names, overlays)
    staged = sections.pipeline_parallel
    if staged is not None and staged.layers == NONE:
        staged = None
    parts, about_parts = pipeline_parts(staged, names, optional)
    assignments = assign(stack, names)
    on_cp, about_cp = _on_cp(plan, names, sizes, units) if "context_parallel" in overlays else (None, ())
    resolved = ResolvedPlan(
        plan=plan,
        tree=tree,
        sizes=sizes,
        overlays=overlays,
        assignments=assignments,
        data_parallel=sections.data_parallel,
        activation_checkpointing=recomputed,
        compile=sections.compile,
        dp_units=units,
        dp_parts=apart,
        dp_experts=tuple(name for name, a in assignments.items() if STYLES[a.rule.style].exchanges),
        dp_ignored=left_out,
        ac_modules=checkpointed,
        compile_modules=compiled,
        sums=sums,
        pipeline_parallel=staged,
        pp_blocks=parts.blocks,
        pp_first=parts.first,
        pp_last=parts.last,
        pp_carried=parts.carried,
        separate_matrices=sections.separate_matrices,
        on_cp=on_cp,
    )
    matrices, about_matrices = separated(resolved, names)
    resolved = replace(resolved, matrices=matrices)
    return resolved, (
        *undecided,
        *other_model(plan, tree),
        *first_of(findings(plan, stack, names), "rules"),
        *about_cp,
        *contradictions(resolved),
        *about_sums,
        *first_of(
            (
                *about_units,
                *about_left_out,
                *about_checkpointed,
                *about_compiled,
                *about_parts,
                *about_matrices,
                *dead_arguments(plan, tree),
            ),
            "sections",
        ),
    )


def _on_cp(
    plan: PlanFile, names: Names, sizes: MeshSizes, units: tuple[str, ...]
) -> tuple[ResolvedPlan, tuple[Diagnostic, ...]]:
    """The rules for the axis cp as a bound plan of their own, and their findings."""
    overlays: Overlays = frozenset({"context_parallel"})
    stack = layers(plan, names, overlays, Axis.CP)
    below = assign(layers(plan, names, NO_OVERLAYS), names)
    assignments = in_order(with_heads_below(assign(stack, names), below, names.tree), names.tree)
    bound = ResolvedPlan(plan, names.tree, MeshSizes(tp=sizes.cp), overlays, assignments, dp_units=units, axis=Axis.CP)
    return bound, first_of(findings(plan, stack, names), "rules")


__all__ = ["admits", "bind", "decided", "names_any"]
