"""The pipeline, stage by stage: read the model and the plan, bind and check the plan, prove its layouts, make a variant
a Program. Each stage collects its findings and raises nothing for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from shardplan.core.derived_plan import DerivedPlan
from shardplan.core.diagnostics import Diagnostic
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import Overlays, PlanFile, overlays_of, without_sequence
from shardplan.core.report import as_errors
from shardplan.core.size_bounds import MOST_TOKENS, check_count
from shardplan.core.sources import SourceMap

from .automatic import Derive, with_context
from .overrides import Logits, Override, overriding_document, refuse_empty, switched_off, with_parent
from .user_inputs import AnyPlan, Model, find_model, read_plan
from .variants import Variants, any_error, bind_variants, check_variants, prove_layouts, prove_stages

if TYPE_CHECKING:
    from shardplan.model import FoundModel

    from .layout import ModelLayouts
    from .layout.stage_plan import StagedPlan
    from .lower import Program

SectionName = Literal["data_parallel", "activation_checkpointing", "compile", "pipeline_parallel", "separate_matrices"]
SECTIONS: tuple[SectionName, ...] = get_args(SectionName)


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes to a plan: arguments of the functions that compile one. `compile_plan` documents each."""

    sequence_parallel: bool = False
    logits: Logits = "plan"
    data_parallel: Override = None
    activation_checkpointing: Override = None
    compile: Override = None
    pipeline_parallel: Override = None
    separate_matrices: Override = None
    regather: bool | None = None

    @property
    def sections(self) -> dict[str, Override]:
        return {name: getattr(self, name) for name in SECTIONS}


AS_IT_IS = Changes()


@dataclass(frozen=True)
class Given:
    """A model and a plan as they were found, or the findings that explain why not.

    Args:
        model: as the user named it.
        found, plan: None where there are errors.
        sources: the texts of the plan.
        findings: errors and warnings on the way.
        derived: set where `auto` derived the plan.
    """

    model: Model
    found: FoundModel | None
    plan: PlanFile | None
    sources: SourceMap
    findings: tuple[Diagnostic, ...]
    derived: DerivedPlan | None = None

    @property
    def both(self) -> tuple[FoundModel, PlanFile]:
        """The model and the plan, if there are no errors."""
        assert self.found is not None and self.plan is not None, self.findings
        return self.found, self.plan

    def structure(
        self,
        sizes: MeshSizes,
        wanted: Iterable[Overlays],
        *,
        seq_len: int | None = None,
        sections: Mapping[str, Override] | None = None,
    ) -> Variants:
        """Bind the variants and check their structure.

        Args:
            sections: the sections that arguments set or leave out.

        Raises:
            ValueError: the plan has no modules for a given section.
        """
        found, plan = self.both
        bound = bind_variants(plan, found.tree, sizes, wanted)
        sections = sections or {}
        checked = check_variants(bound.changed(partial(switched_off, overrides=sections)), seq_len=seq_len)
        if not all(map(any_error, checked.findings.values())):  # findings come first: the plan may be wrong
            for resolved in bound.resolved.values():
                refuse_empty(resolved, sections)
        return checked


def look_up(
    model: Model,
    plan: AnyPlan,
    sections: Mapping[str, Override] | None = None,
    *,
    split: bool = True,
    derive: Derive | None = None,
) -> Given:
    """Find a model and read a plan for it.

    Args:
        sections: sections that override the plan's.
        split, derive: as for `read_plan`.

    Raises:
        TypeError: an argument is not a model, a plan or a section.
    """
    from shardplan.language import parse_plan

    found, about_model = find_model(model)
    given_plan = read_plan(plan, found, split=split, derive=derive)
    if found is not None and derive is not None:
        compiled = (sections or {}).get("compile")
        given_plan = with_context(given_plan, found, derive, None if compiled is None else compiled is not False)
    read, sources = given_plan.plan, given_plan.sources
    findings = (*about_model, *given_plan.findings)
    if (document := overriding_document(sections or {})) is not None:
        over = parse_plan(document, name="<arguments>")
        findings += over.diagnostics
        sources = SourceMap({**sources.files, **over.sources.files})
        read = with_parent(over.plan, read) if over.plan and read else None
    if found is not None and read is not None:
        from .bind import decided

        read, about = decided(read, found.tree)
        findings += about
    return Given(model, found, read if not any_error(findings) else None, sources, findings, given_plan.derived)


