"""The type of an operation's result, from how it is spread and from the types of the operands.

How a value is spread over the ranks (whole, split, a sum) is found by comparing each rank's value with the unsharded
model's at the same place. Whether the gradient of a whole value is complete (I) or a partial sum (R) follows from how
it is read, by the chain rule, operation by operation:

| result | a whole operand's gradient on this rank |
|---|---|
| split | is the share of this rank's slice: a partial sum |
| sum | is the share of this rank's summand: a partial sum |
| whole | is complete where the result's is, and a partial sum where the result's is |

So a result that is split or a sum wants R for its whole operands. A whole result wants one type for all of them, and
has that type. None of this depends on the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from shardplan.core.tree import ancestors, block
from shardplan.model.reduced.trace import Event, Place
from shardplan.styles.bound import BoundModule

from .cross_module_reads import below
from .drawing_operands import LINEAR
from .other_choices import Choice
from .spread import SUM, WHOLE, Spread
from .spreads import Spreads
from .typed_modules import is_mean
from .typed_run import TypedRun
from .types import FREE, KINDS, Type, TypeKind

CONVERSIONS = frozenset(("to", "type_as"))  # of another tensor they read the dtype alone
# What these make of parts of a sum adds up to what they make of the sum, whatever the numbers are.
ADDING_UP = (
    LINEAR
    | CONVERSIONS
    | frozenset(
        """add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __rsub__ __isub__ neg __neg__ mul mul_ __mul__ __rmul__ __imul__ div div_
    __truediv__ __itruediv__ sum mean cumsum einsum linear Linear matmul __matmul__ bmm baddbmm mm view view_as reshape flatten unflatten
    squeeze unsqueeze expand repeat repeat_interleave transpose permute t swapaxes movedim contiguous clone detach float double half bfloat16
    type __getitem__ __setitem__ index_select index_add index_add_ index_put index_put_ index_copy_ gather scatter scatter_ scatter_add
    scatter_add_ masked_fill masked_fill_ where cat stack split chunk unbind narrow select roll flip pad copy_""".split()
    )
)


class Operations:
    """Types the results of operations.

    Args:
        typed: the types of the values so far; the types of results, and findings, are added.
        plan: each module and its boundary.
        spreads: how values are spread, from the run of every rank.
        units: modules whose parameters are gathered only while they run themselves.
        parts: operation -> operand -> whether it contributes to the result, where that is known.
        own_tokens: whether ranks have tokens of their own.

    Attributes:
        doubts: as in `Proof`.
    """

    def __init__(
        self,
        typed: TypedRun,
        plan: Mapping[str, BoundModule],
        spreads: Spreads,
        units: Sequence[str],
        parts: Mapping[Place, Mapping[int, bool]],
        own_tokens: bool,
    ):
        self.typed, self.plan, self.spreads, self.units, self.parts = typed, plan, spreads, units, parts
        self.doubts: dict[Place, tuple[int, ...]] = {}
        # Values without a gradient that are computed from values that have one; and those of them that are a rank's own (the largest of a
        # slice), or a partial sum, each with the operation that made it.
        self.detached, self.apart, self.own = set[int](), set[int](), dict[int, Event]()
        # Booleans and integers that are computed from values that have a gradient, and numbers from these; and those of them that are a rank's
        # own, though they may seem whole, each with the operation that made the first.
        self.own_tokens, self.told, self.chosen = own_tokens, set[int](), dict[int, Event]()

    def op(self, event: Event) -> None:
        """A torch call, or a whole look-up or matrix multiplication."""
        self.typed.operations += 1
        for number in event.inputs:
            if number in self.typed.run.parameters and not self._readable(number, event.module):
                self.typed.find("outside", event, self.typed.run.parameters[number], (number,), once=True)
        sources = self.typed.sources(event.inputs)
        unfilled = event.writes or event.kind == "read" or any(self.typed.type_of(i).kind == "?" for i in event.inputs)
        for index, output in enumerate(event.outputs):
            if output in event.inputs or output in self.typed.types:
                continue
            self.typed.makers[output] = event.module
            if not self.typed.doubtful.isdisjoint(event.inputs):
                self.typed.doubtful.add(output)
            spread = self.spreads.of(event, index)
            if not self.typed.run.requires_grad[output]:
                later = Type("?") if spread == "?" and self.typed.run.values[output].is_floating_point() else FREE
                self.typed.types[output] = Type(KINDS[spread.kind], spread) if isinstance(spread, Spread) else later
                self._note_detached(event, spread, output)
                self._agreed(event, spread, output)
            elif spread == "?" or (spread is None and unfilled):
                self.typed.types[output] = Type("?", sources=frozenset(sources))
            elif spread is None:
                self._mismatch(event, sources, output)
            elif (
                spread.kind == "whole"
                and is_mean(self.plan, event.module, event.name)
                and all(self.typed.type_of(n).kind == "V" for n in sources)
            ):  # over split features, which the ranks add up: P -> R
                self.typed.types[output] = Type("R")
            else:
                self.typed.types[output] = self.combine(event, sources, spread, output)

    def read(self, event: Event) -> None:
        """A tensor that appears for the first time, or was changed in place."""
        if not event.inputs and self.typed.run.requires_grad[event.outputs[0]]:
            spread = self.spreads.of(event, 0)
            self.typed.find("untyped", event, event.module, event.outputs)
            self.typed.types[event.outputs[0]] = Type("I", spread if isinstance(spread, Spread) else WHOLE)
            return
        self.op(event)

    def _readable(self, number: int, reader: str) -> bool:
        """Whether the code of module `reader` gets a parameter as a local tensor. It does in the parameter's owner and
        in all modules inside the owner. It does in the owner's whole block if the gradient is partial (R), as the
        block sums it. It does in modules around the owner, unless an FSDP unit inside the reader has the parameter."""
        owner = self.typed.makers.get(number, "")
        running = (reader, *ancestors(reader)) if reader else ("",)
        if owner in running:
            return True
        if self.typed.type_of(number).kind == "R" and block(owner) in running:
            return True
        apart = any(below(unit, reader) and (owner == unit or below(owner, unit)) for unit in self.units)
        return below(owner, reader) and not apart

    def combine(self, event: Event, sources: list[int], spread: Spread, output: int) -> Type:
        """The type of a value with a gradient, by the table above.

        Args:
            sources: the differentiable values that it is computed from.
            spread: how it is spread.
        """
        kinds = {number: self._kind(number, spread) for number in sources}
        tails = [n for n, kind in kinds.items() if kind == "tail"]
        if tails:
            return self._untangle(event, tails[0], spread, output)
        if spread.empty and not self.typed.run.values[output].numel():
            return Type("whole", spread)
        acting = self._acting(event, spread, self.chosen)
        if acting and (not spread.empty or spread.kind != "whole"):
            return self._hidden(event, acting, output)
        if spread.kind != "whole":
            for number, kind in kinds.items():
                if kind == "I":
                    self._found_partial(event, number)
            return Type(KINDS[spread.kind], spread)
        if spread.empty and (acting or (acting is None and "P" in kinds.values())):
            return Type("P", SUM)
        if spread.empty and acting is None and "V" in kinds.values():
            return FREE
        complete = [n for n, kind in kinds.items() if kind == "I"]
        partial = [n for n, kind in kinds.items() if kind == "R"]
        if complete and partial:
            return self._meeting(event, complete, partial, output)
        return Type("I") if complete else Type("R") if partial else FREE

    def _kind(self, number: int, spread: Spread) -> TypeKind:
        """The kind of an operand's type. A slice that all ranks have (one key-value head for split queries) counts as
        R if the result is whole."""
        found = self.typed.type_of(number)
        on_all = found.kind == "V" and spread.kind == "whole" and found.spread.copies == len(self.spreads.runs)
        return "R" if on_all else found.kind

    def _acting(self, event: Event, spread: Spread, apart: Collection[int] = ()) -> list[int] | None:
        """The operands that a result hides: partial sums and slices in one that seems whole, partial sums in one that seems
        split, those of `apart`, and partial sums in one that seems a sum of what an operation makes of them, but not of larger ones. Only a tolerance, a
        closed gate or small numbers make it seem so. None if it is unknown which operands contribute."""
        if event.kind != "op":
            return None
        hiding = {"whole": ("P", "V"), "split": ("P",), "sum": () if event.name in ADDING_UP else ("P",)}[spread.kind]
        found = {
            ~position if spread.kind == "sum" and number not in apart else position: number
            for position, number in enumerate(event.inputs)
            if number in apart
            or (
                (kind := self._kind(number, spread)) in hiding
                and (self.typed.run.requires_grad[number] or kind == "P")
                and self.typed.run.values[number].is_floating_point()
            )
        }
        known = self.parts.get(event.place, {})
        unknown = tuple(position for position in found if position not in known)
        if unknown:
            self.doubts[event.place] = tuple(found)
            return None
        return [number for position, number in found.items() if known[position]]

    def _note_detached(self, event: Event, spread: Spread | str | None, output: int) -> None:
        run = self.typed.run
        read = event.inputs[:1] if event.name in CONVERSIONS else event.inputs
        sources = (i for i in read if run.requires_grad[i] or i in self.detached)
        if run.values[output].is_floating_point() and any(run.values[i].is_floating_point() for i in sources):
            self.detached.add(output)
            if spread is None:
                self.apart.add(output)
            if spread is None or (isinstance(spread, Spread) and spread.kind == "sum"):
                self.own[output] = event

    def asked(self, decides: Callable[[int, Place | None], bool]) -> None:
        """Note the numbers and conditions that code asks for where a rank has its own one, and computes or decides with: to show it would be
        right.

        Args:
            decides: whether one of `Trace.answers` changes what the model returns, and the operation that made it of booleans or integers.
        """
        for place, number in enumerate(self.typed.run.answers):
            event = self.own.get(number) or self.chosen.get(number) or self._maker_of_own(number)
            if event is None or number in self.typed.doubtful:
                continue
            if decides(place, self.spreads.place(event) if number in self.chosen else None):
                self._hidden(event, [number], number)

    def choose(self, wrong: Sequence[Choice]) -> None:
        """Note what joins the choices of a rank's slice, where other choices make the run wrong."""
        for choice in wrong:
            self._hidden(choice.teller, [choice.operand], choice.operand)

    def _maker_of_own(self, number: int) -> Event | None:
        """The operation that made a split value of which code asks for all elements (`tolist()`, `torch.equal`); None for others."""
        run = self.typed.run
        if self.own_tokens or number < 0 or not (run.requires_grad[number] or number in self.detached | self.told):
            return None
        return run.producers.get(number) if self._is_own(self.typed.type_of(number)) else None

    def _agreed(self, event: Event, spread: Spread | str | None, output: int) -> None:
        """Note a comparison or a bound that a partial sum or a rank's own value decides: ranks agree on its result only by chance. Counts of a
        rank's own tokens do not matter."""
        run, choices = self.typed.run, self._choices(event)
        decides = run.values[output].dtype == torch.bool or output in self.detached
        if isinstance(spread, Spread) and spread.kind == "whole" and (decides or choices):
            acting = self._acting(event, spread, self.apart | choices) or ()
            summed = (i for i in acting if self.typed.type_of(i).kind == "P")
            own = self.apart.intersection(acting) or any(run.requires_grad[i] or i in self.detached for i in summed)
            if decides and own:
                self._hidden(event, [*acting], output)
                return
            choices = choices.intersection(acting)
        if spread == "?" or (isinstance(spread, Spread) and spread.kind == "split"):
            choices = choices.intersection(self.chosen)  # each rank's are its part of the unsharded model's
        if output in self.detached:  # these are in `own`
            choices = choices.intersection(self.told)
        if choices:
            self.chosen[output] = next((self.chosen[i] for i in choices if i in self.chosen), event)

    def _choices(self, event: Event) -> set[int]:
        """The operands of which a boolean or an integer of this rank alone may be made: split values with a gradient, and what was
        chosen by them. Nothing where ranks have tokens of their own, of which each may choose otherwise."""
        if self.own_tokens or event.kind != "op":
            return set()
        run = self.typed.run
        told = [i for i in event.inputs if run.requires_grad[i] or i in self.detached or i in self.told]
        if told:
            self.told.update(o for o in event.outputs if not run.requires_grad[o] and o not in self.detached)
        return {i for i in told if i in self.chosen or i in self.own or self._is_own(self.typed.type_of(i))}

    def _is_own(self, found: Type) -> bool:
        return found.kind == "P" or (found.kind == "V" and found.spread.copies < len(self.spreads.runs))

    def _hidden(self, event: Event, acting: list[int], output: int) -> Type:
        partial = any(self.typed.type_of(number).kind == "P" for number in acting)
        self.typed.find("sum" if partial else "slices", event, event.module, event.inputs)
        self.typed.doubtful.add(output)
        return Type("P", SUM) if partial else FREE

    def _meeting(self, event: Event, complete: list[int], partial: list[int], output: int) -> Type:
        """A whole result has operands with complete gradients and operands with partial ones. If all of one kind are parameters, these are wrong."""
        if all(n in self.typed.run.parameters for n in complete):
            for number in complete:
                self._found_partial(event, number)
            return Type("R")
        if all(n in self.typed.run.parameters for n in partial):
            for number in partial:
                self.typed.find("complete", event, self.typed.run.parameters[number], event.inputs, once=True)
            return Type("I")
        self.typed.find("meeting", event, event.module, event.inputs)
        self.typed.doubtful.add(output)
        return Type("R")

    def _found_partial(self, event: Event, number: int) -> None:
        others = tuple(i for i in event.inputs if i != number)
        subjects = {one: self.typed.run.parameters[one] for one in self.typed.provenance.parameters(number)}
        for one, subject in (subjects or {number: self.typed.makers.get(number, event.module)}).items():
            self.typed.find("partial", event, subject, (one, *others), once=True)

    def _untangle(self, event: Event, tangled: int, spread: Spread, output: int) -> Type:
        """The type of a result that takes all, the first or the last features of a value whose last features are R."""
        whole, tail = self.typed.run.values[tangled], self.typed.type_of(tangled).tail
        value = self.typed.run.values[output]
        head, rest = whole[..., :-tail], whole[..., -tail:]
        if value.shape == rest.shape and torch.equal(value, rest):
            return Type("R")
        if value.shape == head.shape and torch.equal(value, head):
            return Type("I")
        if value.shape[-1:] == whole.shape[-1:] and spread.kind == "whole":
            return Type("tail", tail=tail)
        self.typed.find("untyped", event, event.module, event.inputs)
        return Type("I")

    def _mismatch(self, event: Event, sources: list[int], output: int) -> None:
        if output not in self.typed.used:  # e.g. weights of attention that the caller drops
            self.typed.types[output] = FREE
            return
        split = [n for n in sources if self.typed.type_of(n).kind == "V"]
        if not event.module and split:  # the model's last operation on its logits, before callers get them
            actual = self.typed.type_of(split[0]).describe(self.typed.run.values[split[0]].ndim)
            self.typed.find("output", event, "logits", split[:1], actual=actual, wanted="I")
            self.typed.doubtful.add(output)
            self.typed.types[output] = FREE
            return
        self.typed.types[output] = self._hidden(event, sources, output)
