"""Tensors without memory, whose operators are found in torch's cache faster."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import torch

from .private import private

_Mode: Any = private("FakeTensorMode")
_Fake: Any = private("FakeTensor")
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class FakeTensors(_Mode):
    """torch's mode, which computes the shapes of an operator's result once for all arguments that are alike. It spends a third of a traced
    step on comparing them, field by field; here a tensor is one tuple with what its fields follow from."""

    def _prep_args_for_hash(
        self, result: list[object], args: Iterable[object], state: Any, hashed: list[object]
    ) -> None:
        if isinstance(args, dict):
            super()._prep_args_for_hash(result, args, state, hashed)
            return
        if isinstance(args, Sized):
            result += (type(args), len(args))
        for arg in args:
            kind = type(arg)
            if kind is _Fake and _simple(arg, self):
                result.append(_known(arg))
            elif kind in _PLAIN:
                result += (kind, arg)
            elif kind is list or kind is tuple:
                self._prep_args_for_hash(result, arg, state, hashed)  # type: ignore[arg-type]
            else:
                super()._prep_args_for_hash(result, (arg,), state, hashed)


def _simple(fake: Any, mode: FakeTensors) -> bool:
    return (
        fake.fake_mode is mode
        and fake.constant is None
        and fake.layout is torch.strided
        and not fake._has_symbolic_sizes_strides
    )


def _known(fake: Any) -> tuple[object, ...]:
    return (
        fake.dtype,
        fake.shape,
        fake.stride(),
        fake.device,
        fake.storage_offset(),
        fake.untyped_storage().nbytes(),
        fake.requires_grad,
        fake.is_conj(),
        fake.is_neg(),
        fake.is_inference(),
    )
