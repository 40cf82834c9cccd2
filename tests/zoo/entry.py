"""What is found out about one model type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardplan.authoring.init.derive import derive
from shardplan.authoring.init.new import written
from shardplan.compiler.automatic import auto_plan
from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.compiler.layout import RecordedModel, check_layout
from shardplan.compiler.lower import lower, split_parameters
from shardplan.compiler.lower.expected_collectives import expected_collectives
from shardplan.core.coverage import covered
from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, ResolvedPlan, overlays_of
from shardplan.core.tree import ModuleTree
from shardplan.language import parse_plan
from shardplan.model.found import FoundModel
from shardplan.model.reduced.trace import Trace
from tests.model_settings import find
from tests.soundness.judge import Subject, fitting, judge, subject

from .block_inputs import Size, TooManyChoices, dominated
from .minimum import choices, minimum, spent

SIZES = (2, 4)
WORTH_SAYING = 0.01  # of the parameters inside the layers
# Structural findings that say: not at this size, with the head counts of the type's default configuration.
SIZE_CODES = ("SP301", "SP302", "SP303", "SP304", "SP305")

DERIVED = "derived"  # in place of a built-in plan's name: `auto` derives one
# Kinds of input besides text, and what the tables call them.
SEEN = {"image": "image", "picture": "image", "pixel_values": "image", "video": "video", "audio": "audio"}

Collectives = dict[str, dict[str, int]]  # "forward" and "backward" -> operation -> how many a step runs


@dataclass(frozen=True)
class Entry:
    """A model type.

    Args:
        name: the type.
        plan: the built-in plan for it, or None.
        verdicts: "tp2", "sp2" and so on (without and with sequence parallelism, at each size) -> "right" (`validate` has
            no finding, and loss, logits and every gradient are the unsharded model's); "size SPnnn" (its default
            configuration does not allow the size); "none" (no overlay); or what is wrong.
        split: the share of the parameters inside the layers that is split over tp, in the type's default configuration.
        whole: what is not: part of a layer -> its share.
        collectives: at tp 2, by variant.
        minimum: the fewest that the same split allows.
        reduced: with TP, where the backward pass has more than these and the forward pass has not: its collectives, and how
            many elements they reduce for each token, and whatever the number of tokens.
        choices: there, the same of each choice of block inputs that no other is as good as (block inputs.py).
        untried: why the choices are not known: there are too many to try all.
        init: the verdicts of the plan that `init` writes.
        init_more: the variants in which that plan communicates more than the minimum of what it splits.
        init_why: where it does less than the built-in plan: what `init` says stands in the way.
        checkpoints: the published checkpoints of the type -> "TP", "TP, SP" (what is proven), or why they are refused.
        experts: "right" where the plan is proven with its experts distributed, or what is wrong; empty where it distributes none.
        pipeline: what crosses a cut into pipeline stages, where the plan's section is proven ("one tensor", "one tensor and a tie");
            "none" without a section; else what is wrong. Empty where there is no plan.
        context: mesh -> what was found out about the rules for cp that follow from the plan: "right", "size SPnnn", or what is wrong;
            "section": why there are none. Empty where it was not run.
        mixers: the modules that these rules name for mixing tokens -> "heads" (each rank has a share of them) or "whole".
        reason: why there is no plan, or no verdict.
        no_overlay: why the plan that was derived has no sequence parallelism.
        images: the kinds of input besides text that the verdicts are of: "image", "video", "audio".
        unseen: why images that the model takes are not among them.
        unlearned: parameters, one name for all layers, that no input gives a gradient in the unsharded model.
        judged: what was found out ("verdicts", "experts", "context cp 2 tp 1" ...) -> with what (judged_with.py).
    """

    name: str
    plan: str | None = None
    verdicts: dict[str, str] = field(default_factory=dict)
    split: float = 0.0
    whole: dict[str, float] = field(default_factory=dict)
    collectives: dict[str, Collectives] = field(default_factory=dict)
    minimum: dict[str, Collectives] = field(default_factory=dict)
    reduced: list[float] = field(default_factory=list)
    choices: list[list[float]] = field(default_factory=list)
    untried: str = ""
    init: dict[str, str] = field(default_factory=dict)
    init_more: list[str] = field(default_factory=list)
    init_why: list[str] = field(default_factory=list)
    checkpoints: dict[str, str] = field(default_factory=dict)
    experts: str = ""
    pipeline: str = ""
    context: dict[str, str] = field(default_factory=dict)
    mixers: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    no_overlay: str = ""
    images: list[str] = field(default_factory=list)
    unseen: str = ""
    unlearned: list[str] = field(default_factory=list)
    judged: dict[str, str] = field(default_factory=dict, compare=False)

    def has(self, variant: str) -> bool:
        """Whether the plan is right at a size of the variant ("tp" or "sp"), and wrong at none."""
        return has(self.verdicts, variant)

    def more(self, variant: str) -> bool:
        """Whether a variant communicates more than it has to: it runs more of an operation than the minimum, and for its
        backward reductions another choice of block inputs is better."""
        if not any(self.exceeds(variant, when) for when in self.collectives[variant]):
            return False
        return variant != "tp" or not self.choices or self.is_beaten

    def exceeds(self, variant: str, when: str) -> bool:
        """Whether a variant runs more of any operation than the minimum, "forward" or "backward"."""
        least = self.minimum[variant][when]
        return any(n > least.get(operation, 0) for operation, n in self.collectives[variant][when].items())

    @property
    def is_a_choice(self) -> bool:
        """Whether all that a plan runs more often with TP alone is reductions backward: then where they are is weighed."""
        more = {
            (when, operation)
            for when, found in self.collectives["tp"].items()
            for operation, n in found.items()
            if n > self.minimum["tp"][when].get(operation, 0)
        }
        return more == {("backward", "all_reduce")}

    @property
    def is_beaten(self) -> bool:
        """Whether a choice of block inputs is better."""
        count, *size = self.reduced
        return dominated({int(n): Size(*least) for n, *least in self.choices}, int(count), Size(*size))


def has(verdicts: Mapping[str, str], variant: str) -> bool:
    """Whether what was judged is right at a size of the variant ("tp" or "sp"), and wrong at none."""
    said = [text for key, text in verdicts.items() if key.startswith(variant)]
    return "right" in said and all(text == "right" or text.startswith("size ") for text in said)


def made_again(before: Entry) -> Entry:
    """The entry of a type, with what is known besides its proofs. Not in the file that is run, which other processes cannot
    import.
    """
    kept = {
        field: getattr(before, field)
        for field in ("init", "init_more", "init_why", "checkpoints", "experts", "pipeline", "context", "mixers")
    }
    return replace(entry(before.name), **kept)


def made_or_derived(before: Entry) -> Entry:
    """As `made_again`, with the plan that `auto` derives where no built-in plan is for the type."""
    return entry(before.name, derives=True)


def entry(name: str, *, derives: bool = False) -> Entry:
    """Find out about a model type, or an image-text class.

    Args:
        derives: a plan, where no built-in plan is for it; it is proven at the first size.
    """
    torch.set_num_threads(1)
    try:
        found = find(name)
    except PlanError as error:
        about = error.diagnostics[0]
        return Entry(name, reason=": ".join(("cannot be built", about.message, *about.notes)))
    plan = auto_plan(found.tree).plan
    own = plan is not None or not derives
    try:
        sizes = SIZES if own else SIZES[:1]
        small = {tp: fitting(name, tp, plan) if plan is not None else subject(name, tp) for tp in sizes}
    except PlanError as error:
        about = error.diagnostics[0]
        return Entry(name, plan.name if plan else None, reason=": ".join((about.message, *about.notes)))
    except Exception as error:  # of the model's own code
        return Entry(name, plan.name if plan else None, reason=f"does not run: {type(error).__name__}: {error}")
    why = ""
    if plan is None and derives:
        plan, why = derived_plan(found)
    if plan is None:
        return Entry(name, reason=why or "no built-in plan is for it")
    one = proven(name, found.tree, plan, small) if own else _judged_alone(name, found.tree, plan, small)
    split, whole = covered(found.tree, split_parameters(bind(plan, found.tree, MeshSizes())[0]))
    return replace(
        one,
        plan=one.plan if auto_plan(found.tree).plan is not None else DERIVED,
        no_overlay=why,
        split=round(split, 3),
        whole={part: round(share, 3) for part, share in whole.items() if share >= WORTH_SAYING},
        images=list(dict.fromkeys(SEEN[kind] for kind in small[SIZES[0]].recorded_models if kind in SEEN)),
        unseen=small[SIZES[0]].unseen,
        unlearned=_unlearned(small[SIZES[0]]),
    )


def _judged_alone(name: str, tree: ModuleTree, plan: PlanFile, small: Mapping[int, Subject]) -> Entry:
    """As `proven`, without what the plan communicates."""
    verdicts = judged(tree, plan, small)
    return Entry(name, plan.name, {f"{word}{tp}": said for (word, tp), (said, _) in verdicts.items()})


def derived_plan(found: FoundModel) -> tuple[PlanFile | None, str]:
    """The plan that `auto` derives at the first size, with an overlay where one is found; and why there is no plan, or no overlay."""
    try:
        derived = derive(found, SIZES[0], sequence_parallel=True)
    except PlanError as error:
        return None, ": ".join((error.diagnostics[0].message, *error.diagnostics[0].notes))
    if not derived.draft.tensor_parallel:
        return None, "nothing can be split"
    return parse_plan(dict(written(found, derived).document), name=DERIVED).plan, derived.no_overlay or ""


def proven(name: str, tree: ModuleTree, plan: PlanFile, small: Mapping[int, Subject]) -> Entry:
    """What is found out about a plan by its proofs.

    Args:
        tree: the model's own.
        small: its reduced models, by tp size.
    """
    verdicts = judged(tree, plan, small)
    counted = {
        word: resolved for (word, tp), (_, resolved) in verdicts.items() if resolved is not None and tp == SIZES[0]
    }
    one = Entry(name, plan.name, {f"{word}{tp}": said for (word, tp), (said, _) in verdicts.items()})
    return communicating(one, counted, small[SIZES[0]].recorded, tree)


def communicating(one: Entry, counted: Mapping[str, ResolvedPlan], recorded: RecordedModel, tree: ModuleTree) -> Entry:
    """The entry with what a plan communicates.

    Args:
        counted: variant -> the plan as it is lowered.
        recorded: the reduced model that it is bound to.
        tree: the model's own.
    """
    one = replace(
        one,
        collectives={word: collectives(resolved, recorded.reference) for word, resolved in counted.items()},
        minimum={word: minimum(resolved, recorded) for word, resolved in counted.items()},
        reduced=[],
        choices=[],
        untried="",
    )
    if "tp" not in counted or not one.is_a_choice:
        return one
    count, size = spent(counted["tp"], recorded, tree)
    try:
        frontier = choices(counted["tp"], recorded, tree)
    except TooManyChoices as error:
        return replace(one, untried=str(error))
    return replace(one, reduced=[count, *size], choices=[[n, *least] for n, least in sorted(frontier.items())])


def counted_again(before: Entry) -> Entry:
    """The entry of a type whose plan was proven, with what it communicates counted again."""
    torch.set_num_threads(1)
    if before.plan is None:
        return before
    found, plan = find(before.name), parse_plan(before.plan).plan
    recorded = fitting(before.name, SIZES[0], plan).recorded
    counted = {}
    for word in before.collectives:
        resolved, _ = bind(plan, recorded.tree, MeshSizes(tp=SIZES[0]), overlays_of(word == "sp"))
        report = check_layout(resolved, [recorded], help=False)
        counted[word] = report.onto(resolved)
    return communicating(before, counted, recorded, found.tree)


def judged(
    tree: ModuleTree, plan: PlanFile, small: Mapping[int, Subject]
) -> dict[tuple[str, int], tuple[str, ResolvedPlan | None]]:
    """(variant, tp size) -> what is said of a plan, and, where it is right, the plan as it is lowered.

    Args:
        tree: the model's own.
        small: its reduced models, by tp size.
    """
    found: dict[tuple[str, int], tuple[str, ResolvedPlan | None]] = {}
    for word, on in (("tp", False), ("sp", True)):
        for tp, one in small.items():
            said = _structure(tree, plan, tp, on)
            found[word, tp] = (said, None) if said else _verdict(one, plan, on)
    return found


def _unlearned(small: Subject) -> list[str]:
    """Parameters of a model that takes images to which, in no layer, any kind of input gives a gradient that is not zero."""
    if set(small.recorded_models) <= {"text"}:
        return []
    learned = {
        name
        for steps in small.steps.values()
        for name, gradient in steps[torch.float32].gradients.items()
        if bool(gradient.abs().max() > 0)
    }
    patterns = {small.tree.pattern(name) for name in learned}
    return sorted({small.tree.pattern(name) for name in small.tree.parameters} - patterns)


def _structure(tree: ModuleTree, plan: PlanFile, tp: int, overlay: bool) -> str:
    """What is said against the plan for the model itself; nothing of what is the model's alone (its dropout)."""
    if overlay and not plan.has_overlay:
        return "none"
    resolved, about = bind(plan, tree, MeshSizes(tp=tp), overlays_of(overlay))
    return _structural([d for d in (*about, *check(resolved, seq_len=None)) if d.is_error and d.primary is not None])


