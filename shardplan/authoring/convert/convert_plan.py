"""Another project's plan as a plan file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardplan.authoring.init.draft import Draft
from shardplan.authoring.init.write import Heading, document, plan_text
from shardplan.core.diagnostics import Diagnostic, Location, PlanError
from shardplan.core.sources import SourceMap
from shardplan.core.tree import element
from shardplan.language.parse_findings import quoted
from shardplan.model import FoundModel, hf_ep_plan, hf_tp_plan

from . import deepspeed
from .convert_codes import LEFT_OUT, NEEDS_MODEL, NO_FORM
from .cuts import with_cuts
from .entries import Entry, Meaning, NotConvertible, finding
from .foreign_names import meaning_of_name
from .foreign_places import Places, glob_of_key
from .foreign_rules import Rules, overlay, rules_of
from .foreign_sources import Form, Source, import_source, read_source

OF: dict[Form, str] = {
    "transformers": "a plan of transformers",
    "automodel": "a plan of NeMo Automodel",
    "torch": "a plan for torch's parallelize_module",
    "deepspeed": "a partition_config of DeepSpeed",
}
DERIVED = "The source has its sequence-parallel form alone: tensor_parallel is the same with the sequence whole."


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion.

    Args:
        text: the plan file, YAML; None where an entry cannot be converted.
        document: the same as data.
        diagnostics: what cannot be converted, is left out or was added, entry by entry.
        sources: the source's text, for the places of findings.
    """

    text: str | None
    document: Mapping[str, Any] | None
    diagnostics: tuple[Diagnostic, ...]
    sources: SourceMap


def convert(
    source: object, *, form: Form | None, import_path: str | None, found: FoundModel | None, name: str | None
) -> Conversion:
    """Reads a source and writes the plan.

    Args:
        source: a file's name, a dictionary, or "hf"; None with `import_path`.
        form: the project that the plan comes from; None: found from its form.
        import_path: where styles are to be imported from.
        found: the model that it is for.
        name: of the plan.
    """
    try:
        read = _read(source, import_path, found)
    except PlanError as error:
        return Conversion(None, None, error.diagnostics, SourceMap())
    if read.data is None or any(d.is_error for d in read.diagnostics):
        return Conversion(None, None, read.diagnostics, read.sources)
    try:
        rules, plan_form, notes = _rules(read, form, found)
    except NotConvertible as error:
        findings = (*read.diagnostics, error.finding(Location(read.name)))
        return Conversion(None, None, findings, read.sources)
    findings = (*read.diagnostics, *rules.findings)
    if not (rules.whole or rules.sliced or rules.experts) and not any(d.is_error for d in findings):
        findings = (*findings, finding(NO_FORM, "no entry is left for a plan", Location(read.name)))
    if any(d.is_error for d in findings):
        return Conversion(None, None, findings, read.sources)
    experts = {"expert_parallel": rules.experts} if rules.experts else {}
    draft = Draft(rules.whole, overlay(rules.whole, rules.sliced) or None, distributed=experts)
    model = (found.tree.model_type or found.tree.class_names[0]) if found is not None else None
    heading = Heading(
        name=name or model or _stem(read.name),
        description=f"Converted from {OF[plan_form]}.",
        models=(model,) if model else (),
        notes=notes,
    )
    units = _units(found, draft) if found is not None else ()
    text = plan_text(heading, draft, found.tree if found is not None else None, units)
    return Conversion(text, document(heading, draft, units), findings, read.sources)


def _read(source: object, import_path: str | None, found: FoundModel | None) -> Source:
    """Raises PlanError."""
    if import_path is not None:
        return import_source(import_path, found.build if found is not None else None)
    if source != "hf":
        return read_source(source)  # type: ignore[arg-type]
    if found is None:
        message = "transformers' own plan belongs to a model"
        raise PlanError((finding(NEEDS_MODEL, message, None, help="name the model: --model"),))
    model = found.build()
    plan, prefix = hf_tp_plan(model)
    start = f"{prefix}." if prefix else ""
    whole, experts = (
        {k if k.startswith(start) else start + k: style for k, style in one.items()}
        for one in (plan, hf_ep_plan(model))
    )
    return Source("<hf>", whole, experts=experts)


def _rules(read: Source, form: Form | None, found: FoundModel | None) -> tuple[Rules, Form, tuple[str, ...]]:
    """The rules, whose plan it is, and lines for the file.

    Raises:
        NotSaid: SP540: its form is not known.
    """
    places = Places(found.tree) if found is not None else None
    config = deepspeed.find_config(read.data)
    plan_form = _form(read, form, is_deepspeed=config is not None)
    if config is not None:
        return _deepspeed(read, *config, places), plan_form, ()
    meaning_of = _meanings(plan_form)
    findings: list[Diagnostic] = []
    entries = _entries(read, read.data, meaning_of, plan_form, places, findings)
    rules = rules_of(entries if found is None else with_cuts(entries, found, findings))
    rules.findings[:0] = findings
    if read.experts:
        findings = []
        distributed = rules_of(_entries(read, read.experts, meaning_of, plan_form, places, findings))
        rules.experts |= distributed.experts
        rules.findings += [*findings, *distributed.findings]
    if read.sequence_parallel is None:
        derived = any(rules.whole.get(p) != options for p, options in rules.sliced.items())
        return rules, plan_form, (DERIVED,) if derived else ()
    findings = []
    entries = _entries(read, read.sequence_parallel, meaning_of, plan_form, places, findings)
    second = rules_of(entries if found is None else with_cuts(entries, found, findings))
    left_out = {pattern: {"style": "replicate"} for pattern in rules.whole if pattern not in second.sliced}
    known = {(d.code, d.message) for d in rules.findings}
    more = [d for d in (*findings, *second.findings) if (d.code, d.message) not in known]
    return Rules(rules.whole, {**second.sliced, **left_out}, rules.experts, [*rules.findings, *more]), plan_form, ()


