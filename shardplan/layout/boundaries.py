"""What the style records say of each module: what may arrive, what is moved to what, how parameters are held.

Types come from nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.core.layout import SEQ, I, Layout, P, R, V
from shardplan.core.plan import Assignment, ResolvedPlan, Rule
from shardplan.core.program import ParameterProgram
from shardplan.core.tree import ModuleInfo
from shardplan.styles import STYLES, Style
from shardplan.styles.links import links
from shardplan.styles.stored import lower_parameters

OUTPUTS = {"gather": (V(SEQ), R), "all_reduce": (P, I), "reduce_scatter": (P, V(SEQ))}  # what `output:` says


@dataclass(frozen=True, slots=True)
class Boundary:
    """One module as its rule and its style's record have it.

    Args:
        name: its full name.
        assignment: its rule, or None.
        parameters: every parameter that it owns.
        takes: what may arrive; empty: as it comes.
        inside: what the module's forward gets; None: as it came.
        argument: the argument that `takes` speaks of: a name, None for the first, "*" for all with floating point.
        computes: what the forward is said to return, where the record says it.
        hands: what is handed on; None: what the forward returned.
        open_gradient: whether `hands` may be R or I, as its readers have it.
        vocabulary: rows of the whole table, where they are looked up by id.
        tail, outside, divide, layer: as in `core.program.ModuleProgram`.
        scope: the module inside whose forward `hands` holds: outside it the output is completed (I).
        declared: the output is a declared split of the logits, handed on as if whole.
    """

    name: str
    assignment: Assignment | None
    parameters: tuple[ParameterProgram, ...]
    takes: tuple[Layout, ...] = ()
    inside: Layout | None = None
    argument: str | None = None
    computes: Layout | None = None
    hands: Layout | None = None
    open_gradient: bool = False
    vocabulary: int | None = None
    tail: int = 0
    outside: tuple[int, ...] = ()
    divide: tuple[str, ...] = ()
    layer: str = ""
    scope: str | None = None
    declared: bool = False

    @property
    def moves(self) -> bool:
        """Whether its rule says of what arrives or is handed on what it is to be."""
        return bool(self.takes) or self.inside is not None or self.computes is not None or self.hands is not None

    @property
    def style(self) -> Style | None:
        return STYLES[self.assignment.rule.style] if self.assignment else None


def boundaries(plan: ResolvedPlan) -> Mapping[str, Boundary]:
    """The boundary of every module, by name, in the tree's order."""
    scope = next((name for name, link in links(plan).items() if link == "scope"), None)
    return {name: _boundary(plan, module, scope) for name, module in plan.tree.modules.items()}


def _boundary(plan: ResolvedPlan, module: ModuleInfo, scope: str | None) -> Boundary:
    assignment = plan.modules.get(module.name)
    parameters = lower_parameters(plan, module)
    if assignment is None:
        return Boundary(module.name, None, parameters, layer=module.layer)
    rule, style = assignment.rule, STYLES[assignment.rule.style]
    if _does_nothing(style, rule, module):
        return Boundary(
            module.name, assignment, parameters, outside=rule.read_outside, divide=rule.divide, layer=module.layer
        )
    inside, computes, hands = style.inside, style.computes, style.hands
    if inside == R and rule.grad == "complete" and style.is_door:
        inside = I
    open_gradient = False
    if rule.output is not None:
        computes, hands = OUTPUTS[rule.output]
        if rule.output == "gather":
            open_gradient = rule.grad is None
            hands = I if rule.grad == "complete" else R
    elif style.until_door:
        hands = I if scope is None else P
    elif style.features.dtensor:
        hands = I
    at = rule.seq_dim
    return Boundary(
        name=module.name,
        assignment=assignment,
        parameters=parameters,
        takes=tuple(layout.at(at) for layout in style.takes),
        inside=inside.at(at) if inside else None,
        argument="*" if style.argument == "floats" else rule.argument,
        computes=computes.at(at) if computes else None,
        hands=hands.at(at) if hands else None,
        open_gradient=open_gradient,
        vocabulary=_rows(module) if style.splits_rows else None,
        tail=int(plan.tree.numbers[style.features.tail]) if style.features.tail else 0,
        outside=rule.read_outside,
        divide=rule.divide,
        layer=module.layer,
        scope=scope if style.until_door else None,
        declared=style.features.dtensor,
    )


def _rows(module: ModuleInfo) -> int:
    """The number of rows of a look-up table."""
    weight = module.parameter("weight")
    assert weight is not None, module.name
    return weight.shape[0]


def _does_nothing(style: Style, rule: Rule, module: ModuleInfo) -> bool:
    """Whether a rule moves nothing and holds no gradient: what it says of layouts has no consequence."""
    moves = any(layout != style.inside for layout in style.takes) or rule.output is not None
    moves = moves or style.hands not in (None, style.computes) or style.features.dtensor or style.until_door
    return not moves and not style.shards_parameters and not any(p.requires_grad for p in module.parameters)


def is_mean(plan: Mapping[str, Boundary], module: str, operation: str) -> bool:
    """Whether an operation in a module's own code is a mean that its style has taken over the features of all ranks."""
    style = plan[module].style
    return operation == "mean" and style is not None and style.features.means
