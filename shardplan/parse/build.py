"""A checked document -> `PlanFile`."""

from __future__ import annotations

from typing import Any

from shardplan.core.diagnostics import Location
from shardplan.core.plan import (
    DDP,
    SECTIONS,
    ActivationCheckpointing,
    Compile,
    DataParallel,
    MegatronFSDP,
    MixedPrecision,
    PlanFile,
    Rule,
)
from shardplan.core.sums import SumRule
from shardplan.styles import canonical_style

from .models import (
    ActivationCheckpointingFields,
    CompileFields,
    DataParallelFields,
    DDPFields,
    MegatronFSDPFields,
    MixedPrecisionFields,
    PlanDocument,
    RuleOptions,
)
from .nodes import Path


def build_plan(document: PlanDocument, file: str, name: str, parent: PlanFile | None) -> PlanFile:
    """The plan that a document without errors says.

    Args:
        file: its display name.
        name: the plan's name, where the document has none.
        parent: the plan that it extends.
    """
    return PlanFile(
        name=document.name or name,
        file=file,
        version=document.version,
        description=document.description,
        models=tuple(document.models),
        tensor_parallel=_rules(document.tensor_parallel, "tensor_parallel", file),
        sequence_parallel=_rules(document.sequence_parallel, "sequence_parallel", file),
        data_parallel=_data_parallel(document.data_parallel, file),
        activation_checkpointing=_activation_checkpointing(document.activation_checkpointing, file),
        compile=_compile(document.compile, file),
        parent=parent,
        sums={section: found for section in SECTIONS if (found := _sums(getattr(document, section), section, file))},
    )


def _rules(rules: dict[str, str | RuleOptions], section: str, file: str) -> tuple[Rule, ...]:
    """Those that have a style; others say `sum_outputs` alone."""
    return tuple(
        _rule(key, entry, Location(file, (section, key)))
        for key, entry in rules.items()
        if isinstance(entry, str) or entry.style is not None
    )


def _sums(rules: dict[str, str | RuleOptions], section: str, file: str) -> tuple[SumRule, ...]:
    return tuple(
        SumRule(
            pattern=key,
            outputs=tuple(entry.sum_outputs),
            location=Location(file, (section, key, "sum_outputs")),
            styled=entry.style is not None,
            optional=entry.optional,
        )
        for key, entry in rules.items()
        if not isinstance(entry, str) and entry.sum_outputs is not None
    )


def _rule(pattern: str, entry: str | RuleOptions, location: Location) -> Rule:
    written = entry if isinstance(entry, str) else entry.style
    assert written is not None, pattern  # a rule without a style is passed over
    style = canonical_style(written)
    assert style is not None, written
    said = () if isinstance(entry, str) else entry.model_fields_set
    options = {name: getattr(entry, name) for name in said}
    options.pop("style", None)
    options.pop("sum_outputs", None)
    if isinstance(options.get("packed"), list):
        options["packed"] = tuple(map(str, options["packed"]))
    for name in ("divide", "divides"):
        if name in options:
            options[name] = (options[name],) if isinstance(options[name], str) else tuple(options[name])
    if "read_outside" in options:
        options["read_outside"] = tuple(options["read_outside"])
    return Rule(pattern, style, location, **options)


def _data_parallel(fields: DataParallelFields | None, file: str) -> DataParallel | None:
    if fields is None:
        return None
    path = ("data_parallel",)
    values, given = _given(fields, path, file)
    for name in ("units", "ignored"):
        if name in values:
            values[name] = tuple(values[name])
    if "mixed_precision" in values:
        place = (*path, "mixed_precision")
        values["mixed_precision"] = _mixed_precision(values["mixed_precision"], place, file)
    if "megatron_fsdp" in values:
        values["megatron_fsdp"] = _megatron_fsdp(values["megatron_fsdp"], (*path, "megatron_fsdp"), file)
    if "ddp" in values:
        values["ddp"] = _ddp(values["ddp"], (*path, "ddp"), file)
    prefetch = values.pop("prefetch", None)
    given.pop("prefetch", None)
    if prefetch is not None:
        ahead, places = _given(prefetch, (*path, "prefetch"), file)
        values |= {f"{name}_prefetch": value for name, value in ahead.items()}
        given |= {f"{name}_prefetch": place for name, place in places.items()}
    return DataParallel(**values, location=Location(file, path), given=given)


def _mixed_precision(fields: MixedPrecisionFields, path: Path, file: str) -> MixedPrecision:
    values, given = _given(fields, path, file)
    return MixedPrecision(**values, given=given)


def _megatron_fsdp(fields: MegatronFSDPFields, path: Path, file: str) -> MegatronFSDP:
    values, given = _given(fields, path, file)
    return MegatronFSDP(**values, given=given)


def _ddp(fields: DDPFields, path: Path, file: str) -> DDP:
    values, given = _given(fields, path, file)
    return DDP(**values, given=given)


def _activation_checkpointing(
    fields: ActivationCheckpointingFields | None, file: str
) -> ActivationCheckpointing | None:
    if fields is None:
        return None
    path = ("activation_checkpointing",)
    values, given = _with_modules(fields, path, file)
    return ActivationCheckpointing(**values, location=Location(file, path), given=given)


def _compile(fields: CompileFields | None, file: str) -> Compile | None:
    if fields is None:
        return None
    path = ("compile",)
    values, given = _with_modules(fields, path, file)
    return Compile(**values, location=Location(file, path), given=given)


def _with_modules(fields: Any, path: Path, file: str) -> tuple[dict[str, Any], dict[str, Location]]:
    values, given = _given(fields, path, file)
    if "modules" in values:
        values["modules"] = tuple(values["modules"])
    return values, given


def _given(fields: Any, path: Path, file: str) -> tuple[dict[str, Any], dict[str, Location]]:
    """The fields that a document sets, in the order of the model, and where."""
    names = [name for name in type(fields).model_fields if name in fields.model_fields_set]
    return (
        {name: getattr(fields, name) for name in names},
        {name: Location(file, (*path, name)) for name in names},
    )
