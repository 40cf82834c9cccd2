"""tp divides what is split: heads, features, packed parts, declared numbers, attributes. One finding covers all
layers."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.tree import ModuleTree, parent

from .check_words import join, sizes
from .facts import Facts
from .requirements import Kind, Requirement

HEADS = Code("SP301")
KEY_VALUE = Code("SP302")
FEATURES = Code("SP303")
NO_SIZE = Code("SP307")
NOTHING = Code("SP309")

HEAD_KINDS: tuple[Kind, ...] = ("heads", "key_value_heads")
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
    wrong = (one for one in facts.requirements if not one.allows(tp) and one.kind in CODE_OF)
    for (kind, what, count), requirements in by_key(((one.kind, one.what, one.count), one) for one in wrong).items():
        if count < tp and requirements[0].shares:
            yield _finding(
                KEY_VALUE,
                f"{what} is {count}, and tp={tp} {_unshared(count, requirements[0].shares, tp)}",
                f"{sizes(facts.allowed)}{_padded(facts, requirements, tp)}",
                requirements,
            )
        else:
            yield _finding(
                CODE_OF[kind],
                f"{what} is {count}, which tp={tp} does not divide",
                f"{sizes(facts.allowed)}{_padded(facts, requirements, tp)}",
                requirements,
            )


def _padded(facts: Facts, requirements: list[Requirement], tp: int) -> str:
    """The next number that tp divides, and what a model of that size would have in addition; "" where it is not one dim of matrices.

    Heads are added by whole groups. A query head of zeros in an existing group would read that group's values, so its
    columns of the output matrix would be trained.
    """
    first, tree = requirements[0], facts.resolved.tree
    around = _around(tree, first)
    heads = [r for r in facts.requirements if r.kind in HEAD_KINDS and around & _around(tree, r)]
    counts = sorted({r.count for r in heads}) if first.kind in HEAD_KINDS else []
    if first.rule.groups is not None or len(counts) > 2 or (len(counts) == 2 and counts[1] % counts[0]):
        return ""
    if len(counts) == 2:
        few, each = counts[0], counts[1] // counts[0]
        new = next(n for n in range(few + 1, few + tp + 1) if n * each % tp == 0 and (n % tp == 0 or tp % n == 0))
        added, requirements = new / few - 1, heads
        what = f"pad the heads to {new * each}, and those of keys and values to {new},"
    else:
        new = first.count - first.count % -tp
        added, what = new / first.count - 1, f"pad it to {new}"
    split = {name for requirement in requirements for name in requirement.modules}
    again = {name for names in tree.tied for name in names[1:]}  # a tied parameter counts once
    lengths = {name: parameter.numel for name, (_, parameter) in tree.parameters.items() if name not in again}
    own = sum(length for name, length in lengths.items() if name in split or tree.owner(name) in split)
    share = own * added / sum(lengths.values())
    return f"; or {what} in the model ({share:.1%} more parameters)".replace("(0.0%", "(under 0.1%") if own else ""


def _around(tree: ModuleTree, requirement: Requirement) -> set[str]:
    """The modules that hold what is split."""
    return {parent(name if name in tree.modules else tree.owner(name)) for name in requirement.modules}


def _unshared(heads: int, length: int, tp: int) -> str:
    """Why this number of ranks cannot share the key-value heads."""
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
    groups = by_key(((one.what, one.count), one) for one in facts.requirements if not one.shares)
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
