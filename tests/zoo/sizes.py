"""How much the values of a reduced model's run are in the model itself."""

from __future__ import annotations

import math
from functools import cache, cached_property

import torch

from shardplan.compiler.layout import RecordedModel
from shardplan.compiler.layout.solver.flow import Flow, Product
from shardplan.core.tree import ModuleTree
from shardplan.model.reduced.trace import Event
from shardplan.styles import feature_dim
from shardplan.styles.style_record import Features


def tokens(recorded: RecordedModel) -> int:
    """The number of positions in the inputs of a run."""
    return next(value.numel() for value in recorded.inputs.values() if isinstance(value, torch.Tensor))


class Sizes:
    """Sizes of the model's own.

    The last dim of a value is as much larger in the model as the features of the matrix that makes it or reads it, the norm
    that is applied to it, or the number of the config that it is equal to.

    Args:
        flow: the run of the reduced model.
        tree: the model's own.
        tokens: of the run.
    """

    def __init__(self, flow: Flow, tree: ModuleTree, tokens: int):
        self.flow, self.tree, self.tokens = flow, tree, tokens
        self.value = cache(self._value)
        self._ratio, self._sure = cache(self._found), cache(self._known)

    def parameter(self, name: str) -> int:
        """The elements of a parameter."""
        return math.prod(self._shape(name) or ())

    def _value(self, number: int) -> float:
        """The elements of a value for each token."""
        return round(self.flow.run.values[number].numel() / self.tokens * self._ratio(number), 3)

    def _found(self, number: int) -> float:
        """How much longer the last dim of a value is."""
        value = self.flow.run.values[number]
        if value.ndim == 0 or value.shape[-1] <= 1:
            return 1.0
        return self._sure(number) or self._likely(number)

    def _known(self, number: int) -> float | None:
        """The same, where a parameter says it, also of what is made of the value."""
        value = self.flow.run.values[number]
        made = self.flow.products.get(number)
        if made is not None and (ratio := self._features(made, "out", value.shape[-1])) is not None:
            return ratio
        readers = self.flow.readers.get(number, ())
        products = {p for e in readers for n in e.outputs if (p := self.flow.products.get(n)) is not None}
        for product in products:
            if number in product.inputs and (ratio := self._features(product, "in", value.shape[-1])) is not None:
                return ratio
        producer = self.flow.run.producers.get(number)
        operands = [n for e in (*readers, *((producer,) if producer else ())) for n in e.inputs]
        for name in (self.flow.run.parameters[n] for n in operands if n in self.flow.run.parameters):
            small = self.flow.tree.parameters[name][1].shape
            if small == (value.shape[-1],) and (own := self._shape(name)) is not None:
                return own[0] / small[0]
        made_of = (n for e in readers for n in e.outputs if n > number)
        return next((r for n in made_of if self._is_like(n, value) and (r := self._sure(n)) is not None), None)

    def _is_like(self, number: int, value: torch.Tensor) -> bool:
        return self.flow.run.values[number].shape == value.shape and self.flow.run.requires_grad[number]

    def _likely(self, number: int) -> float:
        value = self.flow.run.values[number]
        producer = self.flow.run.producers.get(number)
        if producer is not None and (ratio := self._rest(number, producer)) is not None:
            return ratio
        numbers = self.tree.numbers
        equal = (n for n, v in self.flow.tree.numbers.items() if v == value.shape[-1] and "." not in n)
        said = {numbers[n] / value.shape[-1] for n in equal if n in numbers}
        if len(said) == 1:
            return said.pop()
        read = () if producer is None else (n for n in producer.inputs if self.flow.run.requires_grad[n])
        return max((self._ratio(n) for n in read if n not in self.flow.run.parameters and n < number), default=1.0)

    def _rest(self, number: int, event: Event) -> float | None:
        """For the one piece of a value whose other pieces are known."""
        lengths = [self.flow.run.values[n].shape[-1] for n in event.outputs]
        whole = next((n for n in event.inputs if self.flow.run.values[n].shape[-1:] == (sum(lengths),)), None)
        others = [n for n in event.outputs if n != number]
        if whole is None or not others or any(self._sure(n) is None for n in others):
            return None
        known = sum(self._sure(n) * self.flow.run.values[n].shape[-1] for n in others)
        return (self._ratio(whole) * sum(lengths) - known) / self.flow.run.values[number].shape[-1]

    def _features(self, product: Product, features: Features, length: int) -> float | None:
        """How much longer a dim of a matrix is in the model; None where the value's is not that dim."""
        name = product.name if product.name in self.flow.tree.parameters else f"{product.name}.weight"
        if name not in self.flow.tree.parameters or (own := self._shape(name)) is None:
            return None
        owner, parameter = self.flow.tree.parameters[name]
        turned = product.turned and owner.kind == "other"
        side = {"out": "in", "in": "out"}[features] if turned else features
        dim = feature_dim(owner.kind, parameter.name, side, len(own))
        return own[dim] / parameter.shape[dim] if dim is not None and parameter.shape[dim] == length else None

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """Of a parameter of the model: of that name, or of another layer, as the reduced model has fewer."""
        if name in self.tree.parameters:
            return self.tree.parameters[name][1].shape
        return self._by_pattern.get(self.flow.tree.pattern(name))

    @cached_property
    def _by_pattern(self) -> dict[str, tuple[int, ...]]:
        return {self.tree.pattern(name): parameter.shape for name, (_, parameter) in self.tree.parameters.items()}
