"""What is known of a plan and a model before torch is imported: the plan itself, and the names and sizes in a
checkpoint's files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from shardplan.core.diagnostics import Diagnostic, PlanError, Severity
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile
from shardplan.core.report import Report
from shardplan.core.tree import ModuleTree
from shardplan.language.globs import Segment, parse_glob
from shardplan.model.config_files import ConfigFile, read_folder_or_file
from shardplan.model.model_sources import LEGACY, Source, source_of
from shardplan.model.model_words import classify
from shardplan.model.stored_tensors import Element, Folded, fold, stored_tensors

from .automatic import ReadPlan, auto_plan
from .bind import decided
from .bind.assignments import BOTH, CONFLICT
from .bind.conditions import NO_VALUE
from .bind.dead import DEAD
from .user_inputs import AnyPlan, Model, plan_name, read_plan
from .variants import bind_variants, wanted_variants

if TYPE_CHECKING:
    from .check.facts import Facts

ALIKE = 0.6  # how similar two words must be, as near as `bind.dead` looks
UNSURE = "this follows from the names and shapes of the checkpoint alone; the model's own may differ"


class NoCheckpoint(ValueError):
    """A quick look was requested at something other than a checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as its checkpoint's files show it.

    Args:
        stored: names and shapes.
        config: the content of its config.json.
        source: the text of its code, if that has the same names.
    """

    stored: Element
    config: Mapping[str, Any]
    source: Source | None

    def seen_by(self, plan: PlanFile) -> Folded:
        """Its modules; those that no rule of the plan tells apart count as one."""
        known = self.source.attributes if self.source is not None else {}
        heads = "head_dim" if self.source is None or "head_dim" in known else None
        return fold(self.stored, self.config, known, heads=heads, apart=_apart(plan))


def _apart(plan: PlanFile) -> Callable[[str], bool]:
    """A test whether the plan's rules may mean an element of a list but not its neighbours."""
    segments = {
        segment
        for file in plan.lineage
        for section in (file.data_parallel, file.activation_checkpointing, file.compile, file.separate_matrices)
        for pattern in (
            *(rule.pattern for rule in (*file.tensor_parallel, *file.sequence_parallel, *file.context_parallel)),
            *(getattr(section, "units", ()) or ()),
            *(getattr(section, "modules", ()) or ()),
            *(getattr(section, "ignored", ()) or ()),
            *(getattr(section, "parts", ()) or ()),
            *(getattr(section, "heads", ()) or ()),
        )
        for alternative in parse_glob(pattern).alternatives
        for segment in alternative
    }
    special = [segment for segment in segments if segment.text not in ("*", "**") and not segment.text.isidentifier()]
    return lambda index: any(segment.matches(index) for segment in special)


def look_early(
    source: Model, plan: AnyPlan, sizes: MeshSizes, sequence_parallel: bool | None, *, quick: bool
) -> Report:
    """Everything that can be checked without torch. If the report has errors, nothing else needs to be checked.

    Args:
        quick: report uncertain findings too, and choose a plan `auto` by the names in the configuration.

    Raises:
        NoCheckpoint: `quick` without a checkpoint, or for the plan `hf`, or for `auto` at tp 1 or where its choice
            needs the model.
    """
    file, about_model = config_file(source)
    named = isinstance(plan, str) and plan in ("auto", "hf")  # depends on the model
    given = ReadPlan() if named else read_plan(plan, None)
    report = Report(
        diagnostics=(*about_model, *given.findings),
        sources=given.sources,
        plans=(plan_name(plan),),
        model=source.shown,
        sizes=sizes,
    )
    if not report.ok or (named and not quick):
        return report
    checkpoint = checkpoint_of(file, source.settings or {})
    needs_model = plan == "hf" or (plan == "auto" and sizes.tp == 1)
    if checkpoint is None or (quick and needs_model):
        if quick:
            raise NoCheckpoint(_why(source, file, plan, needs_model))
        return report
    if named:
        given = auto_plan(fold(checkpoint.stored, checkpoint.config, {}).tree)
        if any(d.code == NO_VALUE for d in given.findings):
            raise NoCheckpoint("config.json leaves out a field that decides which plan `auto` uses")
        report = replace(report, sources=given.sources, diagnostics=given.findings)
        if not report.ok:
            return report
    assert given.plan is not None
    found = early_findings(given.plan, checkpoint, sizes, sequence_parallel, sure=not quick)
    return replace(report, diagnostics=(*report.diagnostics, *found), stages=("plan", "names"))


def _why(source: Model, file: ConfigFile | None, plan: AnyPlan, needs_model: bool) -> str:
    """Why a quick look has nothing to check."""
    if needs_model:
        at = " at tp 1" if plan == "auto" else ""
        return f"the plan `{plan}` is read from the model itself{at}, which a quick look does not build"
    if source.settings:
        return "a quick look reads a checkpoint as it is: its numbers cannot be changed"
    if file is None:
        return f"{source.shown} is not a folder: a quick look reads the files of a checkpoint"
    return f"{source.shown} has no complete safetensors checkpoint next to its config.json"


