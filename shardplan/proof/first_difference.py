"""Where a wrong proof begins: the first tensor at the boundary of a module that the ranks' parts do not make up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shardplan.compiler.layout.randomness import DrawnAlike
from shardplan.compiler.layout.spread import SUM, Spread, scale, spread_of
from shardplan.compiler.lower import Program
from shardplan.core.tree import ancestors, full_name, parent
from shardplan.model.forward_code import argument_names
from shardplan.model.model_findings import reason
from shardplan.model.reduced.nests import named_results, replaced, tensors_in
from shardplan.model.reduced.recorder import Recorder
from shardplan.runtime.parallel.fused_logits import FusedLogits
from shardplan.styles.boundary import returns_tokens
from shardplan.torchlib.hollow import Hollow
from shardplan.torchlib.private import private

from .simulate import Run, common_to_ranks, results_on_ranks
from .steps import run_steps
from .threads import OnRanks

BEGINS = "the first difference is"
FIRST = "0"  # the key of a result that is one tensor
ROUNDING = 16  # units in the last place of the largest gradient
LAST = 2  # operands that a message names
FORMS = {"whole": "complete", "split": "a part", "sum": "a partial sum"}


@dataclass(frozen=True)
class FirstDifference:
    """The first difference of a run.

    Args:
        modules: whose rules may be wrong, in the names of the reduced model, the likeliest first; none where it is not known.
        text: the tensor, and what it is made from; why it is not known.
    """

    modules: tuple[str, ...]
    text: str


def first_difference(run: Run, program: Program, on_ranks: OnRanks) -> FirstDifference | None:
    """Run the steps once more on all ranks, and look at what crosses the boundaries of modules. The arguments are those of `simulate`.

    Ranks of the first batch are compared. Values inside of experts, and of tables of a rank's own rows, are left out.

    Returns:
        None where every such tensor is whole, split or a partial sum, so that only a parameter's own gradient is wrong.
    """
    unsharded, given = run.build(), iter(run.references[0].directions)
    names = {name: argument_names(module) for name, module in unsharded.named_modules()}
    ranks: dict[int, WatchedModel] = {}
    with watching() as watch:
        whole = watch(unsharded, names)
        try:
            with common_to_ranks(unsharded), DrawnAlike() if run.references[0].drew else nullcontext():
                run_steps(unsharded, run.batches[0], lambda results: next(given), own_loss=run.references[0].size == 1)
            found = results_on_ranks(
                run, program, on_ranks, lambda rank, model: ranks.update({rank: watch(model, names)})
            )
        except RuntimeError as error:  # it changes a view in place that a custom function returned
            return FirstDifference(
                (),
                f"the first difference is not known, as the model does not run on views of its tensors: {reason(error)}",
            )
    return _first(whole, [ranks[rank] for rank, (index, _) in enumerate(found) if index == 0], program)


def _first(whole: WatchedModel, ranks: Sequence[WatchedModel], program: Program) -> FirstDifference | None:
    spreads: dict[Place, Spread | None] = {}
    for place, spread in spreads_of(whole, ranks, program):
        spreads[place] = spread
        if spread is None:
            return _told(place, whole, spreads)
    return None


def spreads_of(
    whole: WatchedModel, ranks: Sequence[WatchedModel], program: Program
) -> Iterator[tuple[Place, Spread | None]]:
    """How the ranks' tensors make up the unsharded model's, in the order of its run, where all ranks have a tensor. A right gradient whose
    last features alone are partial sums is left out."""
    # Inside of experts that get other ranks' tokens, and of tables that look up only their own rows, values are a rank's own.
    apart = (name for name, one in program.modules.items() if one.experts is not None or one.vocabulary is not None)
    exchanged = tuple(full_name(name, "") for name in apart)
    # Readers outside of a block add complete gradients to the block's partial sums.
    outside = {name for name, one in program.modules.items() if one.outside is not None}
    tails = {name: one.tail for name, one in program.modules.items() if one.tail}
    waiting = frozenset(_waiting(program))
    cp = program.resolved.sizes.cp
    routed = set(_routed(whole, ranks, cp)) if cp > 1 else set()
    values: dict[Place, Spread] = {}  # gradient -> how its value is spread
    largest = max((scale(gradient) for place, gradient in whole.seen.items() if place.gradient), default=0.0)
    for place, reference in whole.seen.items():
        if place.gradient and scale(reference) <= ROUNDING * torch.finfo(reference.dtype).eps * largest:
            continue  # zero, but for rounding
        if not reference.ndim and returns_tokens(program.resolved.on_cp):
            continue  # the loss of a rank's own tokens
        parts = [rank.seen[place] for rank in ranks if place in rank.seen]
        mixed = place.module in (outside if place.gradient else waiting)
        if len(parts) < len(ranks) or mixed or place.module in routed or place.module.startswith(exchanged):
            continue
        if place.gradient and place.side == "result" and (tail := tails.get(place.module)):
            pieces = ([one[..., cut] for one in parts] for cut in (slice(-tail), slice(-tail, None)))
            wholes = reference.tensor_split((reference.shape[-1] - tail,), -1)
            if any(spread_of(own, one) is None for own, one in zip(pieces, wholes, strict=True)):
                yield place, None
            continue
        value = values.get(place)
        # Ranks of cp average the gradients of parameters, so that those of their own tokens are as many times as large.
        own = [one / cp for one in parts] if place.gradient and cp > 1 else parts
        first = parts if value is not None and value.kind == "whole" else own
        found = spread_of(first, reference)
        if found is None and first is not own:
            found = spread_of(own, reference)
        if found is None and value is not None and value.copies > 1:
            found = _added_up(own, reference, value)
        elif found is not None and not place.gradient:
            values[place._replace(gradient=True)] = found
        yield place, found


def _routed(whole: WatchedModel, ranks: Sequence[WatchedModel], cp: int) -> Iterator[str]:
    """The modules that get rows which a router chooses: on a rank of cp, from its own tokens."""
    for place, reference in whole.seen.items():
        if any(place in rank.seen and not _is_part(rank.seen[place].shape, reference.shape, cp) for rank in ranks):
            yield place.module


def _is_part(shape: Sequence[int], whole: Sequence[int], ranks: int) -> bool:
    """Whether each dim is whole or a share of it, on as many ranks or on some of them."""
    return len(shape) == len(whole) and all(
        n == of or (n > 0 and of % n == 0 and ranks % (of // n) == 0) for n, of in zip(shape, whole, strict=True)
    )


def _waiting(program: Program) -> Iterator[str]:
    """The modules that hand on sums which the last of a block's `sum_outputs` reduces: what each returns is not its own."""
    tree = program.resolved.tree
    for one in program.resolved.sums:
        prefix = full_name(one.block, "")
        yield from (name for member in one.members for name in (member, *ancestors(member)) if name.startswith(prefix))
        yield from (
            name for name, module in tree.modules.items() if module.kind == "dropout" and name.startswith(prefix)
        )


