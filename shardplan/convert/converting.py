"""Converting another project's plan to a plan file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardplan import Model, Plan, PlanError, Report, validate
from shardplan.authoring import WRAPPING, Heading, cut_parts, plan_document, plan_text
from shardplan.core.diagnostics import Diagnostic, Location
from shardplan.core.report import ordered
from shardplan.core.sources import SourceMap
from shardplan.core.tree import ModuleTree
from shardplan.language import parse_text

from . import deepspeed
from .distributed_config import Wanted, config_of, wanted_of
from .entries import IMPLIED, LEFT_OUT, NEEDS_MODEL, NO_FORM, Entry, Meaning, NotConvertible, finding, quoted
from .foreign_names import meaning_of_name
from .foreign_places import Places, glob_of_key
from .foreign_rules import Rules, overlay, rules_of
from .foreign_sources import FORMS, Form, Source, import_source, read_source
from .torchtitan import is_sharding

OF: dict[Form, str] = {
    "transformers": "a plan of transformers",
    "automodel": "a plan of NeMo Automodel",
    "torch": "a plan for torch's parallelize_module",
    "deepspeed": "a partition_config of DeepSpeed",
}
DERIVED = "The source has its sequence-parallel form alone: tensor_parallel is the same with the sequence whole."


@dataclass(frozen=True, slots=True)
class ConvertedPlan:
    """What `convert_plan` returns.

    Args:
        text: the plan file, YAML; None where an entry of the source has no counterpart.
        document: the plan as data.
        report: what cannot be converted, was left out or was added; with a model, also the findings of `validate`.
    """

    text: str | None
    document: Mapping[str, Any] | None
    report: Report

    @property
    def ok(self) -> bool:
        """Whether there is a plan, without errors."""
        return self.text is not None and self.report.ok


def convert_plan(
    source: Any = None,
    *,
    model: Any = None,
    form: Form | None = None,
    import_path: str | None = None,
    name: str | None = None,
    tp: int | None = None,
    shown_as: str = "<converted>",
) -> ConvertedPlan:
    """Convert a plan of transformers, NeMo Automodel, NeMo-RL, torch or DeepSpeed.

    Nothing is guessed: an entry without a counterpart is an error, and no plan is written.

    Args:
        source: a JSON or YAML file; a dictionary from names to style names or `ParallelStyle` objects; a DeepSpeed
            config; transformers' `DistributedConfig`, as an object, a dictionary or a file; or "hf", the plan that transformers
            has for the model.
        model: as for `validate`. Names and kinds of modules are looked up in it, and the plan is validated. Some entries
            cannot be understood without it (SP544).
        form: "transformers", "automodel", "torch" or "deepspeed"; None finds it from the source.
        import_path: `module:name` of a dictionary of styles, or of a function that returns one; given instead of `source`. The
            module is imported and its code runs; nothing else runs foreign code.
        name: the plan's name; None is the model's type, or else the source's name.
        tp: the tp size to validate at; None: as for `validate`.
        shown_as: the plan's file name in findings.

    Raises:
        ValueError: neither a source nor an import path, or both; an unknown form; a tp size below 1.
        TypeError: a source that is neither a file nor a dictionary.
    """
    if (source is None) == (import_path is None):
        raise ValueError("give either a source or an import path")
    if form is not None and form not in FORMS:
        raise ValueError(f"there is no form {form!r}: the forms are {', '.join(FORMS)}")
    named = model if model is None or isinstance(model, Model) else Model(model)
    sources = SourceMap()
    findings: tuple[Diagnostic, ...] = ()
    try:
        found = None if named is None else named.find()
        read = _read(source, import_path, found)
        sources, findings = read.sources, read.diagnostics
        text, document, findings = _converted(read, form, found, name)
    except PlanError as error:
        return ConvertedPlan(None, None, Report(ordered((*findings, *error.diagnostics), sources), sources=sources))
    parsed = parse_text(text, file=shown_as)
    report = Report(diagnostics=parsed.diagnostics, plans=(shown_as,))
    if parsed.plan is not None and named is not None:
        report = validate(
            named, Plan(parsed.plan, parsed.sources, parsed.diagnostics), None if tp is None else {"tp": tp}
        )
    sources = SourceMap({**sources.files, **parsed.sources.files})
    report = replace(report, diagnostics=ordered((*findings, *report.diagnostics), sources), sources=sources)
    return ConvertedPlan(text, document, report)


def _converted(
    read: Source, form: Form | None, found: Any, name: str | None
) -> tuple[str, dict[str, Any], tuple[Diagnostic, ...]]:
    """The plan's text, the plan as data, and what was left out or added.

    Args:
        found: the model of the plan.

    Raises:
        PlanError: what cannot be converted, and the findings before it.
    """
    _raise_errors(read.diagnostics)
    try:
        read, wanted = _with_config(read, form, found)
        findings = (*read.diagnostics, *wanted.findings)
        _raise_errors(findings)
        rules, plan_form, notes = _rules(read, form, found, wanted)
    except NotConvertible as error:
        raise PlanError((error.finding(Location(read.name)),)) from None
    findings += tuple(rules.findings)
    if not (rules.whole or rules.sliced or rules.experts or wanted.units) and not any(d.is_error for d in findings):
        findings = (*findings, finding(NO_FORM, "no entry is left for a plan", Location(read.name)))
    _raise_errors(findings)
    tree = found.tree if found is not None else None
    model = (tree.model_type or tree.class_names[0]) if tree is not None else None
    heading = Heading(
        name=name or model or _stem(read.name),
        description=f"Converted from {OF[plan_form]}.",
        models=(model,) if model else (),
        notes=(*notes, *wanted.notes),
    )
    sections = {"tensor_parallel": rules.whole, "sequence_parallel": overlay(rules.whole, rules.sliced)}
    sections |= {"expert_parallel": rules.experts}
    units = wanted.units or (_units(tree, (*rules.whole, *rules.experts)) if tree is not None else ())
    wrapping = wanted.wrapping or WRAPPING
    text = plan_text(heading, sections, tree, units, wrapping=wrapping)
    return text, plan_document(heading, sections, units, wrapping=wrapping), findings


def _with_config(read: Source, form: Form | None, found: Any) -> tuple[Source, Wanted]:
    """For a source that is transformers' config: the source with the config's styles, and its other settings.

    Raises:
        NotConvertible: SP540: it does not have the given form.
    """
    config = config_of(read.data)
    if config is None:
        return read, Wanted({}, {})
    if form not in (None, "transformers"):
        raise NotConvertible(NO_FORM, f"this is a DistributedConfig of transformers, not {OF[form]}")
    wanted = wanted_of(config, read.name, found, None if found is None else own_plans(found))
    return replace(read, data=wanted.styles, experts=wanted.experts), wanted


def own_plans(found: Any) -> dict[str, dict[str, Any]]:
    """transformers' plans for a model, each from full names to styles."""
    model, prefix = found.build(), found.tree.base_prefix
    start = f"{prefix}." if prefix else ""
    return {
        plan: {
            k if k.startswith(start) else start + k: style for k, style in (getattr(model, plan, None) or {}).items()
        }
        for plan in ("tp_plan", "ep_plan", "fsdp_plan")
    }