def config_file(source: Model) -> tuple[ConfigFile | None, tuple[Diagnostic, ...]]:
    """The configuration of a model that is named by a path, and the findings about it; None for other models."""
    if not isinstance(source.name, str) or classify(source.name).kind != "path":
        return None, ()
    try:
        return read_folder_or_file(source.name, trust_remote_code=source.trust_remote_code), ()
    except PlanError as error:
        return None, error.diagnostics


def checkpoint_of(file: ConfigFile | None, settings: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint next to a configuration; None if it is not whole, or if the user changes the configuration."""
    if file is None or settings or file.path.name != "config.json":
        return None
    stored = stored_tensors(file.path.parent)
    if stored is None:
        return None
    source = source_of(file.data)
    return Checkpoint(stored, file.data, source if source is not None and _are_named_so(stored, source) else None)


def _are_named_so(stored: Element, source: Source) -> bool:
    """Whether every name of a checkpoint occurs in the model's code, so that it is not loaded under another one."""
    tree = fold(stored, {}, {}).tree
    parts = {part for name in tree.modules for part in name.split(".") if part and not part.isdecimal()}
    leaves = {parameter.name for module in tree.modules.values() for parameter in module.parameters}
    return parts <= source.attributes.keys() and not (parts | leaves) & set(LEGACY)


def early_findings(
    plan: PlanFile, checkpoint: Checkpoint, sizes: MeshSizes, sequence_parallel: bool | None, *, sure: bool
) -> tuple[Diagnostic, ...]:
    """The findings that names and shapes give.

    Args:
        plan: a plan free of errors.
        sequence_parallel: as for `validate`.
        sure: only errors that the whole check finds too; without it also the others, as warnings with a note.
    """
    from .check.divisibility import FEATURES, HEADS, KEY_VALUE
    from .check.divisibility import check as check_sizes
    from .check.facts import Facts

    if sure and checkpoint.source is None:
        return ()
    folded = checkpoint.seen_by(plan)
    plan, undecided = decided(plan, folded.tree)  # fields missing in config.json have the model's own default
    if sure and undecided:
        return ()
    variants = bind_variants(plan, folded.tree, sizes, wanted_variants(plan, sequence_parallel, sizes))
    certain: set[Diagnostic] = set()
    findings = {}
    for on, resolved in variants.resolved.items():
        found = [d for d in variants.findings[on] if d.code in (DEAD, BOTH, CONFLICT)]
        certain.update(d for d in found if _is_dead(d, folded.tree, checkpoint.source))
        if (sizes.tp or 1) > 1:
            facts = Facts(resolved)
            wrong = [d for d in check_sizes(facts) if d.code in (HEADS, KEY_VALUE, FEATURES)]
            if checkpoint.source is not None and _are_configured(facts):
                certain.update(wrong)
            found += wrong
        shown = [d if d in certain else _unsure(d) for d in found if d in certain or not sure]
        findings[on] = (*map(_unsure, undecided), *(replace(d, modules=folded.all_of(d.modules)) for d in shown))
    return replace(variants, findings=findings).all_findings


def _unsure(diagnostic: Diagnostic) -> Diagnostic:
    help = None if diagnostic.code == DEAD else diagnostic.help  # its names may not be the model's
    return replace(diagnostic, severity=Severity.WARNING, notes=(*diagnostic.notes, UNSURE), help=help)


def _is_dead(diagnostic: Diagnostic, tree: ModuleTree, source: Source | None) -> bool:
    """Whether a key that matches nothing in a checkpoint is surely dead: it matches nothing in the model either, and
    cannot mean a module without parameters."""
    matched = re.match("`(.*)` matches no module", diagnostic.message)
    if diagnostic.code != DEAD or not diagnostic.is_error or matched is None or source is None:
        return False
    stored = {part for name in tree.parameters for part in name.split(".")}
    others = source.attributes.keys() - stored
    return all(_is_impossible(one, stored, others) for one in parse_glob(matched[1]).alternatives)


def _is_impossible(alternative: tuple[Segment, ...], stored: set[str], others: set[str]) -> bool:
    words = [segment.text for segment in alternative if segment.literal and not segment.text.isdecimal()]
    unknown = [word for word in words if word not in stored]
    near = (get_close_matches(word, others, n=1, cutoff=ALIKE) for word in unknown)
    return alternative[-1].literal and bool(unknown) and not others.intersection(unknown) and not any(near)


def _are_configured(facts: Facts) -> bool:
    """Whether tp must divide only numbers of the configuration, which the model has too, and none of them may be the
    length of a dimension that attention splits into heads."""
    numbers = facts.resolved.tree.numbers
    width, heads = numbers.get("head_dim", 0), numbers.get("num_attention_heads", 0)
    in_heads = (heads * width, numbers.get("num_key_value_heads", heads) * width)
    return all(
        numbers.get(one.what) == one.count and not (one.kind == "features" and one.count in in_heads)
        for one in facts.requirements
    )
