"""The section `context_parallel` of a plan, derived from its sequence-parallel section and from the model's run."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.compiler.bind import bind
from shardplan.compiler.bind.assignments import in_order
from shardplan.compiler.bind.heads_below import with_heads_below
from shardplan.compiler.check.context_rules import scattering
from shardplan.compiler.layout import LayoutReport, ModelLayouts, check_layout
from shardplan.compiler.layout.model import has_stacks
from shardplan.compiler.layout.outside_reads import read_outside
from shardplan.compiler.layout.run import RecordedModel
from shardplan.compiler.lower.heads_over_cp import with_heads
from shardplan.core.diagnostics import Diagnostic, Location
from shardplan.core.layout import SEQ, V
from shardplan.core.mesh import Axis, MeshSizes
from shardplan.core.plan import NO_OVERLAYS, Assignment, Overlays, PlanFile, ResolvedPlan, Rule
from shardplan.core.tree import ancestors, part
from shardplan.model import FoundModel
from shardplan.model.labels_over_cp import SEQUENCE, own_labels_of
from shardplan.model.rebinding import copied
from shardplan.model.reduced.model_inputs import IGNORED
from shardplan.model.reduced.outcome import results_of
from shardplan.runtime.parallel.forward import arguments_of
from shardplan.runtime.parallel.outputs import on_first
from shardplan.styles.boundary import Boundary, boundary
from shardplan.torchlib.equality import TOLERANCE, relative_error
from shardplan.torchlib.modes import reduced_runs

from .hollow_run import changed_argument, reads_shapes_alone
from .router_runs import recorded_with_routers

RANKS = 2  # the cp ranks on which it is tried
ENTER, MIX, LEAVE, READ = "split_seq_input", "replicate_seq", "gather_seq_output", "gather_seq_input"
HEADS = "exchange_heads"
MIXERS = (MIX, HEADS)
TOKENS = "token_wise"
Section = Mapping[str, str | dict[str, Any]]
_ON: Overlays = frozenset({"context_parallel"})


@dataclass(frozen=True, slots=True)
class NoSection:
    """Why there is no such section.

    Args:
        reason: in words.
        findings: those about the section that was tried, with the names of the reduced model.
    """

    reason: str
    findings: tuple[Diagnostic, ...] = ()


@reduced_runs()
def context_section(found: FoundModel, plan: PlanFile) -> Section | NoSection:
    """The rules for the axis cp. The sequence is split where sequence parallelism splits it. It is whole in a module that is not
    token-wise and for which sequence parallelism gathers it; where tp rules below name the heads, each cp rank then has a share of them. Runs decide.

    Args:
        plan: a plan for the model, without errors.

    Raises:
        PlanError: there is no reduced model, or it does not run.
    """
    if not plan.has_overlay:
        return NoSection(
            "the plan has no section sequence_parallel, which says where the sequence is split and gathered"
        )
    layouts = ModelLayouts(found, 1, cp=RANKS)
    tree = layouts.tree
    resolved, _ = bind(plan, tree, MeshSizes(tp=1), frozenset({"sequence_parallel"}))
    crossings = {name: boundary(a.rule) for name, a in resolved.modules.items()}
    rules = {name: rule for name, a in resolved.modules.items() if (rule := _rule(crossings[name], a.rule)) is not None}
    if not any(rule.style == ENTER for rule in rules.values()):
        return NoSection("the section sequence_parallel splits no module's input")

    over_tp = bind(plan, tree, MeshSizes(tp=RANKS), NO_OVERLAYS)[0]

    def bound(rules: Mapping[str, Rule]) -> ResolvedPlan:
        own = {name: Assignment(name, False, rule, "context_parallel") for name, rule in rules.items()}
        assignments = in_order(with_heads_below(own, over_tp.assignments, tree), tree)
        return ResolvedPlan(plan, tree, MeshSizes(tp=RANKS), _ON, assignments, axis=Axis.CP)

    def checked(on_cp: ResolvedPlan) -> LayoutReport:
        return check_layout(on_cp, layouts.recorded_for(on_cp), help=False)

    def wrong(rules: Mapping[str, Rule]) -> tuple[Diagnostic, ...]:
        return checked(bound(rules)).diagnostics

    def shared(rules: Mapping[str, Rule]) -> bool:
        on_cp = bound(rules)
        report = checked(on_cp)
        if report.diagnostics or scattering(on_cp):
            return False
        whole = replace(resolved, on_cp=on_cp, cross_module_reads=report.cross_module_reads)
        return all(reads_shapes_alone(recorded, with_heads(whole, {})[0]) for recorded in layouts.recorded_models)

    if findings := wrong(_outermost(rules)):
        # A module that scatters no result only reads all tokens; if it adds an argument of the block to its result, both have the rank's own tokens.
        leaves = {name for name, one in crossings.items() if V(SEQ) in one.output_destinations}
        reads = {name for name in rules if not any(name in (other, *ancestors(other)) for other in leaves)}
        reading = _with_style(rules, READ, reads)
        tries = (reading, _by_parts(rules, over_tp), _by_parts(reading, over_tp))
        right = next((one for one in tries if not wrong(_outermost(one))), None)
        rules = _with_style(rules, HEADS) if right is None else right
        if right is None and not shared(_outermost(rules)):
            return NoSection("what sequence parallelism does over tp is not right over cp", findings)
    handed_out = _handed_out(layouts)
    for pattern in dict.fromkeys(tree.pattern(name) for name, rule in rules.items() if rule.style in MIXERS):
        parts = {name for name in tree.modules if any(tree.pattern(n) == pattern for n in (name, *ancestors(name)))}
        # A rule inside it that splits the input would split again what it gathers.
        fewer = {n: r for n, r in rules.items() if tree.pattern(n) != pattern and (r.style != ENTER or n not in parts)}
        routers = {name: rule for name, rule in handed_out.items() if name in parts and name not in fewer}
        # A module whose own rule lets its result be read outside may do this for the module around it.
        handing = {above for name, rule in fewer.items() if rule.read_outside for above in ancestors(name)}
        inner = {name: rule for name, rule in routers.items() if name not in handing}
        below = {name: _TOKEN_WISE for name, m in tree.modules.items() if has_stacks(m) and name not in fewer}
        rests = (routers,) if inner == routers else (routers, inner)
        handed = ({**fewer, **more, **rest} for rest in rests for more in ((below, {}) if below else ({},)))
        rules = next((one for one in handed if not wrong(_outermost(one))), rules)
    for pattern in dict.fromkeys(tree.pattern(name) for name, rule in _outermost(rules).items() if rule.style == MIX):
        heads = {n: replace(rule, style=HEADS) for n, rule in rules.items() if tree.pattern(n) == pattern}
        if shared(_outermost({**rules, **heads})):
            rules |= heads
    exits = {name: rule for name, rule in _outermost(rules).items() if rule.style in (LEAVE, READ)}
    inside = {name: rule for name, rule in rules.items() if name not in exits}
    if all(losses_are_shares(recorded, exits) for recorded in layouts.recorded_models) and not wrong(
        _outermost(inside)
    ):
        rules = inside
    return dict(_written(layouts, _outermost(rules)))


def _handed_out(layouts: ModelLayouts) -> dict[str, Rule]:
    """Token-wise rules for the outermost modules in blocks with a result that code outside the blocks reads in every layer
    when routers return theirs (for an auxiliary loss, or hooks that record them). The rules say that it is read outside."""
    tree, found = layouts.tree, dict[str, frozenset[int]]()
    for recorded in recorded_with_routers(layouts)[len(layouts.recorded_models) :]:
        for name, positions in read_outside(recorded.reference).items():
            pattern = tree.pattern(name)
            found[pattern] = found.get(pattern, positions) & positions
    rules = {
        name: replace(_TOKEN_WISE, read_outside=tuple(sorted(kept)))
        for name in tree.modules
        if (kept := found.get(tree.pattern(name)))
    }
    return {name: rule for name, rule in rules.items() if not any(above in rules for above in ancestors(name))}


def _with_style(rules: Mapping[str, Rule], style: str, names: Container[str] | None = None) -> dict[str, Rule]:
    """The rules, with another style for those of some modules, or of all, that gather and scatter."""
    chosen = {n for n, rule in rules.items() if rule.style == MIX and (names is None or n in names)}
    return {n: replace(rule, style=style) if n in chosen else rule for n, rule in rules.items()}


def _by_parts(rules: Mapping[str, Rule], over_tp: ResolvedPlan) -> dict[str, Rule]:
    """The rules with each part of a block that tp splits as a module that mixes tokens. They replace gathers inside blocks: the gather after
    a norm that several parts read, whose results tp scatters, or the gather for one matrix, which is token-wise."""
    tree = over_tp.tree
    kept = {name: rule for name, rule in rules.items() if rule.style not in (LEAVE, READ) or part(name) is None}
    split = (tree.owner(name) if a.is_parameter else name for name, a in over_tp.assignments.items())
    parts = {name: _MIXES for one in split if (name := part(one)) is not None and name != one and name not in kept}
    return {**kept, **parts}


def _outermost(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The rules without those inside modules that have the whole sequence."""
    mixers = {name for name, rule in rules.items() if rule.style in MIXERS}
    return {name: rule for name, rule in rules.items() if mixers.isdisjoint(ancestors(name))}


