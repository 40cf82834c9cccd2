"""Experts that are distributed whole: the sizes of the axis ep, the modules that the rules name, and what cannot be combined with
it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, Severity
from shardplan.core.mesh import VIEWED, Axis, MeshSizes
from shardplan.core.plan import Assignment, section_path
from shardplan.core.tree import ModuleInfo, ancestors, full_name, named
from shardplan.styles.backends import BACKENDS
from shardplan.styles.expert_shards import expert_dim
from shardplan.styles.stored_parameters import distributed_experts

from .facts import Facts
from .field_places import field_label

SIZES = Code(
    code="SP391",
    title="a size of the axis ep that the mesh does not have",
    text="""The axis `ep` takes no ranks of its own: it is a view of dp_shard x cp x tp, the innermost ranks of them. So ep must divide
their product, and either tp must divide ep or ep tp. The rest, ep_shard = dp_shard x cp x tp / ep, are the ranks over which FSDP2
shards the experts of one ep rank.""",
    bad="""# shardplan validate mixtral-8x7b.json mine.yaml --tp 2 --dp-shard 3 --ep 3
version: "1"
name: mine
extends: mixtral
""",
    good="""# shardplan validate mixtral-8x7b.json mine.yaml --tp 2 --dp-shard 2 --ep 4
version: "1"
name: mine
extends: mixtral
""",
)
UNEVEN = Code(
    code="SP392",
    title="experts that the ranks cannot share evenly",
    text="""Each rank has as many experts as every other: ep must divide their number. `ep_experts` distributes them over the tp
ranks, which all have the same tokens, so ep must be tp; `ep_dispatch` takes any ep. FSDP2 shards a rank's experts over ep_shard
ranks: ep_shard must divide their number, or another dim of each stack.""",
    bad="""# shardplan validate mixtral-8x7b.json mine.yaml --tp 1 --dp-shard 16 --ep 16
version: "1"
name: mine
extends: mixtral
""",
    good="""# shardplan validate mixtral-8x7b.json mine.yaml --tp 1 --dp-shard 16 --ep 8
version: "1"
name: mine
extends: mixtral
""",
)
NO_EXPERTS = Code(
    code="SP393",
    title="an axis ep, and no experts that are distributed over it",
    text="""On a mesh with several ep ranks the section `expert_parallel` of a plan is laid over the others; it must distribute some
module of experts. The style `ep_dispatch` stands there and nowhere else, as the other sections apply without an axis ep too;
`ep_experts`, which distributes experts over tp, may stand in each.""",
    bad="""# shardplan validate mixtral-8x7b.json mine.yaml --dp-shard 4 --ep 4 --tp 1
version: "1"
name: mine
data_parallel: {units: [model.layers.*]}
""",
    good="""# shardplan validate mixtral-8x7b.json mine.yaml --dp-shard 4 --ep 4 --tp 1
version: "1"
name: mine
expert_parallel:
  model.layers.*.mlp.experts: ep_dispatch
data_parallel: {units: [model.layers.*]}
""",
)
NO_STACK = Code(
    code="SP394",
    title="a module that is not a stack of experts",
    text="""The experts of a module are distributed by the first dim of its parameters: all must be stacks of as many experts, biases
