"""What FSDP2 refuses, said before it is called.

Read in torch 2.13, `torch/distributed/fsdp/_fully_shard`, and tried in tests/test_check_fsdp_torch.py: dim 0
is padded, also where tp has already split it unevenly (`_StridedShard`), so no size of a dimension is
refused. What is refused: a list without a forward as a unit (`_fsdp_init.py`, `_validate_module`), parameters
without dimensions (`_verify_managed_param`), trainable parameters of several dtypes in one unit
(`_fsdp_param_group.py`, `_init_mp_dtypes`), and a number of ranks to reshard to that does not divide
(`_get_post_forward_mesh_info`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import named, parent

from .facts import Facts
from .places import field_label
from .words import join

LIST = Code(
    code="SP330",
    title="a list of modules as an FSDP unit",
    text="""A unit's parameters are gathered when its forward begins. A `ModuleList` or `ModuleDict` has no
forward of its own, so FSDP2 refuses it: name its elements.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --dp-shard 2
version: "1"
name: mine
data_parallel:
  units: [model.layers]
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --dp-shard 2
version: "1"
name: mine
data_parallel:
  units: [model.layers.*]
""",
)

SCALAR = Code(
    code="SP331",
    title="a parameter without dimensions under FSDP2",
    text="""FSDP2 splits dim 0 of every parameter, and a scalar has none. Give it the shape [1].""",
    bad="""# shardplan validate mixtral-scalar-gate.json mine.yaml --dp-shard 2
version: "1"
name: mine
data_parallel:
  units: [model.layers.*]
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --dp-shard 2
version: "1"
name: mine
data_parallel:
  units: [model.layers.*]
""",
)

DTYPES = Code(
    code="SP332",
    title="parameters of several dtypes in one FSDP unit",
    text="""The gradients of a unit are reduced in one buffer, so its trainable parameters must have one
dtype; torch refuses it at the first step. Make what differs a unit of its own, or convert the model to one
dtype and say the compute dtype in `mixed_precision`.""",
    bad="""# shardplan validate mixtral-float64-router.json mine.yaml --dp-shard 2
version: "1"
name: mine
data_parallel:
  units: [model.layers.*]
""",
    good="""# shardplan validate mixtral-float64-router.json mine.yaml --dp-shard 2
version: "1"
name: mine
data_parallel:
  units: [model.layers.*, model.layers.*.mlp.gate]
""",
)

RESHARD = Code(
    code="SP333",
    title="reshard_after_forward is no divisor of the FSDP size",
    text="""As a number, `reshard_after_forward` says over how many ranks a unit is split again between
forward and backward; the FSDP ranks (`dp_shard` times `cp`) are divided into groups of that size.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --dp-shard 8
version: "1"
name: mine
data_parallel:
  units: [model.layers.*]
  reshard_after_forward: 3
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --dp-shard 8
version: "1"
name: mine
data_parallel:
  units: [model.layers.*]
  reshard_after_forward: 4
""",
)

CODES = (LIST, SCALAR, DTYPES, RESHARD)

WITHOUT_FORWARD = ("ModuleList", "ModuleDict")


def fully_shards(resolved: ResolvedPlan) -> bool:
    """Whether FSDP2 is the plan's backend; without a section it is."""
    return resolved.data_parallel is None or resolved.data_parallel.backend == "fsdp2"


def severity(resolved: ResolvedPlan) -> Severity:
    """An error where FSDP2 takes part; a warning where the sizes leave it out but the plan would not work
    with it."""
    sizes = resolved.sizes
    return Severity.ERROR if sizes.dp_shard * sizes.dp_replicate * sizes.cp > 1 else Severity.WARNING


def check(facts: Facts) -> Iterator[Diagnostic]:
    """At most one finding for each reason."""
    resolved = facts.resolved
    if not fully_shards(resolved):
        return
    lists = tuple(n for n in resolved.dp_units if resolved.tree.modules[n].class_name in WITHOUT_FORWARD)
    if lists:
        message = f"{named(lists)} is a list without a forward of its own, and cannot be an FSDP unit"
        yield _finding(facts, LIST, message, f"name its elements: `{named(lists)}.*`", lists)
    scalars = tuple(name for name, (_, p) in resolved.tree.parameters.items() if not p.shape)
    if scalars:
        message = f"{named(scalars)} has no dimension that FSDP2 could split"
        yield _finding(facts, SCALAR, message, "give the parameter the shape [1] in the model", scalars)
    yield from _dtypes(facts)
    yield from _reshard(facts)


def _dtypes(facts: Facts) -> Iterator[Diagnostic]:
    if len({parameter.dtype for _, parameter in facts.resolved.tree.parameters.values()}) < 2:
        return
    by_unit: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, (module, parameter) in facts.resolved.tree.parameters.items():
        if parameter.requires_grad:
            by_unit[facts.unit_of[module.name]][parameter.dtype].append(name)
    mixed = {unit: dtypes for unit, dtypes in by_unit.items() if len(dtypes) > 1}
    if not mixed:
        return
    rare = {name for dtypes in mixed.values() for name in min(dtypes.values(), key=len)}
    kinds = sorted({dtype for dtypes in mixed.values() for dtype in dtypes})
    inner = [unit for unit in mixed if unit]
    units = f"the FSDP unit {named(inner)}" if inner else "the root's FSDP unit"
    owners = tuple(dict.fromkeys(parent(name) for name in facts.resolved.tree.parameters if name in rare))
    yield _finding(
        facts,
        DTYPES,
        f"{units} has parameters of dtypes {join(kinds, 'and')}, and may have only one",
        f"make {named(owners)} a unit of its own, or convert the model to one dtype",
        tuple(name for name in facts.resolved.tree.parameters if name in rare),
    )


def _reshard(facts: Facts) -> Iterator[Diagnostic]:
    section, sizes = facts.resolved.data_parallel, facts.resolved.sizes
    ranks = sizes.dp_shard * sizes.cp
    to = section.reshard_after_forward if section else True
    if isinstance(to, bool) or not isinstance(to, int) or ranks == 1:
        return
    if to < 1 or ranks % to:
        divisors = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        message = f"reshard_after_forward is {to}, which does not divide the {ranks} FSDP ranks"
        yield _finding(facts, RESHARD, message, f"use {join(divisors, 'or')}", (), "reshard_after_forward")


def _finding(
    facts: Facts, code: Code, message: str, help: str, names: tuple[str, ...], key: str = "units"
) -> Diagnostic:
    return Diagnostic(
        code=code.code,
        severity=severity(facts.resolved),
        message=message,
        primary=field_label(facts.resolved.data_parallel, key),
        help=help,
        modules=names,
    )
