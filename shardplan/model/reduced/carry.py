"""Carrying over to a reduced model what the live model has in addition to its class and configuration."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.model.float8 import is_float8, plain_attributes, plain_class
from shardplan.model.rebinding import NotBound, Rebinding, handles_in

from .layers import NUMBER
from .live import FLAGS, HOOKS, IGNORED, NUMBERS, Live, changed_attributes, pairs

Triple = tuple[str, nn.Module, nn.Module, nn.Module]  # name in the original; live, plain, reduced


def carry(live: Live, target: nn.Module, original: Callable[[str], str]) -> nn.Module:
    """Give a reduced model the same differences from its class and configuration as the live one has.

    Args:
        target: the reduced model, changed in place.
        original: the name that a module of the reduced model has in the original.

    Raises:
        NotBound: a difference that cannot be carried over.
    """
    return _Carrying(live, target, original).run()


class _Carrying:
    def __init__(self, live: Live, target: nn.Module, original: Callable[[str], str]):
        self.live, self.target = live, target
        self.triples = list(_triples(live, target, original))
        self.sizes: dict[int, set[int]] = defaultdict(set)  # parameter sizes, original -> reduced
        self.numbers: dict[tuple[str, int], set[int]] = defaultdict(set)  # attributes, likewise
        self.counterparts: dict[int, Any] = {}
        self.made: list[tuple[nn.Module, nn.Module]] = []
        plain = {name: one for name, one, _ in pairs(live.plain, live.plain)}
        for name, reduced, _ in pairs(target, target):
            if original(name) in plain:
                self._measure(plain[original(name)], reduced)
        for _, own, _, reduced in self.triples:
            self._know(own, reduced)
        self.rebinding = Rebinding(self.counterparts, live.model)
        self.memo: dict[int, Any] = {}  # hooks of several modules may share an object
        reference = next(p for p in target.parameters() if p.is_floating_point())
        self.device, self.dtype = reference.device, reference.dtype

    def _know(self, own: nn.Module, reduced: nn.Module) -> None:
        self.counterparts[id(own)] = reduced
        if hasattr(own, "config") and not is_float8(own):
            self.counterparts[id(own.config)] = reduced.config
        for leaf, tensor in (*own._parameters.items(), *own._buffers.items()):
            new = getattr(reduced, leaf, None)
            if isinstance(tensor, Tensor) and isinstance(new, Tensor):
                self.counterparts[id(tensor)] = new

    def _measure(self, plain: nn.Module, reduced: nn.Module) -> None:
        for leaf, parameter in plain._parameters.items():
            new = reduced._parameters.get(leaf)
            if parameter is not None and new is not None and parameter.ndim == new.ndim:
                for large, size in zip(parameter.shape, new.shape, strict=True):
                    self.sizes[large].add(size)
        for key, value in vars(plain).items():
            if type(value) is int and type(vars(reduced).get(key)) is int:
                self.numbers[key, value].add(vars(reduced)[key])

    def run(self) -> nn.Module:
        changed = [triple for triple in self.triples if triple[0] in self.live.differences]
        for name, own, plain, reduced in changed:
            with _At(name or type(own).__name__):
                self._structure(own, plain, reduced)
        for name, own, plain, reduced in changed:  # hooks and forwards may use any module of the model
            with _At(name or type(own).__name__):
                self._attributes(own, plain, reduced)
        for child, new in self.made:
            with _At(type(child).__name__):
                for key in plain_attributes(child).keys() - IGNORED - set(FLAGS):
                    self._attribute(key, child, None, new)
        self._all_are_there()
        return self.target

    def _all_are_there(self) -> None:
        """Check that a difference in a layer that the reduced model left out is also in a kept layer of the same kind."""
        there = {(NUMBER.sub(".*", name), self.live.differences.get(name)) for name, *_ in self.triples}
        for name, found in self.live.differences.items():
            if (NUMBER.sub(".*", name), found) not in there:
                raise NotBound(f"{name}: differs from its class and configuration ({found[0][0]})")

    def _structure(self, own: nn.Module, plain: nn.Module, reduced: nn.Module) -> None:
        if plain_class(own) is not plain_class(plain):
            try:
                reduced.__class__ = plain_class(own)
            except TypeError as error:
                raise NotBound(str(error)) from error
        others = len(plain._modules)
        if isinstance(own, nn.ModuleList) and len(own._modules) != others:
            raise NotBound(f"has {len(own._modules)} modules, but {others} by class and configuration")
        self._fill(own, plain, reduced)

    def _fill(self, own: nn.Module, plain: nn.Module | None, reduced: nn.Module) -> None:
        """Give a module the parameters, buffers and children that the live one has otherwise than the plain one."""
        makers: dict[str, Callable[[str, Any], Any]] = {
            "_parameters": self._parameter,
            "_buffers": lambda leaf, buffer: self._tensor(f"the buffer {leaf}", buffer),
            "_modules": lambda leaf, child: self._made(child),
        }
        for kind, make in makers.items():
            mine, new = vars(own)[kind], vars(reduced)[kind]
            others = {} if plain is None else vars(plain)[kind]
            for leaf, value in mine.items():
                other = others.get(leaf)
                if value is None:
                    new[leaf] = None
                elif other is None or (isinstance(value, Tensor) and value.shape != other.shape):
                    new[leaf] = make(leaf, value)
            for leaf in new.keys() - mine.keys():
                del new[leaf]
        reduced._non_persistent_buffers_set = set(own._non_persistent_buffers_set)

    def _attributes(self, own: nn.Module, plain: nn.Module, reduced: nn.Module) -> None:
        for key in changed_attributes(own, plain):
            if key in plain_attributes(own):
                self._attribute(key, own, plain, reduced)
            else:
                vars(reduced).pop(key, None)

    def _attribute(self, key: str, own: nn.Module, plain: nn.Module | None, reduced: nn.Module) -> None:
        value = vars(own)[key]
        if key in HOOKS:
            for flags in FLAGS:
                if flags in vars(own):
                    vars(reduced)[flags] = copy.copy(vars(own)[flags])
        if type(value) is int:
            value = self._number(key, value, None if plain is None else vars(plain).get(key), vars(reduced).get(key))
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            value = self._tensor(key, value)
        elif not isinstance(value, NUMBERS):
            value = self._object(key, value)
        vars(reduced)[key] = value

    def _number(self, key: str, value: int, plain: Any, reduced: Any) -> int:
        """The number for the reduced model: a size becomes the reduced one; any other number stays."""
        known = self.numbers.get((key, value)) or self.sizes.get(value, set())
        if type(plain) is int and plain == reduced:
            return value
        if len(known) == 1:
            return next(iter(known))
        if known or type(plain) is int:
            raise NotBound(f"the attribute {key} is {value}, a size without a unique counterpart in a reduced model")
        return value

    def _tensor(self, key: str, value: Tensor) -> Tensor:
        if value.is_meta or value.grad_fn is not None or self._shape(key, value) != tuple(value.shape):
            raise NotBound(
                f"the attribute {key} is a tensor of shape {tuple(value.shape)}, which depends on the model's sizes"
            )
        new = value.detach().clone().to(self.device)
        return new.to(self.dtype) if new.is_floating_point() else new

    def _object(self, key: str, value: Any) -> Any:
        new = self.rebinding.value(value)
        self.memo |= {
            **self.counterparts,
            **{id(one): one for one in self.counterparts.values()},
            **handles_in([value]),
        }
        try:
            return copy.deepcopy(new, self.memo)
        except Exception as error:  # whatever a foreign object raises when it is copied
            raise NotBound(f"the attribute {key} cannot be copied ({type(error).__name__}: {error})") from error

    def _shape(self, key: str, tensor: Tensor) -> tuple[int, ...]:
        shape = []
        for size in tensor.shape:
            known = self.sizes.get(size, {size})
            if len(known) > 1:
                raise NotBound(f"{key} has the size {size}, which has no unique counterpart in a reduced model")
            shape.append(next(iter(known)))
        return tuple(shape)

    def _parameter(self, leaf: str, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter of the reduced size, with values of about the same magnitude. The same parameter always gives the same result."""
        if id(parameter) not in self.counterparts:
            shape = self._shape(leaf, parameter)
            dtype = self.dtype if parameter.is_floating_point() else parameter.dtype
            new = torch.empty(shape, device=self.device, dtype=dtype)
            if not new.is_meta:
                values = parameter.detach().float()
                known = not parameter.is_meta
                mean, spread = (values.mean().item(), values.std(correction=0).item()) if known else (0.0, 0.1)
                new.copy_(mean + spread * torch.randn(shape, generator=torch.Generator().manual_seed(0)))
            self.counterparts[id(parameter)] = nn.Parameter(new, requires_grad=parameter.requires_grad)
        return self.counterparts[id(parameter)]

    def _made(self, child: nn.Module) -> nn.Module:
        """A module that class and configuration do not build, in the reduced model's sizes."""
        if id(child) in self.counterparts:
            return self.counterparts[id(child)]
        new = plain_class(child).__new__(plain_class(child))
        nn.Module.__init__(new)
        self.counterparts[id(child)] = new
        self._fill(child, None, new)
        self.made.append((child, new))
        if hasattr(child, "config") and not is_float8(child):
            new.config = self.counterparts.get(id(child.config), self.target.config)
        return new


def _triples(live: Live, target: nn.Module, original: Callable[[str], str]) -> Iterator[Triple]:
    found = {name: (own, plain) for name, own, plain in pairs(live.model, live.plain)}
    for name, reduced, _ in list(pairs(target, target)):
        if (there := original(name)) in found:  # else its parent reports that it was removed
            yield there, *found[there], reduced


class _At:
    """Names the module at which something cannot be carried over."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, NotBound):
            raise NotBound(f"{self.name}: {error}") from None
