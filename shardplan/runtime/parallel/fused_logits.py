"""Logits that are not computed at once: a loss computes them from hidden states and a head, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .outputs import as_dtensor
from .process_groups import Group
from .vocabulary_cross_entropy import cross_entropy_of
from .vocabulary_logits import IGNORE_INDEX, Split, split_over
from .vocabulary_sums import Head, Rows

# Elementwise functions that a model's code may apply to logits before the loss, by the names of torch's functions.
CASTS = frozenset({"float", "double", "half", "bfloat16", "to", "type"})
POINTWISE = CASTS | {
    "mul", "rmul", "multiply", "div", "truediv", "divide", "true_divide", "add", "radd", "sub", "rsub", "neg", "tanh",
    "clamp", "contiguous", "clone",
}  # fmt: skip
IN_PLACE = {"imul": "mul", "itruediv": "div", "iadd": "add", "isub": "sub"}
SHAPES = frozenset({"view", "reshape", "flatten", "getitem", "detach"})
READERS = "cross_entropy, causal_lm_loss, log_probabilities, entropy"


@dataclass(frozen=True, slots=True)
class _Operand:
    """The index of a tensor in `Head.operands`; None: the logits themselves."""

    place: int | None


@dataclass(frozen=True, slots=True)
class _Change:
    """A call of a torch function on the logits; `widens`: it casts them to float32 or a wider dtype."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    widens: bool = False

    def run(self, x: Tensor, operands: Sequence[Tensor]) -> Tensor:
        def real(value: Any) -> Any:
            if not isinstance(value, _Operand):
                return value
            return x if value.place is None else operands[value.place]

        return self.function(*map(real, self.args), **{name: real(value) for name, value in self.kwargs.items()})


def _all_of(changes: Sequence[_Change]) -> Callable[[Tensor, Sequence[Tensor]], Tensor] | None:
    def change(x: Tensor, operands: Sequence[Tensor]) -> Tensor:
        for one in changes:
            x = one.run(x, operands)
        return x

    return change if changes else None


