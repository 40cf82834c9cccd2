"""Autograd functions that cost the host less."""

from __future__ import annotations

from typing import Any

import torch

from .private import private

_functorch_active = private("functorch_active")


class DirectFunction(torch.autograd.Function):
    """An autograd function without `setup_context`. Until torch 2.14 `Function.apply` is Python code, which looks for that method, and
    in each argument for remains of an ended transform of torch.func: as long as the call below it takes. In a running transform
    it says what is missing, so there it is called.
    """

    if isinstance(vars(torch.autograd.Function)["apply"], classmethod):

        @classmethod
        def apply(cls, *args: Any) -> Any:
            if _functorch_active():
                return super().apply(*args)
            return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]
