"""Values of modules that were built without memory: their own code initialises them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Blank:
    """Tensors that have memory and no value yet."""

    def __init__(self, *tensors: Tensor) -> None:
        self._versions: dict[int, int] = {}
        for tensor in tensors:
            self.fill(tensor)

    def fill(self, tensor: Tensor) -> Tensor:
        """NaN shows which elements nothing computed; of integers and booleans only a write to the tensor shows."""
        tensor.fill_(float("nan") if _can_be_nan(tensor) else 0)
        self._versions[id(tensor)] = tensor._version
        return tensor

    def has(self, tensor: Tensor) -> bool:
        """Whether nothing gave the tensor, or a part of it, a value."""
        if tensor.is_meta:
            return False
        return bool(tensor.isnan().any()) if _can_be_nan(tensor) else self._versions.get(id(tensor)) == tensor._version

    def initialize(
        self,
        module: nn.Module,
        outer: nn.Module,
        *,
        ends: Callable[[nn.Module], bool] = lambda _: False,
        act: Callable[[nn.Module, nn.Module], None] | None = None,
    ) -> None:
        """Initialise a module and those in it, children first, in the order of `nn.Module.apply`.

        Each by `_init_weights(module)` of the nearest module around, as transformers' models have it. What this leaves
        without a value is then the module's own `reset_parameters()`'s, as torch's modules have it.

        Args:
            outer: a module around, for one that has no `_init_weights`.
            ends: whether a module's children are left out.
            act: called for each module and the one that initialises it, in place of `by_model`.
        """
        for step in (act or by_model, self._by_itself):
            _children_first(module, outer, step, ends)

    def _by_itself(self, module: nn.Module, _: nn.Module) -> None:
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        reset = getattr(module, "reset_parameters", None)
        if callable(reset) and any(map(self.has, own)):
            reset()


def initializer_of(module: nn.Module, outer: nn.Module) -> nn.Module:
    """The module whose `_init_weights` initialises `module`: itself, or one around it."""
    return module if callable(getattr(module, "_init_weights", None)) else outer


def by_model(module: nn.Module, initializer: nn.Module) -> None:
    """Call `initializer._init_weights(module)`, if there is one."""
    if callable(weights := getattr(initializer, "_init_weights", None)):
        weights(module)


def _children_first(
    module: nn.Module,
    outer: nn.Module,
    act: Callable[[nn.Module, nn.Module], None],
    ends: Callable[[nn.Module], bool],
) -> None:
    initializer = initializer_of(module, outer)
    for child in () if ends(module) else module.children():
        _children_first(child, initializer, act, ends)
    act(module, initializer)


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
