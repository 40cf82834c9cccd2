"""How the matrix multiplications of a run feed each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardplan.core.tree import ModuleTree, parent
from shardplan.model.reduced.trace import Event, Trace

MATMULS = frozenset(
    "linear matmul mm bmm baddbmm addmm einsum __matmul__ __rmatmul__ conv1d grouped_mm _grouped_mm".split()
)
LOOK_UPS = frozenset(("embedding", "Embedding"))
TURNS = frozenset(("t", "transpose", "swapaxes", "permute", "T.__get__", "mT.__get__", "__get__"))


@dataclass(frozen=True, slots=True)
class Product:
    """A multiplication by one of the model's matrices, or a look-up in one.

    Args:
        name: the name of a module that does nothing else (nn.Linear), or of the parameter by which code multiplies.
        module: the module whose code multiplies.
        inputs: the values that it reads, without its own parameters.
        outputs: its results.
        turned: the parameter is stored [in, out]; nn.Linear's is [out, in].
        left: the parameter is the first factor, and so mixes positions.
    """

    name: str
    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    turned: bool = False
    left: bool = False


class Flow:
    """Follows values through an unsharded run.

    Args:
        run: the run.
        tree: the model's tree.
    """

    def __init__(self, run: Trace, tree: ModuleTree):
        self.run, self.tree = run, tree

    @cached_property
    def products(self) -> Mapping[int, Product]:
        """Value -> the multiplication that returns it."""
        found: dict[int, Product] = {}
        for event in self.run.events:
            product = self._product(event)
            if product is not None:
                found.update(dict.fromkeys(product.outputs, product))
        return found

    def product(self, pattern: str) -> Product:
        """The first multiplication by a matrix of a pattern."""
        return next(one for one in self.products.values() if self.tree.pattern(one.name) == pattern)

    @cached_property
    def readers(self) -> Mapping[int, Sequence[Event]]:
        """Value -> the operations that read it."""
        return {number: [e for e in events if e.kind == "op"] for number, events in self.run.readers.items()}

    def _product(self, event: Event) -> Product | None:
        if event.kind != "op" or self.depthwise(event) is not None:
            return None
        if event.place[2] == "atom":
            own = [i for i in event.inputs if i in self.run.parameters]
            given = tuple(i for i in event.inputs if i not in own)
            return Product(event.module, parent(event.module), given, event.outputs)
        if event.name not in MATMULS or (event.name == "einsum" and not self._contracts(event)):
            return None
        matrices = {i: found for i in event.inputs if (found := self._matrix(i)) is not None}
        if len(matrices) != 1:
            return None
        given = tuple(i for i in event.inputs if i not in matrices and self.run.requires_grad[i])
        name, turns = next(iter(matrices.values()))
        left = event.name in ("matmul", "mm", "bmm", "__matmul__") and event.inputs[0] in matrices
        turned = (event.name == "linear") == (turns % 2 == 1)
        return Product(name, event.module, given, event.outputs, turned=turned, left=left)

    def _contracts(self, event: Event) -> bool:
        """Whether an einsum sums over a dim of its operands; else it multiplies element-wise, for example by decays of each channel."""
        out = Counter(self.run.values[event.outputs[0]].shape)
        return any(Counter(self.run.values[number].shape) - out for number in event.inputs)

    def depthwise(self, event: Event) -> str | None:
        """The module whose channels an operation convolves separately: this mixes no features, and is not a product."""
        if event.kind != "op" or not event.name.startswith("conv"):
            return None
        found = (self._matrix(i) for i in event.inputs)
        owners = (self.tree.parameters[one[0]][0] for one in found if one is not None)
        return next((owner.name for owner in owners if owner.kind == "depthwise"), None)

    def _matrix(self, number: int) -> tuple[str, int] | None:
        """The parameter with two or more dims that a value is or is cut from, and the number of transpositions."""
        turns = 0
        while number not in self.run.parameters:
            event = self.run.producers.get(number)
            if event is None or event.kind not in ("op", "read") or event.name in LOOK_UPS or event.place[2] == "atom":
                return None
            sources = [i for i in event.inputs if self.run.requires_grad[i]]
            if len(sources) != 1:
                return None
            number = sources[0]
            turns += event.name in TURNS
        return (self.run.parameters[number], turns) if self.run.values[number].ndim > 1 else None

    def entries(self, pattern: str) -> list[Event]:
        """The calls of the modules of a pattern, in order."""
        return [e for e in self.run.events if e.kind == "enter" and self.tree.pattern(e.module) == pattern]

    def last_norm(self, module: str) -> str | None:
        """The name of the norm below a module whose result the module returns in its first call."""
        event = next((e for e in self.run.events if e.kind == "leave" and e.module == module), None)
        made = self.run.producers.get(event.inputs[0]) if event is not None and event.inputs else None
        norm = None if made is None else self.tree.modules[made.module]
        below = norm is not None and norm.kind == "norm" and norm.name.startswith(f"{module}.")
        return norm.name if norm is not None and below else None

    def alike(self, pattern: str) -> tuple[str, ...]:
        """The further arguments of a pattern's modules that are the same tensor as the first in each call (keys and values of
        self-attention)."""
        events = self.entries(pattern)
        calls = [dict(zip(e.names, e.inputs, strict=True)) for e in events]
        names = {
            n for e in events for n in e.names[1:] if all(c.get(n) == c[e.names[0]] for c in calls if e.names[0] in c)
        }
        return tuple(name for e in events[:1] for name in e.names[1:] if name in names)

    def feeding(self, product: Product) -> tuple[frozenset[Product], bool]:
        """The multiplications from which a product's operands come, with only other operations in between; and whether these are
        the operands' only origins, apart from the model's inputs."""
        found: set[Product] = set()
        complete = True
        given = (number for number in product.inputs if self.run.requires_grad[number])
        for number, event in self.run.back(given, lambda number, event: number in self.products):
            if number in self.products:
                found.add(self.products[number])
            elif event is None and number not in self.run.parameters:
                complete = False
        return frozenset(found), complete
