"""Tensors without memory, with faster look-ups in torch's operator cache and faster results."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sized
from functools import cache
from typing import Any

import torch

from .private import private

_Mode: Any = private("FakeTensorMode")
_Fake: Any = private("FakeTensor")
_in_kernel: Any = private("in_kernel_invocation_manager")
_unreadable: Any = private("throw_on_mutable_data_ptr")
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


@cache
def keep_device_guard() -> None:
    """Make it safe for threads that made tensors without memory to end. Where a CUDA build of torch finds no CUDA devices, the first such
    thread of a process owns the devices' substitute, and all threads read it. In torch 2.11 it is destroyed with that thread, and the
    next such tensor ends the process (`c10::impl::ensureCUDADeviceGuardSet`). So the first one is a thread that never ends.
    """
    if not torch.backends.cuda.is_built():
        return
    made = threading.Event()

    def stay() -> None:
        with _Mode():
            made.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="device guard", daemon=True).start()
    made.wait()


class FakeTensors(_Mode):
    """torch's mode, which computes the shapes of an operator's result once for all similar arguments. torch's own spends a third of a
    traced step on comparing arguments field by field; here one tuple of the values that determine the fields is compared. It spends
    another third on making results; here a result gets all fields at once, from the first one on its device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        keep_device_guard()
        super().__init__(*args, **kwargs)
        self._fields: dict[torch.device, dict[str, Any]] = {}

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, *of_call: Any) -> Any:
        # The operator and its arguments; from torch 2.15 on the arguments alone.
        known = entry.metadata
        if (
            known is None
            or entry.inplace_idx is not None
            or known.layout is not torch.strided
            or known.is_conj
            or known.is_neg
            or known.device not in self._fields
        ):
            made: Any = super()._get_output_tensor_from_cache_entry(state, entry, key, *of_call)
            if known is not None and entry.inplace_idx is None:
                self._fields.setdefault(known.device, dict(vars(made)))
            return made
        with _in_kernel(self):
            inner = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
            if entry.view_idx is not None:
                inner.set_(
                    of_call[-1][entry.view_idx].untyped_storage(), known.storage_offset, known.shape, known.stride
                )
        made = torch.Tensor._make_subclass(
            _Fake, inner, known.requires_grad, dispatch_device=True, device_for_backend_keys=known.device
        )
        _unreadable(made)
        vars(made).update(self._fields[known.device])
        return made

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