_NONE = Rule("", "", Location(""))
_MIXES = replace(_NONE, style=MIX)
_TOKEN_WISE = replace(
    _NONE, style=TOKENS
)  # experts, whose code picks each expert's tokens: one operation, for the check


def _rule(crossing: Boundary, rule: Rule) -> Rule | None:
    """The cp rule for a rule of sequence parallelism, whatever the latter does with features."""
    inputs, output = crossing.inputs, crossing.output
    split = V(SEQ)
    if any(one.destination == split and split not in one.sources for one in inputs):
        return _over_cp(rule, ENTER)
    if crossing.is_block_input and any(one.sources == (split,) and one.destination != split for one in inputs):
        return _over_cp(rule, MIX)
    if crossing.outside and not any(split in (one.destination, *one.sources) for one in inputs):
        return replace(_NONE, pattern=rule.pattern, style=TOKENS, read_outside=crossing.outside)
    if output is not None and output.source == split and output.destination != split:
        return _over_cp(rule, LEAVE)
    if any(one.sources == (split,) and one.destination != split for one in inputs):
        return _over_cp(rule, READ)
    return None


def _over_cp(rule: Rule, style: str) -> Rule:
    argument = rule.argument if style in (ENTER, MIX, READ) else None
    return replace(_NONE, pattern=rule.pattern, style=style, argument=argument, seq_dim=rule.seq_dim)


