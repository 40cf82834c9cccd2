"""The calls of a model in the steps of a proof: the plain call, a call with padding and every switch of the forward, and a call with
embeddings instead of ids."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardplan.compiler.lower import Program
from shardplan.core.report import ProvenCalls
from shardplan.core.sections import ActivationCheckpointing
from shardplan.model.config_numbers import text_config
from shardplan.model.model_findings import reason
from shardplan.model.reduced.model_inputs import IDS, IGNORED, can_be_padded, padded
from shardplan.model.reduced.outcome import results_of
from shardplan.model.reduced.reduced_model import ReducedModel
from shardplan.runtime.apply.checkpointing import checkpoint_modules
from shardplan.runtime.apply.refusals import REFUSED_SWITCHES

from .steps import STEPS, seed_of

# Switches of the returned form of the same values, or of code that no training step runs.
FORMS = frozenset(("return_dict", "training"))
EMBEDDINGS, LABELS = "inputs_embeds", "labels"

Inputs = dict[str, Any]
Change = Callable[[Inputs], Inputs]


@dataclass(frozen=True)
class Calls:
    """The calls of one kind of input.

    Args:
        inputs: seed -> the plain call.
        second: name -> change, for the call of the last plain step.
        third: the changes for one more step.
        left_out: the changes with which the unsharded model does not run, and why.
    """

    kind: str
    inputs: Callable[[int], Inputs]
    second: Mapping[str, Change]
    third: Mapping[str, Change]
    left_out: Mapping[str, str]

    @property
    def steps(self) -> int:
        return STEPS + bool(self.third)

    @property
    def changes(self) -> tuple[str, ...]:
        """The names of the changes to the plain call."""
        return (*self.second, *self.third)

    def only(self, names: Collection[str]) -> Calls:
        """The plain call with only these changes."""
        second, third = ({n: one for n, one in all_.items() if n in names} for all_ in (self.second, self.third))
        return replace(self, second=second, third=third)

    def batches(self, replica: int = 0) -> list[Inputs]:
        """The keyword arguments of every step.

        Args:
            replica: the data-parallel rank. Ranks differ in their tokens and numbers of labels. With text, ranks other than 0 have a
                batch of one repeated token in the last plain step, which goes to few experts.
        """
        return [self._batch(step, replica) for step in range(self.steps)]

    def _batch(self, step: int, replica: int) -> Inputs:
        made = self.inputs(seed_of(step, replica))
        ids, labels = made.get(IDS), made.get(LABELS)
        if replica and isinstance(ids, Tensor) and isinstance(labels, Tensor) and ids.shape == labels.shape:
            made[IDS], made[LABELS] = _of_replica(ids, labels, replica, alone=step == STEPS - 1 and self.kind == "text")
        for change in (self.second if step == STEPS - 1 else self.third if step == STEPS else {}).values():
            made = change(made)
        return made

    @property
    def proven(self) -> ProvenCalls:
        """The report's record of the calls."""
        shapes = {n: tuple(x.shape) for n, x in self.inputs(0).items() if isinstance(x, Tensor) and n != LABELS}
        return ProvenCalls(self.kind, shapes, self.steps, tuple(self.second), tuple(self.third), dict(self.left_out))


