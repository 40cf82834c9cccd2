"""A digest of everything that determines what a model computes: values, and code with what it reads."""

from __future__ import annotations

import dis
import hashlib
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, cached_property
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardplan.model.source_code import is_own

NUMBERS = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout)
# Reads and calls whose names are made while the code runs, and reads of files.
UNSEEN = frozenset(("eval", "exec", "globals", "locals", "__import__", "import_module", "open"))
HOOKS = frozenset(key for key in vars(nn.Module()) if key.endswith("_hooks"))  # torch's own, by process numbers
_CODES: dict[int, tuple[int, CodeType]] = {}


class NotStable(Exception):
    """A value that cannot be shown to be the same later."""


class Fingerprint:
    """Adds values to a digest, each with all that can be reached from it: elements, attributes, the code of functions and classes, their
    captured values, defaults, and the globals that they name. Code of installed packages stays the same within a process, unless somebody
    replaces its functions: so the digest has its code and captured values, but not its globals.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # an id is reused as soon as its object is gone

    def hexdigest(self) -> str:
        """The digest of all added values."""
        return self._digest.hexdigest()

    def add(self, *values: Any) -> None:
        """Add values of any types.

        Raises:
            NotStable: one of them holds something that cannot be read: a file, a lock, code that evaluates a text.
        """
        stack = [iter(values)]  # models are nested more deeply than Python's own stack allows
        while stack:
            value = next(stack[-1], stack)
            if value is stack:
                stack.pop()
                self._text("end")
            elif isinstance(value, NUMBERS) and type(value) in NUMBERS:
                self._text(f"{type(value).__name__} {value!r}")
            elif (number := self._seen.get(id(value))) is not None:
                self._text(f"again {number}")
            else:
                self._seen[id(value)] = len(self._kept)
                self._kept.append(value)
                self._text(type(value).__qualname__)
                stack.append(_parts(value))

    def _text(self, text: str) -> None:
        self._digest.update(text.encode(errors="surrogatepass") + b"\0")


def _parts(value: Any) -> Iterator[Any]:
    """The parts of a value."""
    if isinstance(value, Tensor):
        yield from _tensor(value)
    elif isinstance(value, nn.Module):
        yield type(value)
        for key, one in vars(value).items():
            yield from (key, _hooks(one) if key in HOOKS else one)
    elif isinstance(value, np.ndarray):
        yield from (value.shape, value.dtype.str, value.tolist() if value.dtype.hasobject else value.tobytes())
    elif isinstance(value, FunctionType):
        yield from _function(value)
    elif isinstance(value, CodeType):  # code never changes, and a kept one keeps its id
        yield _CODES.setdefault(id(value), (len(_CODES), value))[0]
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, type):
        yield from _class(value)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, cached_property):
        yield value.func
    elif isinstance(value, (ModuleType, GetSetDescriptorType, MemberDescriptorType)):
        yield value.__name__
    elif isinstance(value, (Enum, logging.Logger)):
        yield from (type(value).__qualname__, value.name)
    elif isinstance(value, (set, frozenset)):
        if not all(type(one) in NUMBERS for one in value):
            raise NotStable("a set of objects, which have no order")
        yield from sorted(map(repr, value))
    else:
        yield from _object(value)


def _tensor(value: Tensor) -> Iterator[Any]:
    if (
        type(value) not in (Tensor, nn.Parameter)
        or value.layout is not torch.strided
        or value.is_meta
        or value.is_quantized
    ):
        raise NotStable("a tensor whose values cannot be read")
    yield from (tuple(value.shape), value.dtype, value.device, value.requires_grad, vars(value))
    yield from (_hooks(value._backward_hooks), _hooks(value._post_accumulate_grad_hooks))
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    yield hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().data).digest()


def _hooks(hooks: Mapping[int, Any] | None) -> list[Any]:
    """Hooks without their numbers, as a process uses each number only once."""
    return list((hooks or {}).values())


def _function(value: FunctionType) -> Iterator[Any]:
    cells = value.__closure__ or ()
    yield from (value.__code__, value.__defaults__, value.__kwdefaults__, vars(value))
    yield [cell.cell_contents for cell in cells if cell != type(cell)()]
    if is_own(value.__code__.co_filename):
        names, attributes = _reads(value.__code__)
        if found := UNSEEN.intersection(names):
            raise NotStable(f"code that calls {min(found)}")
        yield from _named({**sys.modules, **value.__globals__}, names, attributes)


def _named(
    space: Mapping[str, Any], names: Iterable[str], attributes: frozenset[str], inside: tuple[str, ...] = ()
) -> Iterator[Any]:
    """The values of these names; for a module also its values under the attributes' names."""
    for name in sorted(names):
        if name in space:
            value = space[name]
            yield from (name, value)
            if isinstance(value, ModuleType) and value.__name__ not in inside:
                yield from _named(vars(value), attributes, attributes, (*inside, value.__name__))


@cache
def _reads(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals and the attributes that code names, including functions inside it."""
    names, attributes = set(), set()
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
            names.add(str(one.argval))
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "LOAD_SUPER_ATTR"):
            attributes.add(str(one.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            more = _reads(constant)
            names, attributes = names | more[0], attributes | more[1]
    return frozenset(names), frozenset(attributes)


def _class(value: type) -> Iterator[Any]:
    """The parts of a class that its instances use; of an installed class, its functions' code, and the user's functions in it."""
    module = sys.modules.get(value.__module__)
    file = getattr(module, "__file__", None)
    own = module is None or value.__module__ == "__main__" or (file is not None and is_own(file))
    yield from (value.__module__, value.__qualname__)
    for key, one in vars(value).items():
        if isinstance(one, FunctionType):
            yield from (key, one if own or is_own(one.__code__.co_filename) else one.__code__)
        elif own and not (key.startswith("__") and key.endswith("__")) and key != "_abc_impl":
            yield from (key, one)
    if issubclass(value, nn.Module) or own:
        yield value.__bases__


def _object(value: Any) -> Iterator[Any]:
    """The parts of any other instance: its class, elements and attributes, and the parts that a copy is made from, if there are more."""
    yield type(value)
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from (key, one)
    else:
        try:
            copied = value.__reduce_ex__(4)
        except Exception as error:  # raised by the class, which may be the user's
            raise NotStable(f"a {type(value).__qualname__}") from error
        if isinstance(copied, str):
            yield copied
        else:
            yield from (list(one) if isinstance(one, Iterator) else one for one in copied)
    yield getattr(value, "__dict__", None)