def _added_up(parts: Sequence[Tensor], reference: Tensor, value: Spread) -> Spread | None:
    """How the gradients of a value make up the whole, where several ranks have the same of its slices and add them up."""
    assert value.dim is not None and value.order is not None, value
    if value.joined:
        parts, reference = (
            [one.flatten(value.dim, value.dim + 1) for one in parts],
            reference.flatten(value.dim, value.dim + 1),
        )
    whole = torch.zeros_like(reference)
    for own, indices in zip(parts, value.order, strict=True):
        whole.index_add_(value.dim, torch.tensor(indices), own)
    return None if spread_of([whole], reference) is None else SUM


def _told(place: Place, whole: WatchedModel, spreads: Mapping[Place, Spread | None]) -> FirstDifference:
    """The modules whose results are combined come before the one that combines them, the last before the others. A module without
    modules inside comes before those that make its arguments."""
    module, around = place.module, parent(place.module)
    what = f"{place.side} {place.key}" if place.side == "argument" or place.key != FIRST else place.side
    tensor, made = f"the {what} of {module or 'the model'}", f", made in {around or 'the model'}"
    if place.gradient and place.side == "argument":
        got = {part for _, part in _parts((one for one in spreads if one[:3] == (*place[:2], "result")), spreads)}
        after = f", whose result gets {' and '.join(got)} as its gradient," if got - {FORMS["whole"]} else ""
        return FirstDifference((module,), f"{BEGINS} the gradient that {module}{after} gives back for its {what}")
    if place.gradient:
        value = place._replace(gradient=False)
        readers = (reader._replace(gradient=True) for reader, made in whole.made.items() if made == value)
        operands = _parts(readers, spreads)
        names = [name for name, part in reversed(operands) if part != FORMS["whole"]]
        return FirstDifference((*names, module, around), f"{BEGINS} the gradient of {tensor}{made}{_from(operands)}")
    code, made = (around, made) if place.side == "argument" else (module, "")
    inside = [one for one in spreads if one.side == "result" and not one.gradient and parent(one.module) == code]
    own = (made for one, made in whole.made.items() if one[:2] == place[:2])
    operands = _parts(inside or own, spreads)[-LAST:]
    names = [name for name, _ in reversed(operands)]
    return FirstDifference((*names, code) if inside else (code, *names), f"{BEGINS} {tensor}{made}{_from(operands)}")


def _from(operands: Sequence[tuple[str, str]]) -> str:
    return f", from {', '.join(f'{name} ({part})' for name, part in operands)}" if operands else ""


def _parts(places: Iterable[Place], spreads: Mapping[Place, Spread | None]) -> tuple[tuple[str, str], ...]:
    """The modules of these places, in order, with how the ranks have their tensors; of values, only those that are not whole."""
    found: dict[str, str] = {}
    for place in places:
        spread = spreads.get(place)
        if spread is not None and (place.gradient or spread.kind != "whole"):
            found.pop(place.module, None)
            found[place.module] = FORMS[spread.kind]
    return tuple(found.items())