class FusedLogits(Tensor):
    """Logits [..., tokens, vocabulary]. Cross-entropies and log-probabilities compute them a chunk of tokens at a time.

    Scales, caps, casts and selections of tokens are recorded. Everything else is a RuntimeError.
    """

    hidden: Tensor  # [..., tokens, features]
    head: Head
    vocabulary: Split
    changes: tuple[_Change, ...]

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        head: Head,
        split: Split,
        changes: tuple[_Change, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> FusedLogits:
        shape = (*hidden.shape[:-1], split.size)
        made: FusedLogits = cls._make_wrapper_subclass(cls, shape, dtype=dtype or hidden.dtype, device=hidden.device)
        made.hidden, made.head, made.vocabulary, made.changes = hidden, head, split, changes
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has another argument
        return f"FusedLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def rows(self, temperature: float = 1.0) -> Rows:
        """The inputs of each token's sums. The sums are in float32 at least, so a final cast to float32 need not be applied here."""
        changes = self.changes[:-1] if self.changes and self.changes[-1].widens else self.changes
        head = replace(self.head, change=_all_of(changes))
        return Rows(self.hidden, len(self.head.weight), self.vocabulary, head, temperature)

    def make(self) -> Tensor:
        """Compute all logits at once, differentiably: a DTensor Shard(-1) where a mesh splits the vocabulary, a rank's columns
        where a group splits it, else a plain tensor."""
        made = replace(self.head, change=_all_of(self.changes)).logits(self.hidden)
        mesh = self.vocabulary.group
        return as_dtensor(made, self.vocabulary.size, mesh) if isinstance(mesh, torch.distributed.DeviceMesh) else made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        name = func.__name__.strip("_") if func.__name__.startswith("__") else func.__name__
        own = next((x for x in args if isinstance(x, FusedLogits)), None)
        if own is not None:
            in_place = IN_PLACE.get(name) or (name[:-1] if name.endswith("_") else None)
            if in_place in POINTWISE:
                changed = own._changed(getattr(Tensor, in_place), args, kwargs, own.dtype)
                own.changes, own.head = changed.changes, changed.head
                return own
            if name in POINTWISE:
                return own._changed(func, args, kwargs)
            if name in SHAPES:
                return own._of_tokens(func, name, args, kwargs)
        # Sizes and dtypes; reads of the values go to __torch_dispatch__.
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's type is that of one that is off
        raise _refused(str(func))

    def _changed(
        self,
        func: Callable[..., Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype | None = None,
    ) -> FusedLogits:
        operands = list(self.head.operands)

        def noted(value: Any) -> Any:
            if value is self:
                return _Operand(None)
            if not isinstance(value, Tensor):
                return value
            if value.numel() != 1 or isinstance(value, (FusedLogits, DTensor)):
                raise _refused(f"{func.__name__} with a tensor {tuple(value.shape)}")
            operands.append(value.reshape(()))
            return _Operand(len(operands) - 1)

        change = _Change(func, tuple(map(noted, args)), {name: noted(value) for name, value in kwargs.items()})
        like = self.hidden.new_empty(0, dtype=self.dtype)
        made = change.run(like, operands)
        if func.__name__ in CASTS and made.dtype == torch.promote_types(self.dtype, torch.float32):
            change = replace(change, widens=True)
        casts = () if dtype in (None, made.dtype) else (_Change(Tensor.to, (_Operand(None), dtype), {}),)
        head = replace(self.head, operands=tuple(operands))
        return FusedLogits(self.hidden, head, self.vocabulary, (*self.changes, change, *casts), dtype or made.dtype)

    def _of_tokens(
        self, func: Callable[..., Tensor], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> FusedLogits:
        """Apply a function to the hidden states, in place of the logits. It selects or orders tokens, and leaves the vocabulary alone."""
        hidden, rest, head = self.hidden, args[1:], self.head
        if name == "detach":
            tensors = (head.weight, head.bias, *head.operands)
            weight, bias, *operands = (None if x is None else x.detach() for x in tensors)
            assert weight is not None
            hidden, head = hidden.detach(), Head(weight, bias, None, tuple(x for x in operands if x is not None))
        elif name == "getitem":
            hidden = hidden[_tokens_of(rest[0], self.ndim)]
            if hidden.ndim < 2:
                raise _refused(f"[{rest[0]}]")
        else:
            # On a stand-in, whose last dim shows whether the vocabulary stays together.
            made = func(torch.empty(self.shape, device="meta"), *rest, **kwargs)
            if made.ndim < 2 or made.shape[-1] != self.shape[-1]:
                raise _refused(f"{name} to {tuple(made.shape)}")
            hidden = hidden.reshape(*made.shape[:-1], hidden.shape[-1])
        return FusedLogits(hidden, head, self.vocabulary, self.changes, self.dtype)


def fused_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group | None = None,
    vocab_size: int | None = None,
) -> FusedLogits:
    """Logits of a head, `hidden @ weight.T + bias`, that are not computed at once: a loss computes them a chunk of tokens at a time.

    `torch.nn.functional.cross_entropy`, `cross_entropy`, `causal_lm_loss`, `log_probabilities` and `entropy` accept them. Scales,
    caps (`torch.tanh(logits / cap) * cap`), casts, and slices of the tokens are recorded; anything else is a RuntimeError, and
    `make()` computes all logits. With a group every rank needs all tokens, and the gradient of `hidden` is a partial sum over it.

    Args:
        hidden: [..., tokens, features].
        weight: [vocabulary, features]; with a group this rank's rows, in ceil-chunks.
        bias: [vocabulary], or this rank's part.
        group: the process group, or the one-dimensional mesh, over which the rows are split.
        vocab_size: the size of the whole vocabulary; needed with a group.

    Raises:
        TypeError: a DTensor: pass `weight.to_local()` with `group`.
        ValueError: sizes do not fit, or are missing.
    """
    if any(isinstance(x, DTensor) for x in (hidden, weight, bias)):
        raise TypeError("fused_logits takes plain tensors: pass to_local() of a DTensor, and group= its mesh")
    if hidden.ndim < 2 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [..., tokens, features] and weight [vocabulary, features], not {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    split = Split(len(weight), 0, None) if group is None else split_over(group, vocab_size, len(weight))
    if vocab_size not in (None, split.size):
        raise ValueError(f"the weight has {len(weight)} rows, but vocab_size is {vocab_size}: pass group= too")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return FusedLogits(hidden, Head(weight, bias, None, ()), split)


def _refused(what: str) -> RuntimeError:
    return RuntimeError(  # torch drops the message of a TypeError in an operator
        f'{what}: fused logits are computed in chunks of tokens, by a loss alone ({READERS}). Apply the plan with logits="sharded" '
        'or "replicated", or call logits.make()'
    )


def _tokens_of(index: Any, ndim: int) -> Any:
    """An index of logits; it must not change the vocabulary, their last dim."""
    parts = index if isinstance(index, tuple) else (index,)
    dims = [part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in parts]
    taken = sum(n for part, n in zip(parts, dims, strict=True) if part is not None and part is not Ellipsis)
    last = taken == ndim or (Ellipsis in [p for p in parts if not isinstance(p, Tensor)] and parts[-1] is not Ellipsis)
    if last and not (isinstance(parts[-1], slice) and parts[-1] == slice(None)):
        raise _refused(f"[{', '.join(map(str, parts))}]")
    return index


def _cross_entropy(
    input: Any,  # torch's name
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of fused logits."""
    if not isinstance(input, FusedLogits) or size_average is not None or reduce is not None:
        raise TypeError(
            "cross_entropy of fused logits needs them as `input`, and `reduction` in place of size_average and reduce"
        )
    if input.ndim != 2:
        raise _refused(f"cross_entropy of {tuple(input.shape)}, not of [tokens, vocabulary]")
    return cross_entropy_of(input.rows(), target, weight, ignore_index, reduction, label_smoothing, 0.0, None)