def _structural(errors: Sequence[Diagnostic]) -> str:
    if not errors:
        return ""
    codes = sorted({d.code for d in errors})
    return f"size {codes[0]}" if set(codes) <= set(SIZE_CODES) else f"{errors[0].code}: {errors[0].message}"


def _verdict(small: Subject, plan: PlanFile, overlay: bool) -> tuple[str, ResolvedPlan | None]:
    said = judge(small, plan, sequence_parallel=overlay, help=False)
    if said.structure:
        return _structural(said.structure), None
    if said.layout.diagnostics:
        about = said.layout.diagnostics[0]
        return f"{about.code}: {about.message}" + ("" if said.right else f"; {said.worst}"), None
    return ("right", said.resolved) if said.right else (f"valid, but wrong: {said.worst}", None)


def collectives(resolved: ResolvedPlan, run: Trace) -> Collectives:
    """What a step of the program runs on the tp axis, each module as often as in the unsharded run."""
    times = Counter(event.module for event in run.events if event.kind == "enter")
    total = {"forward": Counter(), "backward": Counter()}
    for name, module in lower(resolved).modules.items():
        for when, counts in expected_collectives({name: module}).items():
            total[when].update({op: n * times[name] for op, n in counts.items()})
    return {when: {op: n for op, n in sorted(counts.items()) if n} for when, counts in total.items()}
