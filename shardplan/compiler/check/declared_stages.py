"""Pipeline stages: the section says which blocks they divide, every part is in one stage, and the sizes fit."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.compiler.bind.units import homes
from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.mesh import Axis
from shardplan.core.plan import ResolvedPlan
from shardplan.core.sections import PipelineParallel
from shardplan.core.tree import WITHOUT_FORWARD, full_name, named, parent

from .check_words import field_label
from .facts import Facts

BLOCKS = Code("SP384")
FEWER = Code("SP385")
SIZES = Code("SP386")
TWICE = Code("SP387")
ENCODER = Code("SP388")
CONTEXT = Code("SP389")
UNDECLARED = Code("SP430")
SHARED = Code("SP437")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """The size of the axis pp is checked where it is above 1."""
    resolved = facts.resolved
    section, stages = resolved.pipeline_parallel, resolved.sizes.of(Axis.PP)
    if stages > 1:
        yield from _mesh(resolved, stages)
    if section is None:
        return
    wrong = [*_blocks(resolved, section), *_shared(resolved, section)]
    yield from wrong
    yield from _twice(resolved, section)
    if stages > 1 and not wrong:
        yield from _sizes(resolved, section, stages)


def _mesh(resolved: ResolvedPlan, stages: int) -> Iterator[Diagnostic]:
    if resolved.pipeline_parallel is None:
        yield Diagnostic(
            code=UNDECLARED,
            severity=Severity.ERROR,
            message=f"the mesh has pp {stages}, but the plan has no section `pipeline_parallel`",
            help="add `pipeline_parallel: {layers: ...}` with a pattern of the model's blocks",
        )
    if resolved.sizes.cp > 1:
        yield Diagnostic(
            code=CONTEXT,
            severity=Severity.ERROR,
            message=f"the mesh has pp {stages} and cp {resolved.sizes.cp}: pipeline stages do not work with context parallelism",
            help="use a mesh with one of the two axes",
        )
    if resolved.tree.numbers.get("is_encoder_decoder"):
        yield Diagnostic(
            code=ENCODER,
            severity=Severity.ERROR,
            message="the model has an encoder and a decoder, which cannot be cut into pipeline stages",
            primary=field_label(resolved.pipeline_parallel, "layers"),
            help="use a mesh with pp 1",
        )


def _blocks(resolved: ResolvedPlan, section: PipelineParallel) -> Iterator[Diagnostic]:
    tree, blocks = resolved.tree, resolved.pp_blocks
    if section.layers is None:
        yield Diagnostic(
            code=BLOCKS,
            severity=Severity.ERROR,
            message="`pipeline_parallel` names no blocks",
            primary=field_label(section, "layers"),
            help="add `layers` with a pattern of the model's blocks",
        )
        return
    if not blocks:  # a pattern without matches is a finding of its own
        return
    homes = tuple(dict.fromkeys(map(parent, blocks)))
    lists = [name for name in homes if tree.modules[name].class_name in (*WITHOUT_FORWARD, "Sequential")]
    if len(homes) > 1 or not lists:
        what = f"elements of {len(homes)} modules" if len(homes) > 1 else "no elements of a list"
        yield Diagnostic(
            code=BLOCKS,
            severity=Severity.ERROR,
            message=f"`layers` of pipeline_parallel must match the elements of one list of modules, but {tree.named(blocks)} are {what}",
            primary=field_label(section, "layers"),
            help="name the blocks that run one after another",
            modules=blocks,
        )


def _shared(resolved: ResolvedPlan, section: PipelineParallel) -> Iterator[Diagnostic]:
    """Modules with parameters that are in several blocks, or in one and outside."""
    blocks = frozenset(resolved.pp_blocks)
    for group in resolved.tree.shared:
        if len(found := homes(group, blocks)) > 1:
            yield Diagnostic(
                code=SHARED,
                severity=Severity.ERROR if resolved.sizes.pp > 1 else Severity.WARNING,
                message=f"{group[0]} is part of {len(found)} blocks: each of their pipeline stages would train a copy of it",
                primary=field_label(section, "layers"),
                help="use a mesh with pp 1",
                modules=group,
            )


def _twice(resolved: ResolvedPlan, section: PipelineParallel) -> Iterator[Diagnostic]:
    places = {
        "first": resolved.pp_first,
        "last": resolved.pp_last,
    }
    for field, others, what in (
        ("last", resolved.pp_first, "the first stage"),
        ("first", resolved.pp_blocks, "a block"),
        ("last", resolved.pp_blocks, "a block"),
    ):
        both = tuple(name for name in places[field] if any(_overlap(name, other) for other in others))
        if both:
            yield Diagnostic(
                code=TWICE,
                severity=Severity.ERROR,
                message=f"{named(both)} is in the {field} stage, and in {what} too",
                primary=field_label(section, field),
                help="name each module once",
                modules=both,
            )


def _overlap(name: str, other: str) -> bool:
    """Whether they are the same module, or one is inside the other."""
    return full_name(name, "").startswith(full_name(other, "")) or full_name(other, "").startswith(full_name(name, ""))


def _sizes(resolved: ResolvedPlan, section: PipelineParallel, stages: int) -> Iterator[Diagnostic]:
    blocks = len(resolved.pp_blocks)
    if 0 < blocks < stages:
        yield Diagnostic(
            code=FEWER,
            severity=Severity.ERROR,
            message=f"the model has {blocks} blocks, fewer than the {stages} pipeline stages of the mesh",
            primary=field_label(section, "layers"),
            help=f"use a mesh with pp {blocks} or less",
        )
    sizes = section.sizes
    if sizes is None or not blocks:
        return
    wrong = []
    if sum(sizes) != blocks:
        wrong.append(f"they add up to {sum(sizes)}, and the model has {blocks} blocks")
    if len(sizes) % stages:
        wrong.append(f"there are {len(sizes)}, no multiple of pp {stages}")
    if wrong:
        yield Diagnostic(
            code=SIZES,
            severity=Severity.ERROR,
            message=f"the sizes of the pipeline stages do not fit: {'; '.join(wrong)}",
            primary=field_label(section, "sizes"),
            help="give a number for each stage, or leave `sizes` out: blocks are then divided evenly",
        )