@dataclass(frozen=True)
class Compiled:
    """A variant of a plan as a program, or the findings that explain why there is none.

    Args:
        program: None where a stage found errors.
        findings: the findings of all stages up to that one.
        given: the compiled model and plan.
        reduced_model: the reduced model, if there is something to prove and it can be made.
        staged: the pipeline stages of the reduced model, with several pp ranks.
        variants, overlays: the inputs of the lowering; None if there is no program.
    """

    program: Program | None
    findings: tuple[Diagnostic, ...]
    given: Given
    reduced_model: ModelLayouts | None = None
    staged: StagedPlan | None = None
    variants: Variants | None = None
    overlays: Overlays | None = None

    def lowered(self, *, logits: Logits = "plan", regather: bool | None = None) -> Program:
        """The program with another layout of the logits, or with gathered values kept or not.

        Raises:
            ValueError: the plan has no head to exchange.
        """
        from .lowering_stage import program_of

        assert self.variants is not None and self.overlays is not None, self.findings
        return program_of(self.variants, self.overlays, logits=logits, regather=regather)


def compile_variant(
    model: Model,
    sizes: MeshSizes,
    plan: AnyPlan,
    changes: Changes = AS_IT_IS,
    *,
    seq_len: int | None = None,
    allow_unproven: bool = False,
    strict: bool = False,
    derive: Derive | None = None,
    autocast: bool = False,
) -> Compiled:
    """Take one variant through all stages, up to the first one that finds errors.

    Args:
        strict: warnings are errors.
        derive: as for `read_plan`.
        autocast: whether the forward will run under torch.autocast, which data-parallel ranks alone prove too.

    Raises:
        TypeError, ValueError: not a number of tokens; not a change, or one that the plan has no place for.
    """
    from .layout import ModelLayouts
    from .lowering_stage import program_of

    if seq_len is not None:
        check_count("seq_len", seq_len, MOST_TOKENS)
    sections = changes.sections
    named = changes.logits == "fused" or bool(changes.separate_matrices)  # what a plan for layers names
    split = replace(sizes, tp=sizes.tp or 1).needs_rules or named
    given = look_up(model, plan, sections, split=split, derive=derive)
    severity = as_errors if strict else tuple[Diagnostic, ...]
    findings = severity(given.findings)
    if any_error(findings):
        return Compiled(None, findings, given)
    found, read = given.both
    overlays = overlays_of(changes.sequence_parallel and (sizes.tp or 1) > 1, sizes, context=read.has_context)
    variants = given.structure(sizes, {without_sequence(overlays), overlays}, seq_len=seq_len, sections=sections)
    if any_error(severity(variants.findings[overlays])):
        return Compiled(None, severity((*findings, *variants.findings[overlays])), given)
    reduced_model = ModelLayouts.for_mesh(found, variants.resolved.values(), sizes, whole=False)
    variants = prove_layouts(variants, read, reduced_model, allow_unproven=allow_unproven)
    staged = None
    if sizes.pp > 1:
        variants, staged = prove_stages(variants, read, reduced_model, allow_unproven=allow_unproven)
    findings = severity((*findings, *variants.findings[overlays]))
    if any_error(findings):
        return Compiled(None, findings, given)
    program = program_of(
        variants,
        overlays,
        logits=changes.logits,
        regather=changes.regather,
    )
    section = program.resolved.data_parallel
    casts = sizes.replicas > 1 and (autocast or (section is not None and section.mixed_precision is not None))
    provable = (variants.layouts or staged is not None or casts) and reduced_model.runs
    return Compiled(program, findings, given, reduced_model if provable else None, staged, variants, overlays)


def compile_variants(
    given: Given, sizes: MeshSizes, wanted: Iterable[Overlays], *, allow_unproven: bool = False
) -> tuple[Mapping[Overlays, Program], tuple[Diagnostic, ...]]:
    """Several variants of one plan as programs, or the findings that explain why there are none.

    Args:
        given: the model and the plan, without errors.
        sizes: the mesh, with a size of tp.
    """
    from .layout import ModelLayouts
    from .lowering_stage import program_of

    found, read = given.both
    wanted = tuple(wanted)
    needed = dict.fromkeys((*map(without_sequence, wanted), *wanted))
    variants = given.structure(sizes, needed)
    if not variants.any_error:
        reduced_model = ModelLayouts.for_mesh(found, variants.resolved.values(), sizes, whole=True)
        variants = prove_layouts(variants, read, reduced_model, allow_unproven=allow_unproven)
    findings = (*given.findings, *variants.all_findings)
    return {} if any_error(findings) else {on: program_of(variants, on) for on in wanted}, findings


def at_a_size(
    given: Given, sizes: MeshSizes, wanted: Iterable[Overlays], *, seq_len: int | None
) -> tuple[Variants, tuple[int, ...]]:
    """The variants with their structural findings, all at one tp size, and the sizes that all of them allow.

    Args:
        sizes: without `tp`, the smallest size above 1 that the model allows is checked.
    """
    from .check import allowed_tp

    found, plan = given.both
    bound = bind_variants(plan, found.tree, sizes, wanted)
    allowed = set.intersection(*(set(allowed_tp(resolved)) for resolved in bound.resolved.values()))
    tp = sizes.tp or min((size for size in allowed if size > 1), default=None)
    return check_variants(bound.at(tp), seq_len=seq_len), tuple(sorted(allowed))
