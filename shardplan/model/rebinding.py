"""Copies of models whose functions work on the copy.

`copy.deepcopy` copies no function: a `forward` or a hook that captured a module in a closure still uses the original's.
This module recreates each such function over the copies of what it captured.
"""

from __future__ import annotations

import copy
import copyreg
import dis
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

# Attributes of every module that contain no functions. The dictionaries of hooks do, so they are left out.
STATE = frozenset(("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, ModuleType, CodeType)
ATOMIC = frozenset((str, bytes, int, float, complex, bool, type(None), torch.dtype))
REDUCING = (
    "__new__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
)  # what copying an object calls
# The lists of parameters in torch's recurrent modules: each forward makes them anew where a parameter was replaced.
FLAT = ("_flat_weights", "_flat_weight_refs")
DEEPEST = 8  # functions in objects in functions


class NotBound(Exception):
    """A function uses a part of the original, or parameters outside it, without a counterpart in the copy."""


class HeldParameter(NotBound):
    """An attribute of a module has a Parameter in a list or another container, where no plan can replace it."""


def copied(model: nn.Module, memo: dict[int, Any] | None = None, shared: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy of a model whose functions and hooks use the copy where they captured the original.

    Args:
        memo: as for `copy.deepcopy`: the id of an object -> its replacement.
        shared: id -> object that the copy shares, with all that it captured except the model. None: functions that captured
            the model get their own copies of the other captured values.

    Raises:
        NotBound: a function reads the model through a global name, or uses a parameter directly; an attribute was computed from
            parameters, or cannot be copied.
        HeldParameter: a parameter is in a list, a tuple, a set or a dict of a module.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        memo |= handles_in(_own(module).values())
        memo |= _computed_by_hooks(module)
    shared = {} if shared is None else {key: one for key, one in shared.items() if key not in memo}
    memo |= shared
    module = model
    try:
        for module, copy_of in tuple(_begun(model, memo)):
            copy_of.__setstate__(_state_of_copy(module, memo))
        result = copy.deepcopy(model, memo)
    except Exception as error:  # whatever a foreign object raises when it is copied
        refuse_computed(model, memo)  # torch copies no tensor that was computed from parameters
        raise NotBound(
            f"a module {type(module).__name__} cannot be copied ({type(error).__name__}: {error})"
        ) from error
    # deepcopy does not copy functions: those in the copy are still the original's.
    for number in shared:
        del memo[number]
    rebinding = Rebinding(memo, model, cells=bool(shared))
    held = names_of(result)
    rebinding.names |= {id(p): held[id(p)] for p in result.parameters()}  # deepcopied objects hold the copy's
    for name, module in result.named_modules():
        recurrent = isinstance(module, nn.RNNBase)
        attributes = {key: value for key, value in _own(module).items() if not (recurrent and key in FLAT)}
        try:
            for key, value in attributes.items():
                refuse_held(key, value, held)
            rebinding.in_place(attributes)
            vars(module).update(attributes)
            if type(module).forward.__module__.partition(".")[0] not in ("torch", "transformers"):
                rebinding.value(type(module).forward)
        except NotBound as error:
            raise type(error)(f"{name or type(module).__name__}: {error}") from None
    return result


def _begun(module: nn.Module, memo: dict[int, Any]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The modules that are copied as by `copy.deepcopy`, and their still empty copies, which are put into `memo`. They are
    filled together, as deepcopy would ask for each key and number of each module whether it was copied."""
    kind = type(module)
    if id(module) in memo or not _copied_by_state(kind):
        return
    memo[id(module)] = begun = kind.__new__(kind)
    yield module, begun
    for child in module._modules.values():
        if child is not None:
            yield from _begun(child, memo)


def _copied_by_state(kind: type[nn.Module]) -> bool:
    return (
        not hasattr(kind, "__deepcopy__")
        and kind not in copyreg.dispatch_table
        and all(getattr(kind, name) is getattr(nn.Module, name) for name in REDUCING)
    )


def _state_of_copy(module: nn.Module, memo: dict[int, Any]) -> dict[str, Any]:
    """The attributes of a copy. Tables of torch's own that are empty are made: those of hooks, ten in each module, and most others."""
    state = module.__getstate__()
    for key, value in state.items():
        kind = type(value)
        is_table = kind is OrderedDict or (kind in (dict, set) and key in STATE)
        if kind is set and all(type(one) is str for one in value):
            # In its order. Where hashes collide, a set that is made of another's elements has them in another order.
            state[key] = memo.setdefault(id(value), value.copy())
        elif kind not in ATOMIC:
            state[key] = kind() if is_table and not value else copy.deepcopy(value, memo)
    return state


def _own(module: nn.Module) -> dict[str, Any]:
    """The attributes that may hold functions: not those of STATE, plain values, and empty dictionaries of hooks."""
    return {
        key: value
        for key, value in vars(module).items()
        if type(value) not in ATOMIC and key not in STATE and (type(value) is not OrderedDict or value)
    }


def handles_in(values: Iterable[Any]) -> dict[int, RemovableHandle]:
    """The handles that remove hooks, by id. They work only for the original's hooks, and torch cannot copy them."""
    found: dict[int, RemovableHandle] = {}
    for value in values:
        if type(value) in (list, tuple) and value and isinstance(value[0], RemovableHandle):
            found |= handles_in(value)
        elif isinstance(value, RemovableHandle):
            found[id(value)] = value
    return found


def names_of(model: nn.Module) -> dict[int, str]:
    """The names of a model's modules, parameters and buffers, by their ids."""
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names[id(module)] = name or type(module).__name__
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                names.setdefault(id(tensor), f"{name}.{leaf}" if name else leaf)
    return names


def refuse_held(attribute: str, value: Any, names: Mapping[int, str]) -> None:
    """Raise HeldParameter where an attribute of a module has parameters in lists, tuples, sets or dicts.

    Args:
        names: the names of the model's parameters, by their ids.
    """
    if not isinstance(value, (list, tuple, set, frozenset, dict)):
        return
    for parameter in _tensors_in(value, set()):
        if isinstance(parameter, nn.Parameter) and (name := names.get(id(parameter))) is not None:
            raise HeldParameter(
                f"{attribute} keeps the parameter {name} in a {type(value).__name__}: applying a plan replaces the parameter, and "
                "the old one stays there"
            )


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset, dict)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, seen)


def _computed_by_hooks(module: nn.Module) -> dict[int, Tensor]:
    """id -> value of the weights that a hook computes from parameters before each forward (`torch.nn.utils.weight_norm`, `prune`)."""
    names = {vars(hook).get("name") for hook in module._forward_pre_hooks.values() if hasattr(hook, "__dict__")}
    names |= {name.removesuffix("_orig") for name in module._parameters if names and name.endswith("_orig")}
    found = {name: vars(module).get(name) for name in names if isinstance(name, str)}
    return {id(x): x.detach().clone() for x in found.values() if isinstance(x, Tensor) and not x.is_leaf}


def refuse_computed(model: nn.Module, memo: Mapping[int, Any]) -> None:
    """Raise NotBound for an attribute that is, or has in a container, a tensor that was computed from parameters.

    Args:
        memo: the ids of tensors that may be there.
    """
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            tensors = () if key in STATE else _tensors_in(value, set())
            if any(not tensor.is_leaf and id(tensor) not in memo for tensor in tensors):
                raise NotBound(
                    f"{name or type(module).__name__}: {key} was computed from parameters, and a plan replaces these: compute it in "
                    "forward, or delete what a forward left there"
                )


class Rebinding:
    """Replaces what functions captured.

    Args:
        counterparts: the id of an object of the original -> its replacement.
        original: the model whose modules and tensors no function may still use.
        cells: whether variables that hold nothing of the original stay shared with the functions that assign to them.
    """

    def __init__(self, counterparts: Mapping[int, Any], original: nn.Module, *, cells: bool = False):
        self.counterparts, self.cells = counterparts, cells
        self.names = names_of(original)
        self._done: dict[int, Any] = {}
        self._cells: dict[int, CellType] = {}
        self._assigned = frozenset() if cells else frozenset(_assigned_cells(original))
        self._kept: list[Any] = []  # an id is valid while its object is alive

    def in_place(self, attributes: dict[str, Any]) -> None:
        """Replace the functions among a module's attributes and hooks.

        Raises:
            NotBound
        """
        for name, value in attributes.items():
            if isinstance(value, PLAIN):
                continue
            if not (callable(value) or isinstance(value, (dict, list, tuple))):
                continue
            if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
                for key, item in value.items():
                    value[key] = self.value(item)
            else:
                attributes[name] = self.value(value)

    def value(self, value: Any, depth: int = 0) -> Any:
        """The value with every reference to the original replaced; the value itself where it has none.

        Raises:
            NotBound
        """
        if isinstance(value, nn.Parameter) and id(value) in self.names:
            name = self.names[id(value)]
            raise NotBound(f"uses the parameter {name} directly, and applying a plan replaces it")
        if id(value) in self.counterparts:
            return self.counterparts[id(value)]
        if isinstance(value, (*PLAIN, BuiltinFunctionType)) or depth > DEEPEST:
            return value
        if id(value) in self.names:
            raise NotBound(f"uses {self.names[id(value)]}, which no reduced model has")
        if id(value) in self._done:
            return self._done[id(value)]
        self._done[id(value)] = value  # for a value that contains itself
        self._kept.append(value)
        self._done[id(value)] = result = self._new(value, depth + 1)
        return result

    def _new(self, value: Any, depth: int) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value, depth)
        if isinstance(value, MethodType):
            function, owner = self.value(value.__func__, depth), self.value(value.__self__, depth)
            same = function is value.__func__ and owner is value.__self__
            return value if same else MethodType(function, owner)
        if isinstance(value, partial):
            parts = (value.func, value.args, value.keywords)
            new = tuple(self.value(part, depth) for part in parts)
            if all(a is b for a, b in zip(parts, new, strict=True)):
                return value
            made = partial(new[0], *new[1], **new[2])
            made.__dict__.update(value.__dict__)
            return made
        if type(value) in (list, tuple, set, frozenset):
            items = [self.value(item, depth) for item in value]
            return value if all(a is b for a, b in zip(value, items, strict=True)) else type(value)(items)
        if isinstance(value, dict):
            entries = {key: self.value(item, depth) for key, item in value.items()}
            return value if all(entries[key] is value[key] for key in value) else _like(value, entries)
        if isinstance(value, (nn.Module, nn.Parameter)):
            return value  # a module of a copy, or one outside the model (see `_captured`)
        if isinstance(value, Tensor) or not hasattr(value, "__dict__") or not callable(value):
            return value
        attributes = {key: self.value(item, depth) for key, item in vars(value).items()}
        if all(attributes[key] is item for key, item in vars(value).items()):
            return value
        made = copy.copy(value)
        vars(made).update(attributes)
        return made

    def _function(self, function: FunctionType, depth: int) -> FunctionType:
        for name in _globals(function.__code__):
            found = function.__globals__.get(name)
            if isinstance(found, (nn.Module, Tensor)) and (id(found) in self.names or id(found) in self.counterparts):
                raise NotBound(f"reads the model through the global name {name!r}")
        cells, defaults = function.__closure__ or (), function.__defaults__ or ()
        rebound = [self._captured(function, content, depth) for content in (*_contents(cells), *defaults)]
        old = (*_contents(cells), *defaults)
        keywords = self.value(function.__kwdefaults__, depth)
        wrapped = self.value(vars(function).get("__wrapped__"), depth)
        if (
            all(a is b for a, b in zip(old, rebound, strict=True))
            and keywords is function.__kwdefaults__
            and wrapped is vars(function).get("__wrapped__")
            and self._assigned.isdisjoint(map(id, cells))
            and (self.cells or not _assigns(function.__code__))
        ):
            return function
        contents = iter(rebound)
        new = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            None,
            tuple(self._cell(cell, next(contents)) if _filled(cell) else self._empty(cell) for cell in cells),
        )
        new.__defaults__ = tuple(contents) or None
        new.__kwdefaults__ = keywords
        new.__dict__.update(function.__dict__)
        if wrapped is not None:
            new.__dict__["__wrapped__"] = wrapped
        new.__qualname__, new.__module__, new.__doc__ = function.__qualname__, function.__module__, function.__doc__
        new.__annotations__ = function.__annotations__
        return new

    def _cell(self, cell: CellType, content: Any) -> CellType:
        if self.cells and cell.cell_contents is content:
            return cell
        self._kept.append(cell)
        return self._cells.setdefault(id(cell), CellType(content))

    def _empty(self, cell: CellType) -> CellType:
        self._kept.append(cell)
        return self._cells.setdefault(id(cell), CellType())

    def _state(self, value: Any, depth: int) -> Any:
        """Copy the list, dict or set in which functions keep state between calls, so that the copy's functions do not change the original's."""
        if type(value) not in (list, dict, set) or id(value) in self.counterparts or id(value) in self._done:
            return self.value(value, depth)
        self._done[id(value)] = made = type(value)()
        self._kept.append(value)
        if isinstance(value, dict):
            made.update({key: self._state(item, depth + 1) for key, item in value.items()})
        elif isinstance(value, list):
            made.extend(self._state(item, depth + 1) for item in value)
        else:
            made.update(self.value(item, depth + 1) for item in value)
        return made

    def _captured(self, function: FunctionType, content: Any, depth: int) -> Any:
        known = id(content) in self.counterparts or id(content) in self.names
        if not known and isinstance(content, (nn.Module, nn.Parameter)) and _trains(content):
            raise NotBound(f"uses a {type(content).__name__} with parameters that are not the model's")
        return self.value(content, depth) if self.cells else self._state(content, depth)


