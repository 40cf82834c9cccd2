"""A block input must be reached by a layout that it moves. These checks do not run the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.layout import SEQ, I, Layout, P, R, V
from shardplan.core.plan import Rule
from shardplan.core.tree import parent
from shardplan.styles.boundary import Boundary

from .facts import Facts

NESTED = Code("SP363")
UNSPLIT = Code("SP364")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each pair of nested rules, and for each rule that gathers a value that nothing splits."""
    yield from _nested(facts)
    yield from _unsplit(facts)


def _nested(facts: Facts) -> Iterator[Diagnostic]:
    modules = facts.resolved.modules
    block_inputs = {name: one for name, one in facts.boundaries.items() if one.within is not None}
    nearest = _nearest(facts, block_inputs)
    regions: dict[str, list[tuple[str, tuple[Layout, ...]]]] = defaultdict(list)
    for name, one in facts.boundaries.items():
        around = nearest.get(name)
        while around is not None:
            # A block input that does not describe its output may hand on what it moved (an activation function on a
            # gathered value).
            moved = (one.within,) if one.within is not None and one.output is None else ()
            regions[around].append((name, one.output_destinations or moved))
            around = nearest.get(around)
    pairs: dict[tuple[int, int], tuple[Rule, Rule, list[str]]] = {}
    for name, block_input in block_inputs.items():
        outer = nearest.get(name)
        if outer is None or not any(
            before.destination not in move.sources and not _output_within(regions[outer], name, move.sources)
            for before in block_inputs[outer].inputs
            for move in block_input.inputs
            if before.argument == move.argument and move.sources != (P,)  # a sum is formed by the block's code
        ):
            continue
        outer_rule, rule = modules[outer].rule, modules[name].rule
        pairs.setdefault((id(outer_rule), id(rule)), (outer_rule, rule, []))[2].append(name)
    for outer_rule, rule, names in pairs.values():
        yield Diagnostic(
            code=NESTED,
            severity=Severity.ERROR,
            message=f"the block input `{rule.style}` for {facts.resolved.tree.named(names)} is inside the block input `{outer_rule.style}`, "
            "which already moves the value",
            primary=Label(rule.location, "moves it again"),
            related=(Label(outer_rule.location, "moves it first"),),
            help="remove one of the two block inputs",
            modules=tuple(names),
        )


def _nearest(facts: Facts, block_inputs: Mapping[str, Boundary]) -> Mapping[str, str]:
    """The innermost block input around each module; modules outside of every block input are absent."""
    nearest: dict[str, str] = {}
    for name in facts.resolved.tree.modules if block_inputs else ():
        around = parent(name)
        if name and (around in block_inputs or around in nearest):
            nearest[name] = around if around in block_inputs else nearest[around]
    return nearest


def _output_within(
    region: list[tuple[str, tuple[Layout, ...]]], block_input: str, input_sources: tuple[Layout, ...]
) -> bool:
    """Whether a rule of the region, not the block input itself, outputs a layout that the block input accepts."""
    within = (layouts for name, layouts in region if name != block_input and not name.startswith(f"{block_input}."))
    return any(layout in input_sources for layouts in within for layout in layouts)


def _unsplit(facts: Facts) -> Iterator[Diagnostic]:
    split = V(SEQ)
    if any(split in one.output_destinations or one.within == split for one in facts.boundaries.values()):
        return
    vain = (
        (facts.resolved.modules[name].rule, name)
        for name, one in facts.boundaries.items()
        if any(move.sources == (split,) and move.destination in (R, I) for move in one.inputs)
    )
    for rule, names in by_key(vain).items():
        yield Diagnostic(
            code=UNSPLIT,
            severity=Severity.ERROR,
            message=f"`{rule.style}` for {facts.resolved.tree.named(names)} gathers the sequence, which no rule splits",
            primary=Label(rule.location, "gathers the sequence"),
            help="use `input_with_grad_allreduce` at a block or `colwise` at a matrix, or move the rule to "
            "`sequence_parallel`",
            modules=tuple(names),
        )
