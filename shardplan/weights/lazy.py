"""Tensors that are described before they are read: operations on them are recorded, and run slice by slice.

A `Lazy` is a tensor for code that moves weights (transformers' conversions stack, concatenate, split, transpose and
reshape them). It has a shape and a dtype but no values. `read` fills a tensor with a box of it, and asks the leaves only
for what that box needs. Operations that only rearrange are read in slices; a reshape is read in slices of the dims that
it leaves alone. Any other operation reads its whole arguments, one call at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

Box = tuple[tuple[int, int], ...]  # [start, stop) per dim


class Lazy(Tensor):
    """A tensor on the meta device that knows how to compute its values."""

    expression: Expression
    meta: Tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's types do not have it as a method
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*_changed(args, _meta), **_changed(kwargs, _meta))
        rule = _RULES.get(str(func))
        if rule is not None:
            made = rule(result, *args, **kwargs)
        elif isinstance(result, Tensor):
            made = computed(func, args, kwargs)
        else:
            raise NotImplementedError(f"{func} is not supported on a tensor that is not read yet")
        if isinstance(result, Tensor):
            return lazy(result, made)
        return [lazy(one, expression) for one, expression in zip(result, made, strict=True)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _made_again, (tuple(self.shape), self.dtype, self.expression)


def lazy(meta: Tensor, expression: Expression) -> Lazy:
    """A lazy tensor with the shape and the dtype of `meta`."""
    assert meta.is_meta
    made = meta.as_subclass(Lazy)
    made.meta, made.expression = meta, expression
    return made


def _made_again(shape: tuple[int, ...], dtype: torch.dtype, expression: Expression) -> Lazy:
    return lazy(torch.empty(shape, dtype=dtype, device="meta"), expression)


def leaf(key: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[Box], Tensor]) -> Lazy:
    """A lazy tensor with known values: `read` gives a box of them."""
    return lazy(torch.empty(tuple(shape), dtype=dtype, device="meta"), Leaf(key, read))


def read(tensor: Lazy, out: Tensor, box: Box | None = None) -> None:
    """Fill `out` with a box of the tensor, or with all of it. `out` has the shape of the box, any dtype, and any device."""
    box = box if box is not None else tuple((0, size) for size in tensor.shape)
    if out.numel():
        tensor.expression.read(out, box)


def expressions(tensor: Lazy) -> Iterator[Expression]:
    """All expressions that make a tensor."""
    waiting = [tensor.expression]
    while waiting:
        expression = waiting.pop()
        yield expression
        waiting += expression.parts


def leaves(tensor: Lazy) -> dict[str, Leaf]:
    """The leaves that a tensor is made of, by key."""
    return {one.key: one for one in expressions(tensor) if isinstance(one, Leaf)}


def in_slices(tensor: Lazy) -> bool:
    """Whether every box of the tensor can be read from boxes of the leaves that are no larger."""
    return not any(isinstance(one, Reshape | Computed) for one in expressions(tensor))


def _lazies(value: Any) -> Iterator[Lazy]:
    if isinstance(value, Lazy):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _lazies(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _lazies(one)


def _changed(value: Any, change: Callable[[Lazy], Tensor]) -> Any:
    """The arguments of an operation, with every lazy tensor replaced."""
    if isinstance(value, Lazy):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(one, change) for one in value)
    if isinstance(value, dict):
        return {key: _changed(one, change) for key, one in value.items()}
    return value


def _meta(tensor: Lazy) -> Tensor:
    return tensor.meta


def computed(operation: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Computed:
    """The result of an operation for these arguments, some of them lazy tensors."""
    return Computed(tuple(one.expression for one in _lazies([args, kwargs])), operation, tuple(args), dict(kwargs))


# Expressions


class Expression(ABC):
    """How a lazy tensor's values are computed from its parts."""

    parts: tuple[Expression, ...]

    @abstractmethod
    def read(self, out: Tensor, box: Box) -> None:
        """Fill `out` with a box that is not empty."""


@dataclass(frozen=True, eq=False)
class Leaf(Expression):
    key: str
    values: Callable[[Box], Tensor]
    parts: tuple[Expression, ...] = ()

    def read(self, out: Tensor, box: Box) -> None:
        out.copy_(self.values(box))


@dataclass(frozen=True, eq=False)
class Cat(Expression):
    parts: tuple[Expression, ...]
    sizes: tuple[int, ...]
    dim: int

    def read(self, out: Tensor, box: Box) -> None:
        first, last = box[self.dim]
        position = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            low, high = max(first, position), min(last, position + size)
            if low < high:
                inner = _with(box, self.dim, (low - position, high - position))
                part.read(out.narrow(self.dim, low - first, high - low), inner)
            position += size


@dataclass(frozen=True, eq=False)
class Narrow(Expression):
    parts: tuple[Expression]
    dim: int
    start: int

    def read(self, out: Tensor, box: Box) -> None:
        first, last = box[self.dim]
        self.parts[0].read(out, _with(box, self.dim, (first + self.start, last + self.start)))


@dataclass(frozen=True, eq=False)
class Select(Expression):
    """One index of a dim, which is removed."""

    parts: tuple[Expression]
    dim: int
    index: int

    def read(self, out: Tensor, box: Box) -> None:
        inner = (*box[: self.dim], (self.index, self.index + 1), *box[self.dim :])
        self.parts[0].read(out.unsqueeze(self.dim), inner)


@dataclass(frozen=True, eq=False)
class Insert(Expression):
    """A new dim of size 1."""

    parts: tuple[Expression]
    dim: int

    def read(self, out: Tensor, box: Box) -> None:
        self.parts[0].read(out.select(self.dim, 0), box[: self.dim] + box[self.dim + 1 :])