def _raise_errors(findings: tuple[Diagnostic, ...]) -> None:
    if any(d.is_error for d in findings):
        raise PlanError(findings)


def _read(source: object, import_path: str | None, found: Any) -> Source:
    """The content of the source. Raises PlanError."""
    if import_path is not None:
        return import_source(import_path, found.build if found is not None else None)
    if source != "hf":
        return read_source(source)
    if found is None:
        message = "transformers' own plan belongs to a model"
        raise PlanError((finding(NEEDS_MODEL, message, None, help="name the model: --model"),))
    plans = own_plans(found)
    if not plans["tp_plan"]:
        message = f"transformers has no tensor-parallel plan for {found.tree.class_names[0]}"
        raise PlanError(
            (finding(NO_FORM, message, None, help="`shardplan init` writes a plan from a run of the model"),)
        )
    return Source("<hf>", plans["tp_plan"], experts=plans["ep_plan"])


def _rules(read: Source, form: Form | None, found: Any, wanted: Wanted) -> tuple[Rules, Form, tuple[str, ...]]:
    """The rules, the form of the source, and lines for the plan file.

    Raises:
        NotConvertible: SP540: the source's form is not known.
    """
    places = Places(found.tree) if found is not None else None
    config = deepspeed.find_config(read.data)
    is_config = wanted.styles is read.data
    plan_form = "transformers" if is_config else _form(read, form, is_deepspeed=config is not None)
    if config is not None:
        return _deepspeed(read, *config, places), plan_form, ()
    meaning_of = _meanings(plan_form)
    findings: list[Diagnostic] = []
    entries = _entries(read, read.data, meaning_of, plan_form, places, findings)
    rules = rules_of(_with_cuts(entries, found, findings))
    rules.findings[:0] = findings
    if read.experts:
        findings = []
        distributed = rules_of(_entries(read, read.experts, meaning_of, plan_form, places, findings))
        summed = {"style": "ep_experts", "output": "all_reduce"}
        rules.experts |= {name: summed if wanted.summed else rule for name, rule in distributed.experts.items()}
        rules.findings += [*findings, *distributed.findings]
    if read.sequence_parallel is None:
        derived = any(rules.whole.get(p) != options for p, options in rules.sliced.items())
        return rules, plan_form, (DERIVED,) if derived else ()
    findings = []
    entries = _entries(read, read.sequence_parallel, meaning_of, plan_form, places, findings)
    second = rules_of(_with_cuts(entries, found, findings))
    left_out = {pattern: {"style": "replicate"} for pattern in rules.whole if pattern not in second.sliced}
    known = {(d.code, d.message) for d in rules.findings}
    more = [d for d in (*findings, *second.findings) if (d.code, d.message) not in known]
    return Rules(rules.whole, {**second.sliced, **left_out}, rules.experts, [*rules.findings, *more]), plan_form, ()


