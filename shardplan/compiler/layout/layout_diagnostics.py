"""Findings as diagnostics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import Assignment, ResolvedPlan
from shardplan.core.tree import ModuleTree
from shardplan.styles import STYLES

from .finding import AS_BEFORE, Finding, Kind, Operand
from .repairs import Repair

PARTIAL = Code("SP401")
MISFIT = Code("SP402")
SUM = Code("SP403")
SLICES = Code("SP404")
OUTPUT = Code("SP405")
COMPLETE = Code("SP406")
UNTYPED = Code("SP407")
CRASH = Code("SP408")
MEETING = Code("SP409")
OUTSIDE = Code("SP410")

# Styles of an output head, by its result: whole, split, or not made.
GATHERED, SPLIT, FUSED = "colwise_gather_output", "colwise_vocab", "colwise_fused"

NAMES = {
    "I": "whole, with a complete gradient",
    "R": "whole, with a partial gradient",
    "P": "a partial sum",
    "whole": "whole",
    "?": "of an unknown layout",
}


def layout_words(layout: str) -> str:
    """`whole, with a complete gradient (I)`; `split in dim 1 (V(1))`."""
    if layout.startswith("V("):
        dim, rest = layout[2:].split(")", 1)
        where = "its last dim" if dim == "-1" else f"dim {dim}"
        if rest.startswith("/"):
            rest = f", each slice on {rest[1:]} ranks"
        return f"split in {where}{rest} ({layout.split(' ')[0]})"
    if layout.endswith(AS_BEFORE):
        return layout_words(layout.removesuffix(AS_BEFORE)) + AS_BEFORE
    words = NAMES.get(layout)
    if words is None:
        return " or ".join(layout_words(part) for part in layout.split(" or ")) if " or " in layout else layout
    return f"{words} ({layout})" if len(layout) == 1 and layout != "?" else words


def _partial(f: Finding, tree: ModuleTree) -> str:
    if f.operands and f.operands[0].parameter:
        return f"the gradient of {tree.pattern(f.subject)} would be a partial sum, but the plan treats it as complete"
    where = tree.pattern(f.module) or "the model"
    if f.subject == f.module:
        return f"a gradient inside {where} would be a partial sum, but the plan treats it as complete"
    value = f"what {tree.pattern(f.subject) or 'the model'} passes to {where}"
    return f"the gradient of {value} would be a partial sum, but the plan treats it as complete"


def _result(name: str) -> str:
    """The name of one of the model's results: a key, or its position (`result[1]`)."""
    if not name[0].isdigit():
        return name
    return "result" if name == "0" else f"result[{name}]"


def _crash(f: Finding, tree: ModuleTree) -> str:
    reason = f.message.split("\n")[0]
    return f"{tree.pattern(f.module) or 'the model'} raises an error when it is split: {reason[:160].rstrip('. ')}"


MESSAGES: dict[Kind, tuple[Code, Callable[[Finding, ModuleTree], str]]] = {
    "partial": (PARTIAL, _partial),
    "complete": (
        COMPLETE,
        lambda f, tree: (
            f"the gradient of {tree.pattern(f.subject)} is complete, but the plan declares a partial sum: it would be tp times too large"
        ),
    ),
    "meeting": (
        MEETING,
        lambda f, tree: (
            f"{tree.pattern(f.module) or 'the model'} combines a value with a complete gradient and one with a partial gradient"
        ),
    ),
    "arrival": (
        MISFIT,
        lambda f, tree: (
            f"the input of {tree.pattern(f.subject)} is {layout_words(f.actual)}; its style needs it to be {layout_words(f.wanted)}"
        ),
    ),
    "result": (
        MISFIT,
        lambda f, tree: (
            f"the result of {tree.pattern(f.subject)} is {layout_words(f.actual)}; its rule needs it to be {layout_words(f.wanted)}"
        ),
    ),
    "sum": (
        SUM,
        lambda f, tree: (
            f"{f.operation or 'reading a value'} in {tree.pattern(f.module) or 'the model'} acts on a partial sum, "
            "and its results do not add up"
        ),
    ),
    "slices": (
        SLICES,
        lambda f, tree: (
            f"{f.operation or 'reading a value'} in {tree.pattern(f.module) or 'the model'} does not give a slice of the whole result"
        ),
    ),
    "output": (
        OUTPUT,
        lambda f, tree: (
            f"the model's {_result(f.subject)} would be {layout_words(f.actual)}; "
            f"callers expect it to be {layout_words(f.wanted)}"
        ),
    ),
    "untyped": (
        UNTYPED,
        lambda f, tree: f"the layout of a value in {tree.pattern(f.module) or 'the model'} cannot be determined",
    ),
    "outside": (
        OUTSIDE,
        lambda f, tree: (
            f"the code of {tree.pattern(f.module) or 'the model'} reads {tree.pattern(f.subject)}, which is a DTensor there"
        ),
    ),
    "crash": (CRASH, _crash),
}


def diagnostic(
    plan: ResolvedPlan, findings: Sequence[Finding], repair: Repair | None, blamed: Assignment | None
) -> Diagnostic:
    """One diagnostic for equal findings over layers.

    Args:
        plan: the plan with these findings.
        findings: findings of one kind at one place, the first layer's first.
        repair: a change that fixes them, as a try has shown.
        blamed: the rule to point at.
    """
    first = findings[0]
    code, message = MESSAGES[first.kind]
    primary = None
    if blamed is not None:
        primary = Label(blamed.rule.location, _label(first, blamed, repair))
    return Diagnostic(
        code=code,
        severity=Severity.ERROR,
        message=message(first, plan.tree),
        primary=primary,
        notes=tuple(_notes(first)),
        help=_help(first, repair) if repair else None,
        modules=tuple(dict.fromkeys(f.subject for f in findings)),
    )


def with_line(found: Diagnostic) -> str:
    """The message of a diagnostic, with the line of the model's code."""
    return next((f"{found.message} ({note})" for note in found.notes if "`" in note), found.message)


def _help(first: Finding, repair: Repair) -> str:
    if first.kind != "output" or repair.new is None or repair.new.style != GATHERED:
        return repair.help
    return f"{repair.help}; `{SPLIT}` keeps it split, `{FUSED}` lets the loss make it a chunk of tokens at a time"


def _label(first: Finding, blamed: Assignment, repair: Repair | None) -> str:
    if repair is not None and blamed.name in repair.names:
        return "does not fit"
    splits = STYLES[blamed.rule.style].shards_parameters
    if (
        first.kind == "partial"
        and splits
        and any(blamed.name in operand.from_modules for operand in first.operands[1:])
    ):
        return "splits what it is combined with"
    return "is involved"


def _notes(first: Finding) -> list[str]:
    notes = []
    if first.source is not None:
        notes.append(f"{first.module or 'the model'}, {first.source.shown}")
    if first.mask is not None:
        notes.append(f"where a mask that is alike everywhere in the proof's short sequences is not: {first.mask.shown}")
    every = first.kind == "crash" or len(first.operands) == 1  # a mask or a bias of all heads makes the code raise too
    notes += [_operand(operand) for operand in first.operands if operand.differentiable or every]
    return notes[:6]


def _operand(operand: Operand) -> str:
    name = operand.parameter or f"from {', '.join(operand.from_modules[:2]) or operand.maker or 'the model'}"
    return f"{name}: {list(operand.shape)} on a rank, {layout_words(operand.layout)}"
