"""Sequence parallelism: the plan has a section for it, and tp divides the length of the sequence."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Edit, Label, Location, Severity
from shardplan.core.layout import SEQ, V
from shardplan.core.plan import Assignment, PlanFile
from shardplan.core.tree import block

from .facts import Facts

LENGTH = Code("SP360")
NO_OVERLAY = Code("SP361")
NO_ENTRANCE = Code("SP362")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """Checks nothing without sequence parallelism, or on a single rank."""
    resolved = facts.resolved
    if not resolved.sequence_parallel or resolved.sizes.tp == 1:
        return
    if not resolved.plan.has_overlay:
        yield Diagnostic(
            code=NO_OVERLAY,
            severity=Severity.ERROR,
            message=f"sequence parallelism was requested, but `{resolved.plan.name}` has no "
            "`sequence_parallel` section",
            primary=Label(Location(resolved.plan.file)),
            help=f"leave sequence parallelism off, or {_add_section(resolved.plan)}",
        )
        return
    if facts.seq_len is not None and facts.tp is not None and facts.seq_len % facts.tp:
        padded = -(-facts.seq_len // facts.tp) * facts.tp
        yield Diagnostic(
            code=LENGTH,
            severity=Severity.ERROR,
            message=f"the sequence length is {facts.seq_len}, which tp={facts.tp} does not divide",
            help=f"pad the sequences to {padded} tokens",
        )
    yield from _entrance(facts)


def _add_section(plan: PlanFile) -> str:
    if plan.built_in:
        return f"write a plan of your own that says `extends: {plan.name}` and has the section"
    return "add the section"


def _entrance(facts: Facts) -> Iterator[Diagnostic]:
    modules = facts.resolved.modules.values()
    waiting = [a for a in modules if facts.style(a).until_block_input]
    splits = any(one.within == V(SEQ) for one in facts.boundaries.values())
    slices = [a for a in modules if V(SEQ) in facts.boundaries[a.name].output_destinations]
    if waiting and slices and not splits:
        yield _finding(facts, waiting, slices)


def _finding(facts: Facts, waiting: list[Assignment], slices: list[Assignment]) -> Diagnostic:
    tree = facts.resolved.tree
    first = block(slices[0].name)
    in_list = first.rpartition(".")[2].isdecimal()
    line = f"`{tree.address(first)}: split_seq_input`" if in_list else "a `split_seq_input` rule for the first block"
    return Diagnostic(
        code=NO_ENTRANCE,
        severity=Severity.ERROR,
        message=f"`{waiting[0].rule.style}` for {waiting[0].name} leaves the sequence whole, but no "
        "`split_seq_input` rule splits it for the blocks, which output slices",
        primary=Label(waiting[0].rule.location, "leaves the sequence whole"),
        related=(Label(slices[0].rule.location, "outputs a slice of the sequence"),),
        help=f"add {line} under `sequence_parallel`",
        proposals=(Edit("sequence_parallel", tree.address(first), "split_seq_input"),) if in_list else (),
        modules=tuple(a.name for a in waiting),
    )