def _of_replica(ids: Tensor, labels: Tensor, replica: int, *, alone: bool) -> tuple[Tensor, Tensor]:
    """The ids and labels of a data-parallel rank; with `alone` all ids are the same."""
    labels = labels.clone()
    if alone:
        ids = torch.full_like(ids, int(ids[0, -1]))
        labels[labels != IGNORED] = ids[0, 0]
    labels[1, 1 : 2 + (3 * replica) % (ids.shape[1] // 2)] = IGNORED
    return ids, labels


@dataclass(frozen=True)
class Checkpointed:
    """The modules of a reduced model that a plan checkpoints, and how; empty without a section.

    Args:
        own_heads: whether each rank of cp computes only its own heads.
        refused: arguments that keep their defaults.
    """

    modules: tuple[str, ...]
    section: ActivationCheckpointing
    own_heads: bool = False
    refused: tuple[str, ...] = ()


def checkpointed_by(program: Program) -> Checkpointed:
    """The modules that a program checkpoints, and the calls that it refuses."""
    resolved = program.resolved
    section = resolved.activation_checkpointing
    checkpointed = NOTHING if section is None else Checkpointed(tuple(resolved.ac_modules), section)
    return replace(checkpointed, own_heads=program.exchanges_heads, refused=tuple(resolved.plan.refused))


NOTHING = Checkpointed((), ActivationCheckpointing())
_KNOWN: WeakKeyDictionary[ReducedModel, dict[tuple[str, Checkpointed], Calls]] = WeakKeyDictionary()


def calls_of(
    reduced_model: ReducedModel, kind: str, under: Checkpointed = NOTHING, only: Collection[str] | None = None
) -> Calls:
    """The calls of one kind of input; they are tried once.

    The changes of one call are tried together on the unsharded model, and one by one only if that does not run.

    Args:
        under: checkpoints with which the unsharded model must run too: a recomputed module does not find the cache that its first run found.
        only: the changes to the plain call; None: all.
    """
    if only is not None and not only:
        return Calls(kind, _inputs_of(reduced_model, kind), {}, {}, {})
    known = _KNOWN.setdefault(reduced_model, {})
    if (kind, under) not in known:
        model = reduced_model.build()
        checkpoint_modules(model, under.modules, under.section, ())
        inputs = _inputs_of(reduced_model, kind)
        left_out: dict[str, str] = {}
        with reduced_model.running():
            given = inputs(STEPS - 1)
            refused = REFUSED_SWITCHES if reduced_model.tp > 1 or under.own_heads else {}
            refused = {**dict.fromkeys(under.refused, "the plan refuses it"), **refused}
            running = partial(_running, model, given, refused=refused, left_out=left_out)
            second = running({**switches(model, given), **_padding(model, given)})
            third = running(_embeddings(model, given))
        known[kind, under] = Calls(kind, inputs, second, third, left_out)
    return known[kind, under] if only is None else known[kind, under].only(only)


def _inputs_of(reduced_model: ReducedModel, kind: str) -> Callable[[int], Inputs]:
    feed = reduced_model.feeder  # the reduced model is the key of this function's cache
    return lambda seed: feed(kind, seed, None)


def switches(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Change]:
    """A forward's switches: its boolean arguments, and the fields `output_...` of its configuration if it takes any keyword; each
    with the value opposite to its default."""
    config = getattr(model, "config", None)
    parameters = inspect.signature(model.forward).parameters
    values: dict[str, bool] = {}
    for name, parameter in parameters.items():
        by_itself = parameter.default
        if by_itself is None and re.search(r"\bbool\b", str(parameter.annotation)):
            by_itself = bool(_field(config, name))
        if isinstance(by_itself, bool):
            values[name] = not by_itself
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        values |= {name: not _field(config, name) for name in _output_fields(config) if name not in values}
    return {
        f"{name}={value}": _with({name: value})
        for name, value in values.items()
        if name not in given and name not in FORMS
    }


def _output_fields(config: Any) -> Iterator[str]:
    for part in () if config is None else {id(c): c for c in (config, text_config(config))}.values():
        for name in dict.fromkeys((*dir(type(part)), *vars(part))):
            if name.startswith("output_") and isinstance(getattr(part, name, None), bool):
                yield name


def _field(config: Any, name: str) -> Any:
    own = getattr(config, name, None)
    return own if own is not None or config is None else getattr(text_config(config), name, None)


def _with(more: Mapping[str, Any]) -> Change:
    return lambda made: {**made, **more}


def _padding(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Change]:
    """A mask that pads the first row on the right and the second one on the left."""
    if not can_be_padded(model, given):
        return {}
    right, left = partial(padded, row=0, side="right"), partial(padded, row=1, side="left")
    return {"padding on the right": right, "padding on the left": left}


def _embeddings(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Change]:
    """Random embeddings instead of ids."""
    ids = given.get(IDS)
    if EMBEDDINGS not in inspect.signature(model.forward).parameters or not isinstance(ids, Tensor):
        return {}
    try:
        width = model.get_input_embeddings().weight.shape[-1]  # type: ignore[operator]  # transformers' models have it
    except (AttributeError, NotImplementedError):
        return {}

    def change(made: Inputs) -> Inputs:
        generator = torch.Generator().manual_seed(int(made[IDS].sum()))
        drawn = torch.randn(*made[IDS].shape, width, generator=generator)
        return {**{name: value for name, value in made.items() if name != IDS}, EMBEDDINGS: drawn}

    return {EMBEDDINGS: change}


def _running(
    model: nn.Module, given: Inputs, changes: Mapping[str, Change], refused: Mapping[str, str], left_out: dict[str, str]
) -> Mapping[str, Change]:
    """The changes with which a model runs in one call: all, or, tried one by one, those that run with the ones before.

    Args:
        refused: arguments with which the planned model raises, and why; a change that gives one is left out.
    """
    new = {name: change(dict(given)).keys() - given for name, change in changes.items()}
    why_not = {name: refused[one] for name, arguments in new.items() for one in arguments if one in refused}
    left_out |= {name: f"raises: {why}" for name, why in why_not.items()}
    changes = {name: change for name, change in changes.items() if name not in why_not}
    obstacle = partial(_obstacle, model, given)
    if not changes or not obstacle(changes.values()):
        return changes
    alone = {name: obstacle([change]) for name, change in changes.items()}
    left_out |= {name: why for name, why in alone.items() if why}
    kept: dict[str, Change] = {}
    for name, change in reversed(list(changes.items())):  # padding is tried before switches
        if alone[name]:
            continue
        if why := obstacle([*kept.values(), change]):
            left_out[name] = f"together with {', '.join(kept)}: {why}"
        else:
            kept[name] = change
    return {name: change for name, change in changes.items() if name in kept}


def _obstacle(model: nn.Module, given: Inputs, changes: Iterable[Change]) -> str:
    """Why the unsharded model does not run with changes to its call, forward and backward; empty where it does.

    It runs backward too: checkpointed modules run again there, and a hook may keep a module's output that this call does not compute.
    """
    made = dict(given)
    try:
        for change in changes:
            made = change(made)
        results, left = _run(model, made)
        drew = left is not None and left != _run(model, given)[1]  # the plain call is proven with its draws
    except Exception as error:  # modelling code may raise anything
        return f"the model raises {reason(error)}"
    if drew:
        return "it draws random numbers"
    return "" if all(not value.isnan().any() for value in results.values()) else "its result is not a number"


def _run(model: nn.Module, given: Inputs) -> tuple[Mapping[str, Tensor], bytes | None]:
    """The results of a forward that a backward followed, and the generator's state that the forward left, where it drew."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        results = results_of(model(**given))
        left = torch.get_rng_state()
        if trained := [value.sum() for value in results.values() if value.requires_grad]:
            torch.autograd.backward(trained)
    return results, None if torch.equal(before, left) else left.numpy().tobytes()
