"""Where a wrong proof begins: the first tensor at the boundary of a module that the ranks' parts do not make up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from shardplan.compiler.layout.randomness import DrawnAlike
from shardplan.compiler.layout.spread import SUM, Spread, scale, spread_of
from shardplan.compiler.lower import Program
from shardplan.core.tree import ancestors, full_name, parent
from shardplan.model.forward_code import argument_names
from shardplan.model.model_findings import reason
from shardplan.styles.boundary import returns_tokens

from .simulate import Run, common_to_ranks, results_on_ranks
from .steps import run_steps
from .threads import OnRanks
from .watched_model import Place, WatchedModel, watching

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
