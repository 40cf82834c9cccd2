"""Random numbers that ranks of one step must not draw apart, whatever tp is: those that decide which modules run (layers that are left out),
and those that several pipeline stages read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from shardplan.compiler.check.check_words import field_label
from shardplan.core.diagnostics import Diagnostic, PlanError, Severity
from shardplan.core.mesh import BATCHES, Axis
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import full_name, named

from .model import ModelLayouts
from .randomness import OTHERS, RANDOM, Key, Site, finding
from .stage_reads import StageParts, StageRun, outermost

ALWAYS = (
    "run the module always, and multiply what it adds by a number that is drawn, 0 or 1; or set the probability to 0"
)
OUTSIDE = "draw them outside the model and pass them as an input, or set the probability to 0"


def choice_findings(model: ModelLayouts, resolved: ResolvedPlan) -> tuple[Diagnostic, ...]:
    """SP371 where random numbers decide which modules run, and ranks that run them together draw their own; and with stages where they are not
    torch's.

    Args:
        model: the reduced model; where it does not run, nothing is found.
        resolved: a variant, bound to the model itself.
    """
    sizes, section = resolved.sizes, resolved.data_parallel
    batches = sizes.replicas > 1 and (section is not None or sizes.ep > 1)
    if not (batches or sizes.pp > 1) or not model.runs:
        return ()
    try:
        drawing = model.drawing
    except PlanError as error:
        return error.diagnostics
    if sizes.pp > 1 and (others := tuple(site for site in drawing if site.name == OTHERS)):
        found = finding(model.found.name, others, 1)
        return (replace(found, modules=model.names_in_model(found.modules)),)
    sites = [site for site in drawing if site.skipped]
    if not batches:  # a block is on one rank: what it leaves out inside of it is its own
        sites = [site for site in sites if not _inside(model.names_in_model((site.module,)), resolved.pp_blocks)]
    skipped = model.names_in_model(outermost(dict.fromkeys(name for site in sites for name in site.skipped)))
    if not skipped:
        return ()
    axes = sizes.text(BATCHES if batches else (Axis.PP,), " and ")
    return (
        Diagnostic(
            code=RANDOM,
            severity=Severity.ERROR,
            message=f"random numbers decide whether {named(skipped)} {'runs' if len(skipped) == 1 else 'run'}, and each rank of {axes} draws "
            "its own",
            primary=field_label(section, "backend") if batches else field_label(resolved.pipeline_parallel, "layers"),
            notes=tuple(dict.fromkeys(f"{site.module or model.found.name}: {site.shown}" for site in sites))[:6],
            help=ALWAYS,
            modules=skipped,
        ),
    )


def stage_finding(model: ModelLayouts, parts: StageParts, severity: Severity) -> tuple[Diagnostic, ...]:
    """SP371 for random numbers, dropout's too, that the code outside of the blocks draws and that several stages read: each draws
    its own.

    Args:
        parts: everything that is in the first and the last stage.
    """
    try:
        sites = (*model.drawing, *(site for one in model.noise for site in one.dropped))
    except PlanError as error:  # it does not run with its own probabilities
        return error.diagnostics
    stages = {name: i for i, name in enumerate(parts.blocks)}
    stages |= {**dict.fromkeys(parts.first, 0), **dict.fromkeys(parts.last, len(parts.blocks) - 1)}
    outside = {site.key: site for site in sites if not _inside((site.module,), stages)}
    if not outside:
        return ()
    runs = (StageRun(recorded.reference, model.tree, parts) for recorded in model.recorded_models)
    several = [_read_apart(run, outside, stages) for run in runs]
    wrong = [site for key, site in outside.items() if any(key in keys for keys in several)]
    if not wrong:
        return ()
    return (
        Diagnostic(
            code=RANDOM,
            severity=severity,
            message=f"the code of {model.found.name} outside of the blocks draws random numbers that several pipeline stages may read, and each "
            "stage draws its own",
            notes=tuple(site.shown for site in wrong)[:6],
            help=OUTSIDE,
        ),
    )


def _read_apart(run: StageRun, outside: Collection[Key], stages: Mapping[str, int]) -> set[Key]:
    """The places with a draw that several stages may read, or that code reads as a number; and those that did not run.

    Args:
        stages: module -> block, also of what is before and after the blocks.
    """
    trace, asked = run.trace, {*run.trace.answers}
    made: dict[int, Key] = {}  # of each draw
    drawn: dict[int, frozenset[int]] = {}  # value -> the draws that it comes from
    readers: dict[int, set[int]] = defaultdict(set)
    for event, active in zip(trace.events, run.active, strict=True):
        region = run.region(event.module)
        stage = active if region is None else stages[region]
        if event.kind == "leave" and not event.module:
            stage = max(stages.values())
        read = frozenset[int]().union(*(drawn.get(one, ()) for one in event.inputs))
        if stage is not None:
            for draw in read:
                readers[draw].add(stage)
        elif event.kind == "op":
            key = Site(event.module, event.name, event.source).key
            own = event.outputs if key in outside else ()
            made |= dict.fromkeys(own, key)
            drawn |= {number: read | {*own} & {number} for number in event.outputs}
    told = {draw for number in asked & drawn.keys() for draw in drawn[number]}
    return {*outside} - {*made.values()} | {key for draw, key in made.items() if draw in told or len(readers[draw]) > 1}


def _inside(names: Iterable[str], around: Iterable[str]) -> bool:
    """Whether all of these modules are inside of some others."""
    prefixes = tuple(full_name(one, "") for one in around)
    return all(full_name(name, "").startswith(prefixes) for name in names)
