"""The data-parallel backend is installed and supports what the plan and the mesh require."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.mesh import APPLIED, DATA_PARALLEL
from shardplan.core.sections import DataParallel, MegatronFSDP
from shardplan.styles.backends import BACKENDS, Backend

from .check_words import field_label, join
from .facts import Facts

MISSING = Code("SP551")
REPLICATES = Code("SP552")
NO_SECTION = Code("SP553")
FIELD = Code("SP554")
COMBINED = Code("SP555")
CLASSES = Code("SP556")
STRATEGY = Code("SP557")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """The mesh has the data_parallel section that it needs; the backend is installed and supports the plan and the mesh."""
    section = facts.resolved.data_parallel
    if section is None:
        yield from _no_section(facts)
        return
    backend = BACKENDS[section.backend]
    if backend.module and find_spec(backend.module) is None:
        yield Diagnostic(
            code=MISSING,
            severity=Severity.ERROR,
            message=f"the backend {backend.name} ({backend.package}) is not installed",
            primary=field_label(section, "backend"),
            help=f"`pip install {backend.package}`, or use `backend: fsdp2`",
        )
    sizes = facts.resolved.sizes
    axes = [axis for axis in APPLIED if axis not in backend.splits]
    splitting = {axis: size for axis in axes if (size := sizes.of(axis)) > 1}
    if splitting:
        listed = " and ".join(f"{axis}={size}" for axis, size in splitting.items())
        yield Diagnostic(
            code=REPLICATES,
            severity=Severity.ERROR,
            message=f"the backend {backend.name} {_limits(backend)}, but the mesh has {listed}",
            primary=field_label(section, "backend"),
            help=f"use `backend: fsdp2`, or a mesh with {_known(backend)} alone",
        )
    yield from _fields(section, backend)
    yield from _combined(facts, section, backend)
    if backend.units_by_class:
        yield from _classes(facts)
    if "megatron_fsdp" in backend.fields:
        yield from _strategy(section)


def _limits(backend: Backend) -> str:
    return f"works with {_known(backend)}" if backend.shards else "keeps the whole model on every rank"


def _known(backend: Backend) -> str:
    return join([axis for axis in APPLIED if axis in backend.splits], "and")


def _fields(section: DataParallel, backend: Backend) -> Iterator[Diagnostic]:
    default, known = DataParallel().values, {"backend", *backend.fields, *backend.idle}
    for name, value in section.values.items():
        if name not in known and value != default[name]:
            yield Diagnostic(
                code=FIELD,
                severity=Severity.ERROR,
                message=f"the backend {backend.name} does not have the field {name}",
                primary=field_label(section, name),
                help=f"remove `{name}`, or use a backend that has it",
            )


def _combined(facts: Facts, section: DataParallel, backend: Backend) -> Iterator[Diagnostic]:
    if (facts.tp or 1) == 1:
        return
    partial = tuple(name for group in facts.groups if group.placement.computed == "R" for name in group.names)
    if facts.resolved.sequence_parallel and not backend.sequence_parallel:
        message, help = (
            f"the backend {backend.name} does not work with sequence parallelism",
            "switch sequence parallelism off",
        )
    elif partial and not backend.partial_gradients:
        message = (
            f"the backend {backend.name} would not sum the gradient of {facts.resolved.tree.named(partial)} over tp"
        )
        help = "use a mesh without tp"
    else:
        return
    yield Diagnostic(
        code=COMBINED,
        severity=Severity.ERROR,
        message=message,
        primary=field_label(section, "backend"),
        help=f"use `backend: fsdp2`, or {help}",
        modules=partial,
    )


def _classes(facts: Facts) -> Iterator[Diagnostic]:
    resolved, section = facts.resolved, facts.resolved.data_parallel
    assert section is not None
    units = frozenset(resolved.dp_units)
    classes = {resolved.tree.modules[name].class_name for name in units}
    others = tuple(n for n, m in resolved.tree.modules.items() if m.class_name in classes and n not in units)
    if others:
        yield Diagnostic(
            code=CLASSES,
            severity=Severity.ERROR,
            message=f"{section.backend} finds units by their class, and {facts.resolved.tree.named(others)} has the class of a unit but is not in `units`",
            primary=field_label(section, "units"),
            help="name all modules of a class in `units`, or none",
            modules=others,
        )


def _strategy(section: DataParallel) -> Iterator[Diagnostic]:
    options = section.megatron_fsdp or MegatronFSDP()
    if options.outer_dp_sharding_strategy in (1, "optim") and options.zero_dp_strategy not in (3, "optim_grads_params"):
        message, help = (
            "`outer_dp_sharding_strategy: optim` needs `zero_dp_strategy: optim_grads_params`",
            "change one of the two",
        )
    elif options.init_model_with_meta_device and options.zero_dp_strategy in (0, "no_shard"):
        message, help = (
            "a model on the meta device cannot be initialised with `zero_dp_strategy: no_shard`",
            "change one of the two",
        )
    else:
        return
    yield Diagnostic(
        code=STRATEGY,
        severity=Severity.ERROR,
        message=message,
        primary=field_label(section, "megatron_fsdp"),
        help=help,
    )


def _no_section(facts: Facts) -> Iterator[Diagnostic]:
    sizes = facts.resolved.sizes
    ranks = {axis: size for axis in DATA_PARALLEL if (size := sizes.of(axis)) > 1}
    if ranks:
        axes = " and ".join(f"{axis}={size}" for axis, size in ranks.items())
        yield Diagnostic(
            code=NO_SECTION,
            severity=Severity.ERROR,
            message=f"the mesh has {axes}, but the plan has no data_parallel section",
            help="add `data_parallel: {backend: fsdp2, units: [...]}`",
        )