def _written(layouts: ModelLayouts, rules: Mapping[str, Rule]) -> Iterator[tuple[str, str | dict[str, Any]]]:
    """The rules for a plan file: a rule that splits an input has the module's name as its key, other rules have its pattern."""
    tree = layouts.tree
    elsewhere = {tree.pattern(name) for name in tree.modules if name not in rules}
    for name, rule in rules.items():
        options: dict[str, Any] = {"argument": rule.argument} if rule.argument is not None else {}
        options |= {"read_outside": list(rule.read_outside)} if rule.read_outside else {}
        options |= {"seq_dim": rule.seq_dim} if rule.seq_dim != _NONE.seq_dim else {}
        alone = rule.style == ENTER and tree.pattern(name) in elsewhere
        key = tree.address(name if alone else tree.pattern(name))
        yield key, {"style": rule.style, **options} if options else rule.style


# Running a model to find whether its results are only those of the tokens that its head reads.
def losses_are_shares(recorded: RecordedModel, exits: Mapping[str, Rule]) -> bool:
    """Whether a model whose head reads a part of the tokens computes the loss of this part: the mean of all ranks' losses is then the whole
    loss. Labels are shifted and then cut. It is tried with parts that have different numbers of labels.

    Args:
        exits: the rules that would make the sequence whole after the blocks, by module.
    """
    labels = recorded.inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.shape[SEQUENCE] % RANKS:
        return False
    labels = labels.clone()
    labels[:, 1 : labels.shape[SEQUENCE] // RANKS - 1] = IGNORED
    try:
        with torch.no_grad():
            whole = results_of(copied(recorded.model)(**{**recorded.inputs, "labels": labels}))
            parts = [
                results_of(_cut(recorded.model, exits, rank)(**_own(recorded, labels, rank))) for rank in range(RANKS)
            ]
    except Exception:  # raised by code that needs all tokens, or cannot take shifted labels
        return False
    return "loss" in whole and all(_same(value, [part.get(name) for part in parts]) for name, value in whole.items())


def _own(recorded: RecordedModel, labels: Tensor, rank: int) -> dict[str, Any]:
    return {**recorded.inputs, **own_labels_of(labels, RANKS, rank)}


def _same(whole: Tensor, parts: list[Tensor | None]) -> bool:
    values = [value for value in parts if value is not None]
    if len(values) < len(parts):
        return False
    if whole.ndim == 0:
        return relative_error(torch.stack(values).mean(), whole) <= TOLERANCE[whole.dtype]
    joined = values[0] if values[0].shape == whole.shape else torch.cat(values, SEQUENCE)
    return joined.shape == whole.shape and relative_error(joined, whole) <= TOLERANCE[whole.dtype]


def _cut(model: nn.Module, exits: Mapping[str, Rule], rank: int) -> nn.Module:
    """A copy of the model that has only a rank's tokens after its exits."""
    model = copied(model)
    for name, rule in exits.items():
        module, crossing = model.get_submodule(name), boundary(rule).on(Axis.CP)
        own = partial(_own_tokens, dim=rule.seq_dim, rank=rank)
        if crossing.output is not None:
            module.register_forward_hook(partial(_of_output, own))
        else:
            argument = rule.argument or arguments_of(module)[0]
            module.register_forward_pre_hook(partial(changed_argument, argument, own), with_kwargs=True)
    return model


def _own_tokens(x: Tensor, dim: int, rank: int) -> Tensor:
    return x.chunk(RANKS, dim)[rank]


def _of_output(change: Callable[[Tensor], Tensor], module: nn.Module, args: tuple, output: Any) -> Any:
    return on_first(output, change)
