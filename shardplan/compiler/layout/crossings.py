"""The inputs and outputs of each module, compared with its boundary in the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from shardplan.core.layout import SEQ, I, Layout, P, R, V, in_one_row
from shardplan.core.module_program import ArgumentSlice
from shardplan.model.forward_code import argument_names
from shardplan.model.reduced.trace import Event
from shardplan.styles.bound import BoundModule
from shardplan.styles.boundary import InputBoundary, OutputBoundary
from shardplan.styles.convolutions import CHANNELS

from .finding import AS_BEFORE
from .operation_types import Operations
from .spread import Spread
from .spreads import Spreads
from .typed_modules import outside_in
from .typed_run import TypedRun
from .types import Type, declared, read_order, rows_order, same_order, shared_order


class Crossings:
    """Types the values that cross the boundaries of modules.

    Args:
        typed: the types of the values so far; the types of moved values, and findings, are added.
        operations: types a value that is first compared when it reaches a boundary.
        model: the unsharded model.
        plan: each module and its boundary.
        spreads: how values are spread, from the run of every rank.
        gathers: the output layouts of modules whose gradient is unresolved; R by default.
        results: the layouts that the model's differentiable results may have; values that are read outside of blocks get the first.

    Attributes:
        incoming, entering, reduced: as in `Proof`.
        running: the modules whose forwards run, outermost first.
    """

    def __init__(
        self,
        typed: TypedRun,
        operations: Operations,
        model: nn.Module,
        plan: Mapping[str, BoundModule],
        spreads: Spreads,
        gathers: Mapping[str, Layout],
        results: Sequence[Layout] = (I,),
    ):
        self.typed, self.operations, self.model = typed, operations, model
        self.plan, self.spreads, self.gathers, self.results = plan, spreads, gathers, results
        self.incoming: dict[str, Layout] = {}
        self.running: list[str] = []
        self.arguments: dict[str, tuple[int, ...]] = {}  # module -> the shape of its last moved argument
        self.entering: list[tuple[int, str]] = []
        self.reduced: list[tuple[int, str]] = []
        self.waiting: Counter[str] = Counter()  # embedding -> its partial sums that no block input has taken yet
        self.taken_unseen = False  # a block input that gathers its output took some

    def enter(self, event: Event) -> None:
        """A module is called: its inputs must have layouts that its boundary accepts."""
        self.running.append(event.module)
        bound, module = self.plan[event.module], self.model.get_submodule(event.module)
        if bound.style is not None and bound.style.as_input:
            self._follow_input(event, bound)
        for one in bound.boundary.inputs:
            for position, name in enumerate(event.names):
                if one.argument == "*":
                    chosen = self.typed.run.values[event.inputs[position]].is_floating_point()
                else:
                    chosen = name == (one.argument or argument_names(module)[0])
                if chosen:
                    self._check_input(event, bound, one, position)
        for part in bound.slices:
            if part.argument in event.names:
                self._check_slice(event, bound, part, event.names.index(part.argument))

    def _follow_input(self, event: Event, bound: BoundModule) -> None:
        """The gradients of the module's parameters follow from its first floating-point argument: complete if it is
        I, partial sums if it is R or a slice. Tokens that are sent to the ranks of their experts must not be R."""
        values = self.typed.run.values
        position = next((i for i, n in enumerate(event.inputs) if values[n].is_floating_point()), None)
        if position is None:
            return
        number = event.inputs[position]
        actual, ndim = self._resolved(event, number, position), values[number].ndim
        exchanged = bound.style is not None and bound.style.exchanges
        slices = actual.kind == "V" and actual.spread.dim in range(ndim - 1)
        if exchanged and not slices and actual.kind not in ("I", "whole", "?"):
            wanted = "I or V(0)"
            self.typed.find("arrival", event, bound.name, (number,), actual=actual.describe(ndim), wanted=wanted)
        layout = V(0) if actual.kind == "V" else R if actual.kind == "R" else I
        before = self.incoming.setdefault(bound.name, layout)
        if before != layout:
            wanted = f"{before}{AS_BEFORE}"
            self.typed.find("arrival", event, bound.name, (number,), actual=actual.describe(ndim), wanted=wanted)
        for parameter, name in self.typed.run.parameters.items():
            if name.rpartition(".")[0] == bound.name:
                self.typed.types[parameter] = Type("I" if layout == I else "R")

    def _check_input(self, event: Event, bound: BoundModule, one: InputBoundary, position: int) -> None:
        number, inside = event.inputs[position], event.outputs[position]
        if inside != number and inside not in self.typed.provenance.read:
            return
        ndim = self.typed.run.values[number].ndim
        actual = self._resolved(event, number, position)
        in_row = in_place(bound) and tokens_in_one_row(actual, ndim)
        if not in_row and not any(self._fits(actual, layout, ndim, bound) for layout in one.sources):
            wanted = " or ".join(str(layout) for layout in one.sources)
            self.typed.find("arrival", event, bound.name, (number,), actual=actual.describe(ndim), wanted=wanted)
        if bound.link == "block_input":
            self._check_sum(event, bound, number, actual)
        if actual.kind == "I" and one.destination == R:
            self.entering.append((number, bound.name))
        if I in one.sources and R in one.sources and actual.kind in ("I", "R"):
            before = self.incoming.setdefault(bound.name, I if actual.kind == "I" else R)
            if before.kind != actual.kind:
                self.typed.find(
                    "arrival", event, bound.name, (number,), actual=actual.kind, wanted=f"{before}{AS_BEFORE}"
                )
        # The layout that a block input splits. For one that gathers its output, `incoming` has the layout of the output.
        if P in one.sources and I in one.sources and not (bound.boundary.output and bound.boundary.output.gathers):
            self.incoming.setdefault(bound.name, P if actual.kind == "P" else I)
        if one == bound.boundary.inputs[0]:
            self.arguments[bound.name] = tuple(self.typed.run.values[inside].shape)
        self.typed.makers.setdefault(inside, bound.name)
        if (inside != number or inside not in self.typed.types) and not in_row:
            self.typed.types[inside] = declared(one.destination, self.typed.run.values[inside].ndim)

    def _check_sum(self, event: Event, bound: BoundModule, number: int, actual: Type) -> None:
        """A block input may split a partial sum of embeddings only if one waits for it; it takes one look-up of each
        table (runtime/parallel/regime.py). A whole value may arrive while sums wait if `incoming` shows the block
        input that takes them. It does not show one that gathers its output: its entry is the layout of the output."""
        gathers = bound.boundary.output is not None and bound.boundary.output.gathers
        waits, wanted = self.waiting.total() > 0, None
        if actual.kind == "P":
            wanted = None if waits else I
            self.waiting = +(self.waiting - Counter(dict.fromkeys(self.waiting, 1)))
            self.taken_unseen = self.taken_unseen or gathers
        elif actual.kind == "I" and waits and self.taken_unseen:
            wanted = P
        if wanted is not None:
            described = actual.describe(self.typed.run.values[number].ndim)
            self.typed.find("arrival", event, bound.name, (number,), actual=described, wanted=str(wanted))

    def _check_slice(self, event: Event, bound: BoundModule, part: ArgumentSlice, position: int) -> None:
        """An argument that ranks read by share must be whole on every rank, and must not have a complete gradient."""
        number, inside = event.inputs[position], event.outputs[position]
        if inside != number and inside not in self.typed.provenance.read:
            return
        value = self.typed.run.values[number]
        actual = self._resolved(event, number, position)
        if not self._fits(actual, R, value.ndim, bound):
            self.typed.find("arrival", event, bound.name, (number,), actual=actual.describe(value.ndim), wanted="R")
        ranks = len(self.spreads.runs)
        times, heads = part.rows(value.shape, ranks)
        order = rows_order(times, heads, ranks) if times > 1 else None
        self.typed.makers.setdefault(inside, bound.name)
        self.typed.types[inside] = Type("V", Spread("split", part.dim, order))

    def _resolved(self, event: Event, number: int, position: int) -> Type:
        """The type of a value at a boundary. A value that was not compared yet is compared here."""
        found = self.typed.type_of(number)
        if found.kind != "?":
            return found
        spread = self.spreads.of(event, position, inputs=True)
        if not isinstance(spread, Spread):
            self.typed.find("untyped", event, event.module, (number,))
            self.typed.doubtful.add(number)
            return found
        resolved = self.operations.combine(event, self.typed.sources([number]), spread, number)
        self.typed.types[number] = resolved
        return resolved

    def _fits(self, found: Type, layout: Layout, ndim: int, bound: BoundModule | None) -> bool:
        if found.spread.empty or found.kind == "?":
            return True
        if found.kind == "whole":
            return layout.kind in "IR" and found.spread.kind == "whole"
        if found.kind != layout.kind:
            return False
        if found.kind != "V":
            return True
        if found.spread.joined or found.spread.dim != layout.split_dim(ndim):
            return False
        ranks = len(self.spreads.runs)
        if layout.copies > 1:
            return found.spread.order == shared_order(found.spread, layout.copies, ranks)
        expected = self._expected_order(bound) if bound is not None and layout.dim in (-1, CHANNELS.dim) else None
        return same_order(found.spread.order, expected, ranks)

    def _expected_order(self, bound: BoundModule) -> tuple[tuple[int, ...], ...] | None:
        """How the split input features of a module's weight, or a convolution's channels, are ordered on the ranks."""
        weight = next((p for p in bound.parameters if p.name.rpartition(".")[2] == "weight"), None)
        return read_order(weight, sum(weight.parts), len(self.spreads.runs)) if weight is not None else None

    def leave(self, event: Event) -> None:
        """A module returns: its results get the types of its boundary's destinations."""
        bound = self.plan[event.module]
        output = bound.boundary.output
        for position, number in enumerate(event.inputs):
            if self.typed.run.requires_grad[number]:
                self._resolved(event, number, position)
        if output is not None and output.moves and event.inputs:
            self._type_output(event, bound, output)
        if bound.tail and event.outputs:
            self.typed.types[event.outputs[0]] = Type("tail", tail=bound.tail)
        for position in outside_in(bound, event.names):
            self._type_outside_reads(event, position)
        if not event.module:
            self._check_results(event)
        self.running.pop()

    def _type_output(self, event: Event, bound: BoundModule, output: OutputBoundary) -> None:
        number, moved, destination = event.inputs[0], event.outputs[0], output.destination
        computed, ndim = self.typed.type_of(number), self.typed.run.values[number].ndim
        in_row = in_place(bound) and tokens_in_one_row(computed, ndim)
        if not in_row and not self._fits(computed, output.source, ndim, None):
            wanted = str(output.source)
            self.typed.find("result", event, bound.name, (number,), actual=computed.describe(ndim), wanted=wanted)
        if output.unresolved_gradient:
            destination = self.incoming[bound.name] = self.gathers.get(bound.name, R)
        if bound.scope in self.running:
            destination = P
            self.waiting[bound.name] += 1
        if output.source == P and destination.kind in "IV" and not bound.vocabulary:
            self.reduced.append((moved, bound.name))
        if moved != number:
            row = in_one_row(self.arguments.get(bound.name), self.typed.run.values[number].shape, destination)
            ranks = len(self.spreads.runs)
            if row is not None:
                self.typed.types[moved] = Type("V", Spread("split", 0, rows_order(*row, ranks)))
            else:
                self.typed.types[moved] = declared(destination, self.typed.run.values[moved].ndim)
            self.typed.makers[moved] = bound.name

    def _type_outside_reads(self, event: Event, position: int) -> None:
        """Type a result that is read outside of its block. It must be spread as the module's tokens are; slices are gathered."""
        found = self.typed.type_of(event.inputs[position])
        style, ndim = self.plan[event.module].style, self.typed.run.values[event.inputs[position]].ndim
        bound = self.plan[event.module]
        layout = bound.boundary.output.source if bound.boundary.output is not None and in_place(bound) else R
        wanted = self.incoming.get(event.module, R) if style is not None and style.as_input else layout
        fits = found.kind in (wanted.kind, "whole")
        if found.kind == "V":
            fits = fits and found.spread.dim in range(min(2, ndim - 1)) and found.spread.copies == 1
        if not fits:
            number, actual = event.inputs[position : position + 1], found.describe(ndim)
            self.typed.find("result", event, event.module, number, actual=actual, wanted=str(wanted))
        self.typed.types[event.outputs[position]] = Type(self.results[0].kind)
        self.typed.makers[event.outputs[position]] = event.module

    def _check_results(self, event: Event) -> None:
        """Check the model's results. Callers expect each whole on every rank with a complete gradient over tp, or as a rank's own tokens."""
        for name, number in zip(event.names, event.outputs, strict=True):
            found = self.typed.type_of(number)
            ndim = self.typed.run.values[number].ndim
            fits = found.kind in (self.results[0].kind, "whole", "?") or any(
                layout.kind == "V" and self._fits(found, layout, ndim, None) for layout in self.results
            )
            if self.typed.run.requires_grad[number] and not fits:
                wanted = " or ".join(map(str, self.results))
                self.typed.find("output", event, name, (number,), actual=found.describe(ndim), wanted=wanted)


def in_place(bound: BoundModule) -> bool:
    """Whether a module works on slices of the sequence as they are, and returns slices."""
    style, output = bound.style, bound.boundary.output
    on_slices = style is not None and style.input_destination == style.output_source == V(SEQ)
    return on_slices and output is not None and output.destination == output.source


def tokens_in_one_row(found: Type, ndim: int) -> bool:
    """Whether a rank has slices of the tokens that the code joined into one row: [batch * sequence, hidden]."""
    return found.kind == "V" and ndim == 2 and found.spread.dim == 0 and found.spread.copies == 1
