"""Whose random numbers each module draws in training: found by a run of the reduced model with the model's own probabilities.

The reduced model is typed without dropout, as masks would hide how values are spread. It is run once more with dropout,
unsharded, to find the operations that draw. Each is then looked up among the typed ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from shardplan.core.diagnostics import Diagnostic, Severity
from shardplan.core.module_program import Draws
from shardplan.core.tree import ModuleTree, ancestors, full_name, innermost, named
from shardplan.model.adapters import unwrapped
from shardplan.model.rebinding import copied
from shardplan.model.reduced.nests import tensors_in
from shardplan.model.reduced.trace import SourceLine

from .drawing_operands import ELEMENTWISE, LINEAR, OWN_CODE, WHOLE_FEATURES, DrawingOperand
from .dropout import DROPOUT, active_probabilities, probabilities
from .randomness import OTHERS, DrawingRun, Site, acting_sites
from .run import RecordedModel

WHOLE = frozenset(("I", "R", "whole"))  # types of values that every rank has whole
SWITCH_OFF = "set the probability to 0 in the config or the module"


@dataclass(frozen=True, slots=True)
class Drawing:
    """An operation that drew random numbers in the run with dropout.

    Args:
        module: the module whose code runs it.
        name: the operation's name.
        source: the line of the model's code.
        layer: the layer with adapters that the module is inside; "" for none.
        of_input: whether the operand is the input of that layer.
    """

    module: str
    name: str
    source: SourceLine | None
    layer: str = ""
    of_input: bool = False


@dataclass(frozen=True)
class Noise:
    """The run with dropout.

    Args:
        drawings: the operations that drew, each once.
        lost: (modules, attribute) with a probability above 0 that is missing in the reduced model.
        unmanaged: the places of operations other than dropout whose draws change a result.
    """

    drawings: tuple[Drawing, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    unmanaged: tuple[Site, ...] = ()

    @property
    def dropped(self) -> tuple[Site, ...]:
        """The places of the operations that drop elements."""
        return tuple(Site(one.module, one.name, one.source) for one in self.drawings)


def with_probabilities(recorded: RecordedModel, tree: ModuleTree) -> tuple[nn.Module, tuple[tuple[str, str], ...]]:
    """A copy of the reduced model with the model's own probabilities; and each (module, attribute) that it lacks.

    Args:
        tree: the model's own.
    """
    wanted: dict[str, dict[str, float]] = defaultdict(dict)
    configs: dict[str, dict[str, float]] = defaultdict(dict)
    for name, module in tree.modules.items():
        wanted[tree.pattern(name)] |= probabilities(module.kind, module.numbers)
        configs[tree.pattern(name)] |= probabilities("other", module.config or {})
    model, set_ones = copied(recorded.model), set[tuple[str, str]]()
    for name, info in recorded.tree.modules.items():
        pattern = recorded.tree.pattern(name)
        held = unwrapped(model).get_submodule(full_name(name, info.layer) if info.layer else name)
        for attribute, value in wanted[pattern].items():
            if attribute in vars(held):
                vars(held)[attribute] = value
                set_ones.add((pattern, attribute))
        for field_name, value in configs[pattern].items():
            setattr(held.config, field_name, value)
    lost = tuple((pattern, attribute) for pattern, found in wanted.items() for attribute in found)
    return model, tuple(one for one in lost if one not in set_ones)


def noise_of(recorded: RecordedModel, tree: ModuleTree) -> Noise:
    """Run the reduced model with the model's own probabilities. This costs nothing where all of them are 0.

    Args:
        tree: the model's own.

    Raises:
        Exception: what the model raises.
    """
    if not active_probabilities(tree) and not any(
        probabilities("other", m.config or {}) for m in tree.modules.values()
    ):
        return Noise()
    model, lost = with_probabilities(recorded, tree)
    drawings, draws = _drawings(recorded, copied(model))
    dropouts = tuple(one for one in drawings if one.name in ELEMENTWISE | WHOLE_FEATURES)
    found, unmanaged = Noise(dropouts, lost), tuple[Site, ...]()
    if draws.hidden or any(site.name not in ELEMENTWISE | WHOLE_FEATURES for site in draws.sites):
        unmanaged = acting_sites(model, recorded.inputs, {site.key for site in found.dropped})
    return replace(found, unmanaged=unmanaged)


def _drawings(recorded: RecordedModel, model: nn.Module) -> tuple[Mapping[Drawing, None], DrawingRun]:
    """The operations of a model that draw, and the run that found them.

    Args:
        model: a copy of the recorded model with its probabilities; it is changed.
    """
    found, given, named = dict[Drawing, None](), dict[str, list[Tensor]](), unwrapped(model)

    def note(site: Site, operands: list[Tensor]) -> None:
        layer = innermost(site.module, recorded.atoms)
        same = any(
            one.shape == x.shape and torch.equal(one.to(x.dtype), x)
            for one in operands[:1]
            for x in given.get(layer, ())
        )
        found[Drawing(site.module, site.name, site.source, layer, same)] = None

    def keep(name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        given[name] = [*tensors_in(args), *tensors_in(kwargs)]

    for name in recorded.atoms:
        named.get_submodule(name).register_forward_pre_hook(partial(keep, name), with_kwargs=True)
    draws = DrawingRun(note=note)
    draws.run(model, recorded.inputs, named)
    return found, draws


@dataclass
class _Decision:
    """The streams that the operations of one module ask for, and the problems with them."""

    streams: set[Draws] = field(default_factory=set)
    wrong: dict[str, str] = field(default_factory=dict)  # reason -> remedy
    places: dict[str, None] = field(default_factory=dict)


def decide(
    tree: ModuleTree, reduced_tree: ModuleTree, noise: Iterable[Noise], operands: Iterable[DrawingOperand]
) -> tuple[Mapping[str, Draws], tuple[Diagnostic, ...]]:
    """Whose numbers each module of the model draws. A diagnostic for each pattern of modules where no choice is right.

    Args:
        tree: the model's own.
        reduced_tree: the reduced model's.
        noise: the run for each kind of input.
        operands: the operands of the drawing operations in one variant of a plan.
    """
    by_place: dict[tuple[str, str, SourceLine | None], set[str]] = defaultdict(set)
    for one in operands:
        by_place[one.module, one.name, one.source].add(one.kind)
    found: dict[str, _Decision] = defaultdict(_Decision)
    for run in noise:
        for drawing in run.drawings:
            _add(found[reduced_tree.pattern(drawing.module)], drawing, by_place)
        for site in run.unmanaged:
            at = found[reduced_tree.pattern(site.module)]
            at.places[site.shown] = None
            kinds = by_place.get((site.module, OWN_CODE, None), set())
            if site.name != OTHERS and kinds and kinds <= WHOLE:
                at.streams.add("common")
            else:
                at.wrong["draws random numbers that are not dropout's, with values that are not whole"] = SWITCH_OFF
        for pattern, attribute in run.lost:
            at = found[pattern]
            at.wrong[f"has {attribute} above 0, which the reduced model does not have"] = SWITCH_OFF
    draws: dict[str, Draws] = {}
    wrong: list[Diagnostic] = []
    for pattern, at in found.items():
        modules = tuple(name for name in tree.modules if tree.pattern(name) == pattern)
        if not modules:
            at.wrong["drops elements in the reduced model, and the model has no such module"] = SWITCH_OFF
        if len(at.streams) > 1:
            at.wrong["drops elements of whole values and of split ones in one forward"] = (
                "put one of them into an nn.Dropout of its own, or set its probability to 0"
            )
        wrong += [_diagnostic(modules or (pattern,), reason, fix, at) for reason, fix in at.wrong.items()]
        draws.update(dict.fromkeys(modules, next(iter(at.streams), "common")))
    for name, info in tree.modules.items():
        if info.kind == "dropout" and probabilities(info.kind, info.numbers) and name not in draws:
            draws[name] = "unseen"
    return {name: draws[name] for name in tree.modules if name in draws}, tuple(wrong)


def unmanaged(modules: tuple[str, ...]) -> Diagnostic:
    """One finding for a model that is not typed."""
    return Diagnostic(
        code=DROPOUT,
        severity=Severity.ERROR,
        message=f"dropout is above 0 in {named(modules)}, but this plan is not proven: the layouts of the values that it drops are not known",
        help=SWITCH_OFF,
        modules=modules,
    )


def _add(at: _Decision, drawing: Drawing, by_place: Mapping[tuple[str, str, SourceLine | None], set[str]]) -> None:
    source = drawing.source
    at.places[source.shown if source else drawing.name] = None
    if drawing.layer:
        kinds = by_place.get((drawing.layer, "", None), set()) if drawing.of_input else set[str]()
    else:
        kinds = by_place.get((drawing.module, drawing.name, source), set())
    if not kinds and any((name, "", None) in by_place for name in (drawing.module, *ancestors(drawing.module))):
        kinds = {"?"}  # inside of what is one operation: a layer with adapters, distributed experts
    if not kinds:
        at.wrong["draws random numbers in code that does not run while its probability is 0"] = (
            "call the dropout without a condition on its probability, or set it to 0"
        )
    for kind in kinds:
        match kind:
            case "V" if drawing.name in ELEMENTWISE:
                at.streams.add("own")
            case "V":
                at.wrong[f"drops whole features ({drawing.name}) of a split value"] = SWITCH_OFF
            case "P" if drawing.name not in LINEAR:
                at.wrong[f"drops elements ({drawing.name}) of a partial sum"] = "reduce the value before it"
            case "?":
                at.wrong["drops elements of a value whose layout is not known"] = SWITCH_OFF
            case _:
                at.streams.add("common")


def _diagnostic(modules: tuple[str, ...], reason: str, fix: str, at: _Decision) -> Diagnostic:
    return Diagnostic(
        code=DROPOUT,
        severity=Severity.ERROR,
        message=f"{named(modules)} {reason}",
        notes=tuple(at.places)[:4],
        help=fix,
        modules=modules,
    )