@dataclass(frozen=True, eq=False)
class Permute(Expression):
    """Dim i is the dim `order[i]` of the part."""

    parts: tuple[Expression]
    order: tuple[int, ...]

    def read(self, out: Tensor, box: Box) -> None:
        back = [self.order.index(dim) for dim in range(len(self.order))]
        self.parts[0].read(out.permute(back), tuple(box[dim] for dim in back))


@dataclass(frozen=True, eq=False)
class Reshape(Expression):
    """Another shape. The dims at both ends that it leaves alone are read in slices, the dims between them whole."""

    parts: tuple[Expression]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def read(self, out: Tensor, box: Box) -> None:
        front = _equal(self.before, self.after)
        back = _equal(self.before[front:][::-1], self.after[front:][::-1])
        middle = tuple((0, size) for size in self.before[front : len(self.before) - back])
        inner = (*box[:front], *middle, *box[len(box) - back :])
        values = torch.empty([stop - start for start, stop in inner], dtype=out.dtype, device=out.device)
        self.parts[0].read(values, inner)
        cut = box[front : len(box) - back]
        whole = self.after[front : len(self.after) - back]
        values = values.reshape([*values.shape[:front], *whole, *values.shape[len(inner) - back :]])
        out.copy_(values[(slice(None),) * front + tuple(slice(*one) for one in cut)])


@dataclass(frozen=True, eq=False)
class Computed(Expression):
    """Any other operation: its arguments are read whole."""

    parts: tuple[Expression, ...]
    operation: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def read(self, out: Tensor, box: Box) -> None:
        def values(tensor: Lazy) -> Tensor:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=out.device)
            read(tensor, whole)
            return whole

        result = self.operation(*_changed(self.args, values), **_changed(self.kwargs, values))
        out.copy_(result[tuple(slice(*one) for one in box)])

    def __reduce__(self) -> Any:  # torch's operators cannot be pickled
        return _computed_again, (str(self.operation), self.args, self.kwargs)


def _computed_again(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Computed:
    operator: Any = reduce(getattr, operation.split("."), torch.ops)
    return computed(operator, args, kwargs)


def _with(box: Box, dim: int, one: tuple[int, int]) -> Box:
    return (*box[:dim], one, *box[dim + 1 :])


def _equal(one: Sequence[int], other: Sequence[int]) -> int:
    """How many sizes at the beginning are equal."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


# Rules: (the results on the meta device, the operation's arguments) -> the expressions of the results


def _same(result: Tensor, x: Lazy, *_: Any, **__: Any) -> Expression:
    return x.expression


def _cat(result: Tensor, tensors: Sequence[Lazy], dim: int = 0) -> Expression:
    dim %= result.ndim
    return Cat(tuple(t.expression for t in tensors), tuple(t.shape[dim] for t in tensors), dim)


def _stack(result: Tensor, tensors: Sequence[Lazy], dim: int = 0) -> Expression:
    dim %= result.ndim
    return Cat(tuple(Insert((t.expression,), dim) for t in tensors), (1,) * len(tensors), dim)


def _split(results: Sequence[Tensor], x: Lazy, sizes: Any, dim: int = 0) -> list[Expression]:
    dim %= x.ndim
    starts = [sum(one.shape[dim] for one in results[:i]) for i in range(len(results))]
    return [Narrow((x.expression,), dim, start) for start in starts]


def _unbind(results: Sequence[Tensor], x: Lazy, dim: int = 0) -> list[Expression]:
    return [Select((x.expression,), dim % x.ndim, i) for i in range(len(results))]


def _select(result: Tensor, x: Lazy, dim: int, index: int) -> Expression:
    return Select((x.expression,), dim % x.ndim, index % x.shape[dim])


def _slice(
    result: Tensor, x: Lazy, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Expression:
    if step != 1:
        return computed(torch.ops.aten.slice.Tensor, (x, dim, start, end, step), {})
    return Narrow((x.expression,), dim % x.ndim, slice(start, end).indices(x.shape[dim])[0])


def _squeeze(result: Tensor, x: Lazy, dims: int | Sequence[int] | None = None) -> Expression:
    given = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    expression = x.expression
    for dim in sorted({dim % x.ndim for dim in given}, reverse=True):
        if x.shape[dim] == 1:
            expression = Select((expression,), dim, 0)
    return expression


def _unsqueeze(result: Tensor, x: Lazy, dim: int) -> Expression:
    return Insert((x.expression,), dim % result.ndim)


def _transpose(result: Tensor, x: Lazy, one: int = 0, other: int = 1) -> Expression:
    order = list(range(x.ndim))
    order[one], order[other] = order[other], order[one]
    return Permute((x.expression,), tuple(order))


def _permute(result: Tensor, x: Lazy, order: Sequence[int]) -> Expression:
    return Permute((x.expression,), tuple(dim % x.ndim for dim in order))


def _reshape(result: Tensor, x: Lazy, *_: Any) -> Expression:
    return Reshape((x.expression,), tuple(x.shape), tuple(result.shape))


# By the names of torch's operators.
_RULES: dict[str, Callable[..., Any]] = {
    "aten.alias.default": _same,
    "aten.clone.default": _same,
    "aten.detach.default": _same,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.unbind.int": _unbind,
    "aten.select.int": _select,
    "aten.slice.Tensor": _slice,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.transpose.int": _transpose,
    "aten.t.default": _transpose,
    "aten.permute.default": _permute,
    "aten.view.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.reshape.default": _reshape,
}