def _trains(value: nn.Module | nn.Parameter) -> bool:
    return value.requires_grad if isinstance(value, nn.Parameter) else any(p.requires_grad for p in value.parameters())


def _like(old: dict, items: dict) -> dict:
    new = copy.copy(old)
    new.update(items)
    return new


def _filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _contents(cells: tuple[CellType, ...]) -> Iterator[Any]:
    return (cell.cell_contents for cell in cells if _filled(cell))


def _assigned_cells(model: nn.Module) -> Iterator[int]:
    """The ids of captured variables to which a module's function or a hook assigns. All functions that read such a variable share its copy."""
    pending = [value for module in model.modules() for value in _own(module).values()]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if isinstance(value, MethodType):
            pending.append(value.__func__)
        elif isinstance(value, partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif type(value) in (dict, OrderedDict):
            pending += [one for one in value.values() if callable(one)]
        elif isinstance(value, FunctionType) and value.__closure__ and id(value) not in seen:
            seen.add(id(value))
            assigned = _assigns(value.__code__)
            yield from (
                id(c) for n, c in zip(value.__code__.co_freevars, value.__closure__, strict=True) if n in assigned
            )
            pending += [one for one in _contents(value.__closure__) if callable(one)]


@cache
def _assigns(code: CodeType) -> frozenset[str]:
    """The captured variables that a function, or a function inside it, assigns to."""
    own = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_DEREF"}
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(own).union(*map(_assigns, inner)).intersection(code.co_freevars)


@cache
def _globals(code: CodeType) -> frozenset[str]:
    """The global names that a function and the functions inside it read."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(own).union(*map(_globals, inner))
