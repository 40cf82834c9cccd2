"""Doors: what reaches them must be what they move. Only what is certain without a trace of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.layout import SEQ, Layout, R, V
from shardplan.core.plan import Assignment, Rule
from shardplan.core.tree import named, parent

from .facts import Facts
from .regions import hands, inside

NESTED = Code(
    code="SP363",
    title="a door inside a door that has moved the value already",
    text="""A door moves the argument of its module once for everything inside. A second door of the same kind
further in would move it again: a gathered sequence would be gathered once more, a gradient all-reduced twice
and then be too large by the tp size, with the loss unchanged. Keep the outer door for a block whose parts all
read the same value, or the inner ones.""",
    bad="""# shardplan validate mixtral-8x7b.json mine.yaml --tp 2
version: "1"
name: mine
extends: mixtral
tensor_parallel:
  model.layers.*.mlp.experts: input_with_grad_allreduce
""",
    good="""# shardplan validate mixtral-8x7b.json mine.yaml --tp 2
version: "1"
name: mine
extends: mixtral
""",
)

UNSPLIT = Code(
    code="SP364",
    title="gathering a sequence that nothing splits",
    text="""`gather_seq_input` and `colwise_seq` gather the sequence from all ranks, but no rule of the plan
splits it first: every rank has it whole already. Under `tensor_parallel` the door of a block is
`input_with_grad_allreduce`; the gathering doors belong under `sequence_parallel`.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp: gather_seq_input
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp: input_with_grad_allreduce
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
)

CODES = (NESTED, UNSPLIT)


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each pair of nested rules, and for each rule that gathers in vain."""
    yield from _nested(facts)
    yield from _unsplit(facts)


def _nested(facts: Facts) -> Iterator[Diagnostic]:
    modules = facts.resolved.modules
    doors = {name: a for name, a in modules.items() if inside(a) is not None and facts.style(a).takes}
    nearest = _nearest(facts, doors)
    regions: dict[str, list[tuple[str, tuple[Layout, ...]]]] = defaultdict(list)
    for name, assignment in modules.items():
        around = nearest.get(name)
        while around is not None:
            regions[around].append((name, hands(assignment)))
            around = nearest.get(around)
    pairs: dict[tuple[int, int], tuple[Rule, Rule, list[str]]] = {}
    for name, door in doors.items():
        outer = doors.get(nearest.get(name, ""))
        if outer is None or _argument(facts, door) != _argument(facts, outer):
            continue
        takes = facts.style(door).takes
        if inside(outer) in takes or _handed_within(regions[outer.name], name, takes):
            continue
        pairs.setdefault((id(outer.rule), id(door.rule)), (outer.rule, door.rule, []))[2].append(name)
    for outer_rule, rule, names in pairs.values():
        yield Diagnostic(
            code=NESTED.code,
            severity=Severity.ERROR,
            message=f"the door `{rule.style}` for {named(names)} is inside the door `{outer_rule.style}`, "
            "which has moved the value already",
            primary=Label(rule.location, "moves it again"),
            related=(Label(outer_rule.location, "moves it first"),),
            help="remove one of the two doors",
            modules=tuple(names),
        )


def _nearest(facts: Facts, doors: Mapping[str, Assignment]) -> Mapping[str, str]:
    """The door that each module stands in, itself not counted; modules outside every door are not there."""
    nearest: dict[str, str] = {}
    for name in facts.resolved.tree.modules if doors else ():
        around = parent(name)
        if name and (around in doors or around in nearest):
            nearest[name] = around if around in doors else nearest[around]
    return nearest


def _argument(facts: Facts, door: Assignment) -> str | None:
    return "*" if facts.style(door).argument == "floats" else door.rule.argument


def _handed_within(region: list[tuple[str, tuple[Layout, ...]]], door: str, takes: tuple[Layout, ...]) -> bool:
    """Whether a rule of the region, outside the door itself, hands on what the door takes."""
    within = (handed for name, handed in region if name != door and not name.startswith(f"{door}."))
    return any(layout in takes for handed in within for layout in handed)


def _unsplit(facts: Facts) -> Iterator[Diagnostic]:
    modules = facts.resolved.modules
    split = V(SEQ)
    if any(split in hands(a) or inside(a) == split for a in modules.values()):
        return
    vain: dict[int, tuple[Rule, list[str]]] = {}
    for name, assignment in modules.items():
        style = facts.style(assignment)
        if style.takes == (split,) and style.inside == R:
            vain.setdefault(id(assignment.rule), (assignment.rule, []))[1].append(name)
    for rule, names in vain.values():
        yield Diagnostic(
            code=UNSPLIT.code,
            severity=Severity.ERROR,
            message=f"`{rule.style}` for {named(names)} gathers the sequence, which no rule splits",
            primary=Label(rule.location, "gathers the sequence"),
            help="use `input_with_grad_allreduce` for the door of a tensor-parallel block and `colwise` for a "
            "matrix, or write the rule under `sequence_parallel`",
            modules=tuple(names),
        )