def _form(read: Source, form: Form | None, *, is_deepspeed: bool) -> Form:
    """The form of the source. Raises NotConvertible (SP540)."""
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
    return callable(getattr(style, "_apply", None)) or is_sharding(style)


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
    """The entries of a mapping; what cannot be converted is added to the findings."""
    meanings: list[tuple[str, Meaning, Location]] = []
    for key, style in data.items():
        at = Location(read.name, (str(key),))
        try:
            meanings.append((glob_of_key(key), meaning_of(style), at))
        except NotConvertible as error:
            findings.append(error.finding(at))
    if places is None:
        return [Entry(glob, meaning, at) for glob, meaning, at in meanings]
    # The plan of a base model's class is written without the base model's name.
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
    """The rules of a DeepSpeed config. The first spec that matches a weight holds for it."""
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
        dims = 1 if spec.meaning is not None and spec.meaning.options == deepspeed.SUMMED else 2
        names = tuple(name for name in places.weighted(spec.globs, dims) if name not in taken)
        taken.update(names)
        if not names:
            findings.append(
                finding(LEFT_OUT, "it matches nothing that earlier specs left in this model", spec.at, warning=True)
            )
        elif spec.meaning is not None:
            patterns = places.patterns(names, None)
            entries += [Entry(p, spec.meaning, spec.at, places.kinds((p,))) for p in patterns]
    findings += deepspeed.left_out(read.data, config, read.name, path)
    if config.get("strict_mode"):
        findings.append(_strict(places, taken, Location(read.name, (*path, "strict_mode"))))
    rules = rules_of(entries)
    rules.findings[:0] = findings
    return rules


def _strict(places: Places | None, taken: set[str], at: Location) -> Diagnostic:
    """Refuse a linear layer that no spec matches, as DeepSpeed's `strict_mode` does."""
    modules = places.tree.modules if places is not None else {}
    left = [name for name, module in modules.items() if module.kind == "linear" and name not in taken]
    patterns = list(dict.fromkeys(places.tree.pattern(name) for name in left)) if places is not None else []
    seen = f": {', '.join(f'`{pattern}`' for pattern in patterns)}" if patterns else ""
    message = f"`strict_mode` is left out: what has no rule stays whole here, where DeepSpeed refuses it{seen}"
    return finding(LEFT_OUT, message, at, help="write a `skip` spec for these" if seen else None, warning=True)


def _with_cuts(entries: list[Entry], found: Any, findings: list[Diagnostic]) -> list[Entry]:
    """The entries, with `packed` where the source returns a DTensor and the model's code cuts it into parts. DTensor gathers it
    there; a plan names the parts, and each rank holds a slice of each.

    Args:
        findings: a warning (SP546) is added for each.
    """
    wanted = [entry.pattern for entry in entries if _may_be_cut(entry)]
    cuts = cut_parts(found, wanted) if found is not None and wanted else {}
    made = []
    for entry in entries:
        if (parts := cuts.get(entry.pattern)) is not None and _may_be_cut(entry):
            message = (
                f"`{entry.pattern}` outputs a DTensor, which is gathered where the code cuts it into "
                f"{parts if isinstance(parts, int) else len(parts)} parts; the plan splits each part by itself "
                "(`packed_colwise`), which trains the same without gathering"
            )
            help = "check that this is meant; with --model the layouts are proven"
            findings.append(finding(IMPLIED, message, entry.at, help=help, warning=True))
            entry = replace(entry, meaning=replace(entry.meaning, options={"packed": parts}))
        made.append(entry)
    return made


def _may_be_cut(entry: Entry) -> bool:
    meaning = entry.meaning
    split = meaning.kind == "colwise" and (meaning.source, meaning.destination) == ("whole", "features")
    return split and meaning.dtensor and entry.layer is not None


def _units(tree: ModuleTree, rules: tuple[str, ...]) -> tuple[str, ...]:
    """The data-parallel units: the layers that have rules."""
    elements = (name for name in tree.modules if name.rpartition(".")[2].isdecimal())
    patterns = dict.fromkeys(tree.pattern(name) for name in elements)
    return tuple(p for p in patterns if any(rule == p or rule.startswith(f"{p}.") for rule in rules))


def _stem(name: str) -> str:
    """A plan's name, made from a file name or an import path."""
    stem = name.rpartition(":")[2] if ":" in name else Path(name).stem
    word = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")
    return "converted" if name.startswith("<") or not word else word