def _form(read: Source, form: Form | None, *, is_deepspeed: bool) -> Form:
    """Raises NotSaid (SP540)."""
    data = read.data
    if is_deepspeed:
        if form not in (None, "deepspeed"):
            raise NotConvertible(NO_FORM, f"this is {OF['deepspeed']}, not {OF[form]}")
        return "deepspeed"
    if form == "deepspeed":
        raise NotConvertible(
            NO_FORM, "there is no `partition_config` with `layer_specs` in it", help="docs/converting.md shows one"
        )
    if not isinstance(data, Mapping) or not data:
        raise NotConvertible(
            NO_FORM, "the source must be a mapping from names to styles", help="docs/converting.md shows each form"
        )
    names = all(isinstance(style, str) for style in data.values())
    any_name = any(isinstance(style, str) for style in data.values())
    if form == "torch" and names:
        raise NotConvertible(NO_FORM, "torch's styles are objects, and these are names", help="use --from transformers")
    if form == "transformers" and not any_name:
        raise NotConvertible(NO_FORM, "transformers' styles are names, and none of these is a name")
    if form is None and not any_name and not any(_is_style(style) for style in data.values()):
        raise NotConvertible(
            NO_FORM,
            "the values are neither names of styles nor styles",
            help="write a mapping from names to styles; docs/converting.md shows each form",
        )
    return form or ("transformers" if names else "torch")


def _is_style(style: object) -> bool:
    return callable(getattr(style, "_apply", None))


def _meanings(form: Form) -> Callable[[object], Meaning]:
    if form == "transformers":
        return meaning_of_name
    from .objects import meaning_of_style

    return meaning_of_style


def _entries(
    read: Source,
    data: Mapping[str, Any],
    meaning_of: Callable[[object], Meaning],
    form: Form,
    places: Places | None,
    findings: list[Diagnostic],
) -> list[Entry]:
    """The entries of a mapping; what cannot be converted is among the findings."""
    meanings: list[tuple[str, Meaning, Location]] = []
    for key, style in data.items():
        at = Location(read.name, (str(key),))
        try:
            meanings.append((glob_of_key(key), meaning_of(style), at))
        except NotConvertible as error:
            findings.append(error.finding(at))
    if places is None:
        return [Entry(glob, meaning, at) for glob, meaning, at in meanings]
    # A class's own plan is written without the name of the base model.
    prefix = places.below([g for g, *_ in meanings if not places.of((g,))]) if form == "transformers" else None
    entries = []
    for glob, meaning, at in meanings:
        names = places.of((glob,))
        if not names and prefix is not None:
            glob = f"{prefix}.{glob}"
            names = places.of((glob,))
        if not names:
            message = f"{quoted(glob)} matches nothing in this model"
            findings.append(finding(LEFT_OUT, message, at, warning=True))
            continue
        entries += [Entry(p, meaning, at, places.kinds((p,))) for p in places.patterns(names, glob)]
    return places.merged(entries)


def _deepspeed(
    read: Source, config: Mapping[str, Any], path: tuple[str, ...], with_preset: bool, places: Places | None
) -> Rules:
    """The first spec that matches a weight holds for it."""
    if with_preset:
        raise NotConvertible(
            NO_FORM,
            "DeepSpeed adds the specs of `preset_model` to these, and they are not in the file",
            help="set `use_default_specs: false`, and write down the specs that are needed",
        )
    tree = places.tree if places is not None else None
    specs, findings = deepspeed.specs(
        config, read.name, path, tree.model_type if tree is not None else None, has_model=tree is not None
    )
    entries: list[Entry] = []
    taken: set[str] = set()
    for i, spec in enumerate(specs):
        if places is None:
            if spec.meaning is not None:
                entries += [Entry(glob, spec.meaning, spec.at) for glob in spec.globs]
            elif any(later.meaning is not None for later in specs[i + 1 :]):
                message = "only the model tells which modules `skip` keeps from the specs after it"
                findings.append(finding(NEEDS_MODEL, message, spec.at, help="name the model: --model"))
            continue
        names = tuple(name for name in places.matrices(spec.globs) if name not in taken)
        taken.update(names)
        if not names:
            findings.append(
                finding(LEFT_OUT, "it matches nothing that earlier specs left in this model", spec.at, warning=True)
            )
        elif spec.meaning is not None:
            patterns = places.patterns(names, None)
            entries += [Entry(p, spec.meaning, spec.at, places.kinds((p,))) for p in patterns]
    rules = rules_of(entries)
    rules.findings[:0] = findings
    return rules


def _units(found: FoundModel, draft: Draft) -> tuple[str, ...]:
    """The layers with rules, for data parallelism."""
    patterns = dict.fromkeys(found.tree.pattern(name) for name in found.tree.modules if element(name))
    rules = (*draft.tensor_parallel, *draft.distributed.get("expert_parallel", ()))
    return tuple(p for p in patterns if any(rule == p or rule.startswith(f"{p}.") for rule in rules))


def _stem(name: str) -> str:
    """A plan's name from a file's or an import's."""
    stem = name.rpartition(":")[2] if ":" in name else Path(name).stem
    word = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")
    return "converted" if name.startswith("<") or not word else word