too. Those of modules below it (a norm of each expert's result) are shared by all experts, and whole on every rank. Experts that are
modules of a list, one by one, are split by tensor parallelism.""",
    bad="""# shardplan validate mixtral-8x7b.json mine.yaml --dp-shard 2 --ep 2 --tp 1
version: "1"
name: mine
expert_parallel:
  model.layers.*.mlp: ep_dispatch
data_parallel: {units: [model.layers.*]}
""",
    good="""# shardplan validate mixtral-8x7b.json mine.yaml --dp-shard 2 --ep 2 --tp 1
version: "1"
name: mine
expert_parallel:
  model.layers.*.mlp.experts: ep_dispatch
data_parallel: {units: [model.layers.*]}
""",
)
COMBINED = Code(
    code="SP395",
    title="what cannot be combined with expert parallelism",
    text="""Experts that are sent tokens are units of FSDP2 over other ranks than the rest of the model, which `ddp` and `megatron_fsdp` do
not know. How many tokens a rank gets is known only when they are there, so a graph breaks around the experts: a module around them
cannot be compiled with `fullgraph`. Adapters of experts are not distributed.""",
    bad="""# shardplan validate mixtral-8x7b.json mine.yaml --dp-shard 2 --ep 2 --tp 1
version: "1"
name: mine
extends: mixtral
compile: {}
""",
    good="""# shardplan validate mixtral-8x7b.json mine.yaml --dp-shard 2 --ep 2 --tp 1
version: "1"
name: mine
extends: mixtral
compile: {fullgraph: false}
""",
)

CODES = (SIZES, UNEVEN, NO_EXPERTS, NO_STACK, COMBINED)


def check(facts: Facts) -> Iterator[Diagnostic]:
    """Of a variant with the section: its sizes; then the rules of all, of which those that need the axis ep stand there alone."""
    resolved = facts.resolved
    rules = {name: a for name, a in resolved.modules.items() if facts.style(a).experts is not None}
    misplaced = {
        name: a
        for name, a in rules.items()
        if facts.style(a).exchanges and section_path(a.section)[0] != "expert_parallel"
    }
    yield from _of_rules(facts, misplaced, _misplaced)
    with_ep = "expert_parallel" in resolved.overlays
    sizes = list(_sizes(facts)) if with_ep else []
    yield from sizes
    if with_ep and not rules:
        yield _error(
            NO_EXPERTS,
            f"the mesh axis ep has size {resolved.sizes.ep}, but the plan distributes no experts",
            None,
            "add a rule such as `model.layers.*.mlp.experts: ep_dispatch` under `expert_parallel`, or use a mesh without the axis ep",
        )
    modules = resolved.tree.modules
    unfit = {name: why for name in rules if (why := _not_stacked(modules[name])) is not None}
    yield from _of_rules(facts, rules, lambda _, name, assignment: unfit.get(name))
    fitting = {name: a for name, a in rules.items() if name not in {*unfit, *misplaced}}
    if not sizes:
        yield from _of_rules(facts, fitting, _uneven)
    yield from _of_rules(facts, fitting, _adapted)
    yield from _of_rules(facts, resolved.assignments, _inside)
    if with_ep:
        yield from _combined(facts)


def _error(code: Code, message: str, place: Label | None, help: str, modules: tuple[str, ...] = ()) -> Diagnostic:
    return Diagnostic(
        code=code.code, severity=Severity.ERROR, message=message, primary=place, help=help, modules=modules
    )


# (code, message about `{names}`, text beside the rule, help)
Reason = tuple[Code, str, str, str]


def _of_rules(
    facts: Facts, assignments: Mapping[str, Assignment], reason: Callable[[Facts, str, Assignment], Reason | None]
) -> Iterator[Diagnostic]:
    """One finding for each rule and reason."""
    groups: dict[tuple[Location, Reason], list[str]] = defaultdict(list)
    for name, assignment in assignments.items():
        if (why := reason(facts, name, assignment)) is not None:
            groups[assignment.rule.location, why].append(name)
    for (location, (code, message, beside, help)), names in groups.items():
        yield _error(code, message.replace("{names}", named(names)), Label(location, beside), help, tuple(names))


def _mesh(facts: Facts) -> MeshSizes:
    """The sizes that are checked, where none of tp is given too."""
    return replace(facts.resolved.sizes, tp=facts.tp)


def _sizes(facts: Facts) -> Iterator[Diagnostic]:
    if (why := _mesh(facts).ep_misfit) is not None:
        over = ", ".join(VIEWED)
        help = f"use an ep that divides the product of {over}, and is a multiple or a part of tp"
        yield _error(SIZES, why, None, help)


def _misplaced(facts: Facts, name: str, assignment: Assignment) -> Reason:
    style = assignment.rule.style
    return (
        NO_EXPERTS,
        f"`{style}` distributes experts over the axis ep, but `{assignment.section}` applies without it",
        f"stands under `{assignment.section}`",
        "move the rule to `expert_parallel`",
    )


def _not_stacked(module: ModuleInfo) -> Reason | None:
    if (why := _no_stack(module)) is None:
        return None
    return (
        NO_STACK,
        f"{{names}} is not a stack of experts: {why}",
        "distributes experts",
        "name the module that has the stacks of experts, or leave them to tensor parallelism",
    )


def _no_stack(module: ModuleInfo) -> str | None:
    """Why a module is no stack of experts."""
    owned = [p for p in module.parameters if p.adapter is None]
    if not owned:
        return "it has no parameters of its own"
    counts = {p.name: p.shape[0] if p.shape else 0 for p in owned}
    if len(set(counts.values())) > 1:
        return f"the first dims of its parameters differ ({', '.join(f'{name} {n}' for name, n in counts.items())})"
    return (
        None if all(len(p.shape) > 1 for p in owned if not p.name.endswith("bias")) else "its parameters have one dim"
    )


def _uneven(facts: Facts, name: str, assignment: Assignment) -> Reason | None:
    sizes, style = _mesh(facts), facts.style(assignment)
    parameters = facts.resolved.tree.modules[name].parameters
    count, ep, tp = parameters[0].shape[0], sizes.ep, sizes.of(Axis.TP)
    beside = "distributes them"
    if not style.exchanges and "expert_parallel" not in facts.resolved.overlays:
        return None  # split as any other parameter over tp
    if not style.exchanges and ep != tp:
        return (
            UNEVEN,
            f"`{style.name}` distributes experts over tp, but ep is {ep} and tp is {tp}",
            beside,
            "use `ep_dispatch`, or as many ep ranks as tp ranks",
        )
    if count % ep:
        fitting = [str(n) for n in range(2, count + 1) if count % n == 0 and sizes.viewed % n == 0]
        help = f"use ep {' or '.join(fitting)}" if fitting else f"use a mesh with an ep that divides {count}"
        return UNEVEN, f"ep={ep} does not divide the {count} experts of {{names}}", beside, help
    if not style.exchanges or facts.resolved.data_parallel is None:
        return None
    local = {p.name: (count // ep, *p.shape[1:]) for p in parameters}
    odd = next((name for name, shape in local.items() if expert_dim(shape, sizes.ep_shard) is None), None)
    if odd is None:
        return None
    return (
        UNEVEN,
        f"ep_shard = {sizes.ep_shard} divides no dim of {odd} of {{names}}, which is {list(local[odd])} on each ep rank",
        beside,
        "use a larger ep",
    )


def _inside(facts: Facts, name: str, assignment: Assignment) -> Reason | None:
    experts = distributed_experts(facts.resolved, name)
    if experts is None or (assignment.is_parameter and facts.resolved.tree.owner(name) == experts):
        return None
    return (
        COMBINED,
        "{names} is in a module of experts that are distributed whole, where all else is whole on every rank",
        f"stands for a part of `{experts}`",
        "remove it",
    )


def _adapted(facts: Facts, name: str, assignment: Assignment) -> Reason | None:
    modules, prefix = facts.resolved.tree.modules, full_name(name, "")
    inside = [module for other, module in modules.items() if other == name or other.startswith(prefix)]
    if all(p.adapter is None for module in inside for p in module.parameters):
        return None
    return (
        COMBINED,
        "the experts of {names} have adapters, which are not distributed",
        "distributes them",
        "remove them",
    )


def _combined(facts: Facts) -> Iterator[Diagnostic]:
    resolved = facts.resolved
    section, compiled = resolved.data_parallel, resolved.compile
    if section is not None and resolved.dp_experts and not BACKENDS[section.backend].experts:
        able = [backend.name for backend in BACKENDS.values() if backend.experts]
        yield _error(
            COMBINED,
            f"the backend {section.backend} does not shard experts that are distributed over ep",
            field_label(section, "backend"),
            f"use {' or '.join(able)}",
        )
    around = {name for experts in resolved.dp_experts for name in (experts, *ancestors(experts))}
    broken = [name for name in resolved.compile_modules if name in around]
    if compiled is not None and compiled.fullgraph and broken:
        yield _error(
            COMBINED,
            f"{named(broken)} is compiled with `fullgraph`, but the graph breaks at its experts",
            field_label(compiled, "fullgraph"),
            "write `fullgraph: false` under `compile`",
            tuple(broken),
        )
