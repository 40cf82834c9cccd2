"""Plans that FSDP2 would refuse, reported before it is called.

Read in `torch/distributed/fsdp/_fully_shard` of torch 2.13, and tried in tests/test_check_fsdp_torch.py. Dim 0 is padded,
also where tp has already split it unevenly (`_StridedShard`), so no size of a dimension is refused. Parameters without
dimensions, which FSDP2 refuses (`_verify_managed_param`), are not given to it (`runtime.parallel.whole_scalars`). Refused
are: trainable parameters of several dtypes in one unit (`_fsdp_param_group.py`, `_init_mp_dtypes`), where they cannot be
units of their own; a number of ranks to reshard to that does not divide (`_get_post_forward_mesh_info`); and any such number
for parameters that tp has split (`_fsdp_param.py`, `to_sharded_post_forward`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.plan import ResolvedPlan
from shardplan.core.sections import DataParallel
from shardplan.core.tree import parent
from shardplan.styles.backends import BACKENDS

from .check_words import field_label, join
from .facts import Facts

DTYPES = Code("SP332")
RESHARD = Code("SP333")
TRAINED = Code("SP334")
UNCAST = Code("SP335")


def fully_shards(resolved: ResolvedPlan) -> bool:
    """Whether torch's `fully_shard` shards the units of the plan's backend; without a section, the default one's."""
    section = resolved.data_parallel or DataParallel()
    return BACKENDS[section.backend].fully_shard


def severity(resolved: ResolvedPlan) -> Severity:
    """An error where FSDP2 is used, also over one rank (torch refuses the same there). A warning where the sizes leave
    it out but the plan would not work with it."""
    sizes = resolved.sizes
    wraps = sizes.shards > 0 and resolved.data_parallel is not None
    return Severity.ERROR if wraps or sizes.data_parallel_ranks > 1 else Severity.WARNING


def check(facts: Facts) -> Iterator[Diagnostic]:
    """At most one finding for each reason."""
    resolved = facts.resolved
    if not fully_shards(resolved):
        return
    yield from _dtypes(facts)
    yield from _reshard(facts)
    yield from _ignored(facts)


def _dtypes(facts: Facts) -> Iterator[Diagnostic]:
    if len({parameter.dtype for _, parameter in facts.resolved.tree.parameters.values()}) < 2:
        return
    by_unit: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, (module, parameter) in facts.resolved.tree.parameters.items():
        if parameter.requires_grad and parameter.shape and name not in facts.resolved.dp_ignored:
            by_unit[facts.unit_of[module.name]][parameter.dtype].append(name)
    mixed = {unit: dtypes for unit, dtypes in by_unit.items() if len(dtypes) > 1}
    if not mixed:
        return
    rare = {name for dtypes in mixed.values() for name in min(dtypes.values(), key=len)}
    kinds = sorted({dtype for dtypes in mixed.values() for dtype in dtypes})
    inner = [unit for unit in mixed if unit]
    units = f"the FSDP unit {facts.resolved.tree.named(inner)}" if inner else "the root's FSDP unit"
    owners = tuple(dict.fromkeys(parent(name) for name in facts.resolved.tree.parameters if name in rare))
    yield _finding(
        facts,
        DTYPES,
        f"{units} has parameters of dtypes {join(kinds, 'and')}, but may have only one",
        f"convert {facts.resolved.tree.named(owners)} to the dtype of the others",
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
    elif (sizes.tp or 1) > 1 and to not in (1, ranks):
        message = f"reshard_after_forward is {to}, which FSDP2 does not support for parameters that are split over tp"
        yield _finding(facts, RESHARD, message, "use true, false or `all_but_last`", (), "reshard_after_forward")


def _ignored(facts: Facts) -> Iterator[Diagnostic]:
    resolved, section = facts.resolved, facts.resolved.data_parallel
    if section is None:
        return
    left_out = {name: p for name, (_, p) in resolved.tree.parameters.items() if name in resolved.dp_ignored}
    trained = tuple(name for name, p in left_out.items() if p.requires_grad)
    if trained:
        message = f"{facts.resolved.tree.named(trained)} is trained, but its gradient would not be reduced over the data-parallel ranks"
        yield _finding(facts, TRAINED, message, "freeze it, or remove it from `ignored`", trained, "ignored")
    compute = section.mixed_precision.param if section.mixed_precision else None
    other = tuple(n for n, p in left_out.items() if compute and p.dtype != compute and _is_float(p.dtype))
    if other:
        dtypes = join(sorted({left_out[name].dtype for name in other}), "and")
        yield _finding(
            facts,
            UNCAST,
            f"{facts.resolved.tree.named(other)} stays {dtypes}, but mixed_precision.param is {compute}",
            f"convert it to {compute} before the plan is applied, or let FSDP2 shard it",
            other,
            "frozen" if section.frozen == "replicated" else "ignored",
        )


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _finding(
    facts: Facts, code: Code, message: str, help: str, names: tuple[str, ...], key: str = "units"
) -> Diagnostic:
    return Diagnostic(
        code=code,
        severity=severity(facts.resolved),
        message=message,
        primary=field_label(facts.resolved.data_parallel, key),
        help=help,
        modules=names,
    )