# Recording a run with real moves: the values and the gradients at the boundaries of a model's modules, whatever moves them inside.
_current_graph_task_id = private("current_graph_task_id")


class Place(NamedTuple):
    """A tensor of a run.

    Args:
        module: full name of the module.
        call: how many calls of the module began before, with this one.
        side: an argument or a result of the call, as code outside of the module sees it.
        key: its name or position.
        gradient: whether it is the gradient. That of an argument is what this call adds to it; that of a result is the sum over
            all readers.
    """

    module: str
    call: int
    side: Literal["argument", "result"]
    key: str
    gradient: bool = False


class WatchedModel(Recorder):
    """Records the calls of a model's modules, in `watching`: each gets and returns views of its tensors, whose gradients are its own.

    Args:
        model: see Recorder.
        names: module -> the names of its arguments, which the forwards of a planned model do not have.

    Attributes:
        seen: the tensors, in the order of the run. Calls that a backward makes (checkpoints) are left out.
        made: an argument -> the result, or the argument of a module around, that it is.
    """

    def __init__(self, model: nn.Module, names: Mapping[str, Sequence[str]]):
        super().__init__(model)
        self.names = names
        self.seen: dict[Place, Tensor] = {}
        self.made: dict[Place, Place] = {}
        # On views that this has: Python finds no cycle that goes through autograd's nodes, so `watching` removes them.
        self.hooks: list[RemovableHandle] = []
        self._places: dict[int, tuple[Place, Tensor]] = {}  # id -> where it is from; the tensor keeps the id in use

    def call(self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Record a call of a module from outside: its hooks, which move tensors, run inside."""
        args, kwargs = self._enter(module, args, kwargs) or (args, kwargs)
        return self._leave(module, args, kwargs, forward(*args, **kwargs))

    def number(self, tensor: Tensor, reading: str | None = None) -> int:
        return super().number(tensor.kept if isinstance(tensor, Hollow) else tensor, reading)

    def argument_names(self, module: nn.Module) -> Sequence[str]:
        return self.names[self._names[id(module)]]

    def moved_arguments(self, scope: tuple[str, int], module: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
        views = self._views(partial(Place, *scope, "argument"), named_results(named))
        return {
            name: replaced(value, views)
            for name, value in named.items()
            if any(id(tensor) in views for tensor in tensors_in(value))
        }

    def moved_results(
        self, scope: tuple[str, int], module: nn.Module, results: list[tuple[str, Tensor]]
    ) -> dict[int, Tensor]:
        views = self._views(partial(Place, *scope, "result"), results)
        return {i: views[id(tensor)] for i, (_, tensor) in enumerate(results) if id(tensor) in views}

    def _views(self, of: Callable[[str], Place], values: Iterable[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """A view of each tensor, by the tensor's id; not of a result that is there twice: on ranks it may be moved at one of its places."""
        views: dict[int, Tensor] = {}
        values = [*values]
        times = Counter(id(tensor) for _, tensor in values)
        for key, tensor in values:
            if isinstance(tensor, (DTensor, FusedLogits)) or not tensor.is_floating_point():
                continue  # the values of fused logits are made by the loss
            place = of(key)
            self.seen[place] = self.trace.values[self.number(tensor)]
            origin, _ = self._places.get(id(tensor), (place, tensor))
            if place.side == "argument" and origin != place:
                self.made[place] = origin
            once = place.side == "argument" or times[id(tensor)] == 1
            if tensor.requires_grad and is_grad_enabled() and once:
                views[id(tensor)] = view = tensor.view_as(tensor)
                self.hooks.append(view.register_hook(partial(self._note_gradient, place)))
                self._places[id(view)] = (place if place.side == "result" else origin, view)
        return views

    def _note_gradient(self, place: Place, gradient: Tensor) -> None:
        self.seen[place._replace(gradient=True)] = gradient.detach().clone()


Watch = Callable[[nn.Module, Mapping[str, Sequence[str]]], WatchedModel]


@contextmanager
def watching() -> Iterator[Watch]:
    """Within this context, calls of the modules of watched models are recorded. Nothing changes in the modules, which look for changes.

    Returns:
        A function that watches a model.
    """
    plain, watched = nn.Module.__call__, dict[nn.Module, WatchedModel]()

    def watch(model: nn.Module, names: Mapping[str, Sequence[str]]) -> WatchedModel:
        recorder = WatchedModel(model, names)
        watched.update(dict.fromkeys(model.modules(), recorder))
        return recorder

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = watched.get(module)
        if recorder is None or _current_graph_task_id() != -1:
            return plain(module, *args, **kwargs)
        return recorder.call(module, partial(plain, module), args, kwargs)

    with patch.object(nn.Module, "__call__", called):
        try:
            yield watch
        finally:
            for hook in chain.from_iterable(one.hooks for one in {*watched.values()}):
                hook.remove()
