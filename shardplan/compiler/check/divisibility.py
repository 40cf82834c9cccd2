"""tp divides what is split: heads, features, packed parts, declared numbers, attributes. One finding covers all
layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import gcd

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity

from .check_words import join, sizes
from .facts import Facts
from .requirements import Kind, Requirement

HEADS = Code("SP301")
KEY_VALUE = Code("SP302")
FEATURES = Code("SP303")
NO_SIZE = Code("SP307")
NOTHING = Code("SP309")

MOST_COUNTS = 5  # listed in a message
CODE_OF: dict[Kind, Code] = {"heads": HEADS, "key_value_heads": HEADS, "features": FEATURES}


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each number that does not divide; `compiler/check/declared.py` reports declared numbers."""
    tp = facts.tp
    if tp is None:
        yield _no_size(facts)
        return
    if tp > 1 and not facts.splits and not facts.misfits and facts.resolved.sizes.ep == 1:
        yield Diagnostic(
            code=NOTHING,
            severity=Severity.WARNING,
            message=f"the plan splits nothing of this model, so all {tp} tp ranks compute the same",
            help="add rules that split parameters, or use these ranks for data parallelism",
        )
    groups: dict[tuple[Kind, str, int], list[Requirement]] = defaultdict(list)
    for requirement in facts.requirements:
        if not requirement.allows(tp) and requirement.kind in CODE_OF:
            groups[requirement.kind, requirement.what, requirement.count].append(requirement)
    for (kind, what, count), requirements in groups.items():
        if count < tp and requirements[0].shares:
            yield _finding(
                KEY_VALUE,
                f"{what} is {count}, and tp={tp} {_unshared(count, requirements[0].shares, tp)}",
                sizes(facts.allowed),
                requirements,
            )
        else:
            yield _finding(
                CODE_OF[kind],
                f"{what} is {count}, which tp={tp} does not divide",
                sizes(facts.allowed),
                requirements,
            )


def _unshared(heads: int, length: int, tp: int) -> str:
    """Why so many ranks cannot share the key-value heads."""
    if tp % heads:
        return "is not a multiple of it"
    return f"would put each head on {tp // heads} ranks, and they do not divide its {length // heads} features"


def _finding(code: Code, message: str, help: str, requirements: list[Requirement]) -> Diagnostic:
    # The rule of an output side is the same with and without the overlay, so both variants give one finding.
    first = next((r for r in requirements if r.from_output), requirements[0])
    return Diagnostic(
        code=code,
        severity=Severity.ERROR,
        message=message,
        primary=Label(first.rule.location, "splits it"),
        help=help,
        modules=tuple(dict.fromkeys(name for r in requirements for name in r.modules)),
    )


def _no_size(facts: Facts) -> Diagnostic:
    groups: dict[tuple[str, int], list[Requirement]] = defaultdict(list)
    for requirement in facts.requirements:
        if not requirement.shares:
            groups[requirement.what, requirement.count].append(requirement)
    # The only obstacle: without it, the other counts have a common divisor.
    alone = [key for key in groups if gcd(*(count for what, count in groups if (what, count) != key)) != 1]
    if len(alone) == 1 and len(groups) > 1:
        counted = facts.resolved.tree.named(name for requirement in groups[alone[0]] for name in requirement.modules)
        help = f"leave {counted} and the block around it whole: {alone[0][0]} has no divisor in common with the rest"
    else:
        help = "split less: leave blocks whole until the numbers of the others have a common divisor"
    counts = [f"{what} {count}" for what, count in groups]
    shown = counts if len(counts) <= MOST_COUNTS else [*counts[:MOST_COUNTS], f"{len(counts) - MOST_COUNTS} more"]
    return Diagnostic(
        code=NO_SIZE,
        severity=Severity.ERROR,
        message=f"no tp size above 1 divides everything that this plan splits: {join(shown, 'and')}",
        help=help,
    )
