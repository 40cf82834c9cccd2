"""The lowering: one `ModuleProgram` for each module that owns a parameter or has a rule."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from shardplan.core.layout import SEQ, I, Layout, P, R, V
from shardplan.core.module_program import (
    GradientGroup,
    InputMove,
    ModuleProgram,
    OutputMove,
    OutsideReads,
    ParameterProgram,
    SharedGroup,
)
from shardplan.core.moves import move_ops
from shardplan.core.plan import BESIDE_TP, ResolvedPlan
from shardplan.core.tree import ModuleInfo, ModuleTree, ancestors, full_name, home_of, homes
from shardplan.styles.bound import BoundModule, bound_modules
from shardplan.styles.boundary import InputBoundary
from shardplan.styles.stored_parameters import lower_parameters
from shardplan.styles.style_record import FeatureStyle
from shardplan.styles.token_layouts import tokens_layout

from .context_moves import with_context
from .program import Program


def lower(plan: ResolvedPlan, *others: ResolvedPlan) -> Program:
    """Lower a checked plan.

    Args:
        plan: the resolved plan, free of errors.
        others: other variants of the same plan that the model can then run as, too.
    """
    stored = {full_name(name, p.name): p.stored for name, one in bound_modules(plan).items() for p in one.parameters}
    whole = plan.sizes.tp == 1 and bool(plan.overlays & BESIDE_TP)
    variants = {one.overlays: lower_modules(one, stored, whole=whole) for one in others}
    return Program(plan, {plan.overlays: lower_modules(plan, whole=whole), **variants})


def lower_modules(
    plan: ResolvedPlan, stored: Mapping[str, Layout] | None = None, *, whole: bool = False
) -> Mapping[str, ModuleProgram]:
    """The module programs of one variant, by name, in the tree's order.

    Args:
        stored: how the model stores each parameter, if it is stored as another variant and only runs as this one.
        whole: lower only the exchanges of tokens, no other rules for tp: the mesh has ep or cp but no tp.
    """
    programs = _on_tp(plan, stored, whole=whole)
    return programs if plan.on_cp is None else with_context(plan, programs)


def _on_tp(plan: ResolvedPlan, stored: Mapping[str, Layout] | None, *, whole: bool) -> Mapping[str, ModuleProgram]:
    modules = bound_modules(plan)
    if stored is not None:
        modules = {name: _read_from(one, stored) for name, one in modules.items()}
    if whole:
        return {n: _alone(one) for n, one in modules.items() if one.experts is not None and one.experts.exchange}
    incoming = IncomingLayouts(modules, plan.incoming or {})
    programs = {}
    for name, one in modules.items():
        also_reads = _also_reads(plan, modules, one.module)
        if one.parameters or one.assignment or one.link or one.divide or one.settings or also_reads:
            programs[name] = _lower_module(plan, incoming, one, also_reads)
    return with_tables(plan.tree, _with_draws(plan, _with_sums(plan, _with_groups(plan, programs))))


def _read_from(one: BoundModule, stored: Mapping[str, Layout]) -> BoundModule:
    """A module of this variant, in a model that stores parameters as another variant does. Stored whole, they are cut where
    they are read; stored split, they are gathered. A parameter that no move reads stays as it is (`Program.unreadable`)."""
    found = tuple(_read_parameter(p, stored.get(full_name(one.name, p.name), p.stored)) for p in one.parameters)
    return one if found == one.parameters else replace(one, parameters=found)


def _read_parameter(parameter: ParameterProgram, stored: Layout) -> ParameterProgram:
    readable = stored.axis is parameter.stored.axis and not parameter.parts and parameter.computed.copies == 1
    if stored == parameter.stored or not readable or move_ops(stored, parameter.computed) is None:
        return parameter
    return replace(parameter, stored=stored)


def split_parameters(plan: ResolvedPlan) -> frozenset[str]:
    """Full names of the parameters that are split over tp."""
    return frozenset(
        full_name(name, p.name)
        for name, module in plan.tree.modules.items()
        for p in lower_parameters(plan, module)
        if p.dim is not None
    )


def shared_parameters(plan: ResolvedPlan) -> Mapping[str, frozenset[int]]:
    """Full name of each parameter whose rows several ranks compute with -> the number of ranks from which they are gathered."""
    return {
        full_name(name, p.name): p.gathered_from(plan.sizes.tp or 1)
        for name, module in plan.tree.modules.items()
        for p in lower_parameters(plan, module)
        if p.shared
    }


def _lower_module(
    plan: ResolvedPlan,
    incoming: IncomingLayouts,
    one: BoundModule,
    also_reads: tuple[tuple[str, ParameterProgram], ...],
) -> ModuleProgram:
    features = one.style.features if one.style else FeatureStyle()
    return ModuleProgram(
        name=one.name,
        style=one.style.name if one.style else None,
        parameters=one.parameters,
        enter=_enter(plan, incoming, one),
        slices=one.slices,
        buffers=one.buffers,
        leave=_leave(incoming, one),
        vocabulary=one.vocabulary,
        means=one.means(plan.sizes.tp or 1) if one.mean_ranks > 1 else None,
        link=one.link,
        read=plan.read_results.get(one.name, frozenset()) if one.link == "scope" else frozenset(),
        logits=one.width if features.dtensor else None,
        later=features.later,
        tail=one.tail,
        outside=_outside(plan, one),
        divide=one.divide,
        settings=one.settings,
        fused=one.assignment is None or one.assignment.rule.fused,
        experts=one.experts,
        layer=one.module.layer,
        also_reads=also_reads,
    )


def _alone(one: BoundModule) -> ModuleProgram:
    assert one.style is not None, one  # a rule distributes the experts
    return ModuleProgram(one.name, one.style.name, one.parameters, experts=one.experts, layer=one.module.layer)


def _also_reads(
    plan: ResolvedPlan, modules: Mapping[str, BoundModule], module: ModuleInfo
) -> tuple[tuple[str, ParameterProgram], ...]:
    """The parameters that the layout check saw the module read. For distributed experts these are all parameters
    below, because ranks run the experts a different number of times. The same holds for a module that did not run in
    the check (a vision tower without images), if it owns parameters and no rule is below it."""
    tree, prefix = plan.tree, full_name(module.name, "")
    below = tuple(name for name in tree.parameters if name.startswith(prefix))
    if modules[module.name].experts is not None:
        names = below
    elif module.name in plan.cross_module_reads:
        names = plan.cross_module_reads[module.name]
    elif module.parameters and plan.modules.get(module.name) is None and not _named_below(plan, prefix):
        names = below
    else:
        names = ()
    found = []
    for name in names:
        owner, _ = tree.parameters[name]
        if owner is module:
            continue
        program = next(p for p in modules[owner.name].parameters if full_name(owner.name, p.name) == name)
        found.append((owner.name.removeprefix(prefix), program))
    return tuple(found)


def _named_below(plan: ResolvedPlan, prefix: str) -> bool:
    return any(name.startswith(prefix) and f"{name}." != prefix for name in (*plan.assignments, *plan.fsdp_units))


def _enter(plan: ResolvedPlan, incoming: IncomingLayouts, one: BoundModule) -> tuple[InputMove, ...]:
    moves: list[InputMove] = []
    same = plan.same_arguments.get(one.name, {})
    for given in one.boundary.inputs:
        src, dst = incoming.source(one.name, given), given.destination
        if src != dst:
            first = plan.shared_reads.get(one.name) if (src, dst) == (I, R) else None
            alike = same.get(given.argument or "", frozenset())
            if any((m.src, m.dst) == (src, dst) and (m.argument or "") in alike for m in moves):
                first = one.name
            moves.append(InputMove(src, dst, given.argument, given.regather, first))
    return tuple(moves)


def _outside(plan: ResolvedPlan, one: BoundModule) -> OutsideReads | None:
    positions = one.boundary.outside
    if not positions:
        return None
    follows = one.style is not None and one.style.as_input
    output = one.boundary.output
    sliced = one.style is not None and one.style.input_destination == V(SEQ) and output is not None
    layout = output.destination if sliced and output is not None and output.destination.kind == "V" else R
    source = tokens_layout(plan, one.name) if follows else layout
    return OutsideReads(positions, source, plan.only_hooks_read(one.name, positions))


def _leave(incoming: IncomingLayouts, one: BoundModule) -> OutputMove | None:
    output = one.boundary.output
    if output is None or not output.moves or output.dtensor:
        return None
    size = one.width if output.source == V(-1) else None
    return OutputMove(output.source, incoming.output_layout(one.name), size)


def _with_groups(plan: ResolvedPlan, programs: dict[str, ModuleProgram]) -> Mapping[str, ModuleProgram]:
    """Give each block the list of its parameters with partial gradients, and the list of those with shared rows. An
    FSDP unit inside a block groups its own."""
    units = frozenset(plan.fsdp_units)
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    shared: dict[str, dict[int, list[tuple[str, str, bool]]]] = defaultdict(lambda: defaultdict(list))
    for name, program in programs.items():
        trained = {p.name for p in plan.tree.modules[name].parameters if p.requires_grad}
        home = home_of(name, units)
        inside = name[len(home) :].lstrip(".") if home else name
        for parameter in program.parameters:
            if parameter.summed and parameter.name in trained:
                groups[home].append((inside, parameter.name))
            for copies in parameter.gathered_from(plan.sizes.tp or 1) if parameter.shared else ():
                shared[home][copies].append((inside, parameter.name, parameter.name in trained))
    for home, members in groups.items():
        base = programs.get(home) or ModuleProgram(home)
        programs[home] = replace(base, group=GradientGroup(tuple(members)))
    for home, by_copies in shared.items():
        base = programs.get(home) or ModuleProgram(home)
        programs[home] = replace(base, shared=tuple(_shared_group(*one) for one in sorted(by_copies.items())))
    return {name: programs[name] for name in plan.tree.modules if name in programs}


def _shared_group(copies: int, members: list[tuple[str, str, bool]]) -> SharedGroup:
    names = tuple((module, parameter) for module, parameter, _ in members)
    return SharedGroup(names, copies, any(trained for *_, trained in members))


def _with_sums(plan: ResolvedPlan, programs: Mapping[str, ModuleProgram]) -> Mapping[str, ModuleProgram]:
    """Let partial sums wait for those that they are reduced with."""
    found = dict(programs)
    for one in plan.sums:
        for carrier in one.carriers:
            found[carrier] = replace(found[carrier], joins=one.closer)
        rule = f"`{one.rule.text}` of `{one.rule.pattern}` in {one.rule.location.file}"
        found[one.closer] = replace(found[one.closer], joined=one.carriers, sum_rule=rule)
        base = found.get(one.block) or ModuleProgram(one.block)
        found[one.block] = replace(base, collects=(*base.collects, one.closer))
    return {name: found[name] for name in plan.tree.modules if name in found}


def _with_draws(plan: ResolvedPlan, programs: Mapping[str, ModuleProgram]) -> Mapping[str, ModuleProgram]:
    """Record whose random numbers each drawing module draws."""
    found = dict(programs)
    for name, draws in plan.draws.items():
        found[name] = replace(found.get(name) or ModuleProgram(name), draws=draws)
    return {name: found[name] for name in plan.tree.modules if name in found}


# The place where a tensor is moved I -> R once for all modules that read it: the block around them.
def with_tables(tree: ModuleTree, programs: Mapping[str, ModuleProgram]) -> Mapping[str, ModuleProgram]:
    """Give each module that shares a move I -> R of an argument the module in whose calls the move happens once."""
    readers = [name for name, program in programs.items() if any(move.once for move in program.enter)]
    found = homes(tree, readers)
    count = Counter(found.values())
    several = {name for name in found if any(move.argument == "*" for move in programs[name].enter)}
    shared = {name: home for name, home in found.items() if count[home] > 1 or name in several}
    return {name: replace(p, reads_in=shared[name]) if name in shared else p for name, p in programs.items()}


# The layout that arrives at a module that takes R or I: as the layout check saw it, else from the plan's structure.
#
# Megatron's scheme has one block input per block: values are R inside and I outside. Only the final norm's output leaves a block region
# whole and is read by further matrix multiplications; whether it is R or I depends on its readers.
class IncomingLayouts:
    """The layouts that a plan's structure decides.

    Args:
        modules: the modules of the bound plan.
        seen: the result of the layout check: `ResolvedPlan.incoming`.
    """

    def __init__(self, modules: Mapping[str, BoundModule], seen: Mapping[str, Layout]):
        self.modules, self.seen = modules, seen
        self.outputs = {n: output for n, one in modules.items() if (output := one.boundary.output) is not None}

    def source(self, name: str, move: InputBoundary) -> Layout:
        """The layout of an argument. If several are accepted, it is the one that arrives, or the sum of an embedding that waits for this module."""
        if R in move.sources and I in move.sources:
            return self._incoming(name)
        return P if {I, P} <= {*move.sources} and self._waits_for(name) else move.sources[0]

    def _waits_for(self, name: str) -> bool:
        """Whether the sum of an embedding may wait for this block input: not if a whole value was seen here and the sum at another one."""
        if not any(one.link == "source" for one in self.modules.values()):
            return False
        entrances = (other for other, one in self.modules.items() if one.link == "block_input")
        return self.seen.get(name) != I or not any(self.seen.get(other) == P for other in entrances)

    def output_layout(self, name: str) -> Layout:
        """The declared output of a module. If its readers decide, it is what the layout check found. If that did not
        run, it is R before an output head that takes R, else I."""
        output = self.outputs[name]
        if not output.unresolved_gradient:
            return output.destination
        return self.seen.get(name) or (R if self._free_readers() else I)

    def _incoming(self, name: str) -> Layout:
        if name in self.seen:
            return self.seen[name]
        gathers = [other for other, output in self.outputs.items() if output.gathers]
        return self._in_block_input(name) or (self.output_layout(gathers[-1]) if gathers else I)

    def _in_block_input(self, name: str) -> Layout | None:
        found = (self.modules[ancestor].boundary.within for ancestor in ancestors(name))
        return next((layout for layout in found if layout in (R, I)), None)

    def _free_readers(self) -> bool:
        """Whether modules outside every block input take R: output heads, and colwise rules of a plan without block inputs."""
        return any(
            move.destination == R and I in move.sources
            for name, one in self.modules.items()
            if one.boundary.within is None and self._in_block_input(name) is None
            for move in one.boundary.inputs
        )
