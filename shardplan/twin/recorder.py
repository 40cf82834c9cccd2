"""Recording a forward run: a torch function mode, and hooks on every module."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from shardplan.core.tree import ancestors
from shardplan.torchlib.private import private

from .lines import model_line, raising_line
from .nests import named_results, replaced, tensors_in
from .trace import Event, Place, Trace

# Tensors whose content is whatever was in memory.
UNFILLED = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
# Questions about a tensor; nothing that they return is a value of the model.
QUIET = frozenset(
    "__get__ __set__ __len__ __repr__ __bool__ __int__ __float__ __index__ __format__ __hash__ __contains__ __array__ "
    "dim size numel nelement ndimension stride storage_offset is_floating_point is_complex is_contiguous data_ptr "
    "element_size item tolist numpy get_device requires_grad_ retain_grad register_hook untyped_storage storage "
    "is_same_size equal allclose backward __delitem__ dtype finfo is_tensor is_storage broadcast_shapes".split()
)


class Recorder(TorchFunctionMode):
    """Records a run of a model. A subclass may move values at the boundaries of modules.

    Args:
        model: the model that runs.
        atoms: modules that are one event; what they do inside, and what is inside them, is not recorded.
    """

    def __init__(self, model: nn.Module, atoms: Iterable[str] = ()):
        super().__init__()
        self.trace = Trace()
        self.model = model
        self.atoms = frozenset(atoms)
        self._is_wrapped = private("is_functorch_wrapped")
        self._names: dict[int, str] = {id(m): n for n, m in model.named_modules()}
        self._parameters: dict[str, tuple[str, ...]] = {
            n: tuple(name for name, _ in m.named_parameters(remove_duplicate=False))
            if n in self.atoms
            else tuple(m._parameters)
            for n, m in model.named_modules()
        }
        self._numbers: dict[int, tuple[int, int]] = {}  # id of a tensor -> (version, value)
        self._alive: list[Tensor] = []  # a number is good as long as no other tensor can get the same id
        self._writes: dict[int, list[int]] = {}  # id of a base -> values that were written into it
        self._scopes: list[tuple[str, int]] = [("", 0)]
        self._calls: Counter[str] = Counter()
        self._positions: Counter[tuple[str, int]] = Counter()
        self._inside = 0  # atoms and operations that run now
        self._entered: list[tuple[int, ...]] = []
        self._failed: tuple[Exception, Event] | None = None

    def runs_inside(self, module: str) -> bool:
        """Whether a forward of a module runs now."""
        return any(name == module for name, _ in self._scopes)

    def argument_shape(self) -> torch.Size:
        """The shape of the first argument of the module whose forward runs now."""
        return self.trace.values[self._entered[-1][0]].shape

    # What a subclass changes.

    def moved_arguments(self, scope: tuple[str, int], module: nn.Module, named: dict[str, Any]) -> dict[str, Tensor]:
        """New values for some of a module's arguments, by name."""
        return {}

    def moved_results(self, scope: tuple[str, int], module: nn.Module, results: list[Tensor]) -> dict[int, Tensor]:
        """New values for some of the tensors in a module's result, by position among them."""
        return {}

    def settle_choice(self, place: Place, name: str, operands: list[Tensor], results: list[Tensor]) -> None:
        """What an operation chose by floating-point values (indices, a mask), or cannot know alone, to be changed in place."""

    def parameter_inputs(self, name: str) -> tuple[str, ...]:
        """The parameters that an atom reads."""
        return self._parameters[name]

    # Values.

    def number(self, tensor: Tensor, reading: str | None = None) -> int:
        """The number of a tensor as it is now; a new one where it was not seen, or was changed in place."""
        known = self._numbers.get(id(tensor))
        version = _version(tensor)
        if known is not None and known[0] == version:
            return known[1]
        before = () if known is None else (known[1],)
        written = tuple(self._writes.get(_base(tensor), ()))
        new = self._new(tensor)
        if reading is not None:
            module, call = self._scopes[-1]
            place = (module, call, f"{self._positions[self._scopes[-1]]}.{reading}")
            self._add(Event("read", "", place, before + written, (new,)))
        return new

    def _new(self, tensor: Tensor, *, copy: bool = True) -> int:
        number = len(self.trace.values)
        self.trace.values.append(tensor.detach().clone() if copy else tensor.detach())
        self.trace.requires_grad.append(tensor.requires_grad)
        self._numbers[id(tensor)] = (_version(tensor), number)
        self._alive.append(tensor)
        return number

    def _add(self, event: Event) -> None:
        self.trace.events.append(event)
        self.trace.at[event.place] = event

    # Operations.

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if self._inside or (name in QUIET and name != "__get__"):
            return self._guarded(func, args, kwargs, name)
        if name == "__get__":
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor):
                return result
            if any(result is t for t in args):
                return result
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            if name in ("_base", "grad"):
                return result
            return self._record(lambda: result, name, args, kwargs)
        return self._record(lambda: func(*args, **kwargs), name, args, kwargs)

    def _guarded(self, func: Any, args: tuple, kwargs: dict, name: str) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self._fail(name, self._entered[-1] if self._entered else (), error)
            raise

    def _record(self, call: Callable[[], Any], name: str, args: tuple, kwargs: dict) -> Any:
        operands = [*tensors_in(args), *tensors_in(kwargs)]
        if any(map(self._is_wrapped, operands)):
            return call()  # inside torch.vmap; what comes out of it is recorded where it is read
        with self._paused():
            inputs = tuple(self.number(t, f"{i}") for i, t in enumerate(operands))
            versions = [_version(t) for t in operands]
            try:
                result = call()
            except Exception as error:
                self._fail(name, inputs, error)
                raise
            written = [t for t, version in zip(operands, versions, strict=True) if _version(t) != version]
            results = [*tensors_in(result)] or written
            if name in UNFILLED:
                for t in results:
                    t.zero_()  # what was in memory would be equal on all ranks, or not, by chance
            if results:
                self._add_operation(name, operands, inputs, written, results)
            return result

    def _add_operation(
        self, name: str, operands: list[Tensor], inputs: tuple[int, ...], written: list[Tensor], results: list[Tensor]
    ) -> None:
        for t in written:
            into = self._writes.setdefault(_base(t), [])
            into += [i for i in inputs if i not in into]
        module, call = self._scopes[-1]
        place = (module, call, self._positions[self._scopes[-1]])
        self._positions[self._scopes[-1]] += 1
        untouched = {id(t) for t in operands} - {id(t) for t in written}
        if not written and any(t.is_floating_point() for t in operands):
            self.settle_choice(place, name, operands, [t for t in results if id(t) not in untouched])
        outputs = tuple(self._numbers[id(t)][1] if id(t) in untouched else self._new(t) for t in results)
        self._add(Event("op", name, place, inputs, outputs, source=model_line(), writes=bool(written)))

    def _fail(self, name: str, inputs: tuple[int, ...], error: Exception) -> None:
        if self._failed is None or self._failed[0] is not error:  # the model may have caught an earlier one
            module, call = self._scopes[-1]
            text = f"{type(error).__name__}: {error}"
            event = Event("crash", name, (module, call, "crash"), inputs, source=raising_line(error), message=text)
            self._failed = (error, event)

    def applied_function(self, cls: type, call: Callable[[], Any], args: tuple, kwargs: dict) -> Any:
        """An autograd.Function is one operation: torch's function modes do not see it."""
        if self._inside:
            return call()
        return self._record(call, cls.__name__, args, kwargs)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """While it lasts, nothing is recorded."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    # Modules.

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        name = self._names[id(module)]
        self._calls[name] += 1
        with self._paused():
            inputs = self._arguments(module, args, kwargs)
            named = {n: v for n, v in inputs if isinstance(v, Tensor)}
            before = tuple(self.number(t, f"{name}.{n}") for n, t in named.items())
            self._scopes.append((name, self._calls[name]))
            moved = self.moved_arguments(self._scopes[-1], module, dict(inputs))
            after = tuple(
                self._new(moved[n]) if n in moved else v for (n, _), v in zip(named.items(), before, strict=True)
            )
            place = (*self._scopes[-1], "in")
            self._add(Event("enter", type(module).__name__, place, before, after, tuple(named), model_line()))
            if moved:
                positions = [n for n, _ in inputs]
                args = tuple(moved.get(positions[i], a) for i, a in enumerate(args))
                kwargs = {n: moved.get(n, v) for n, v in kwargs.items()}
        self._entered.append(after)
        self._inside += name in self.atoms
        return args, kwargs

    @staticmethod
    def _arguments(module: nn.Module, args: tuple, kwargs: dict) -> list[tuple[str, Any]]:
        names = argument_names(module)
        positional = [(names[i] if i < len(names) else f"#{i}", a) for i, a in enumerate(args)]
        return [*positional, *kwargs.items()]

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        name, call = self._scopes[-1]
        assert name == self._names[id(module)], (name, self._names[id(module)])
        entered = self._entered.pop()
        with self._paused():
            if name in self.atoms:
                self._inside -= 1
                self._atom(module, entered, output)
            results = list(named_results(output))
            before = tuple(self.number(t, f"out.{n}") for n, t in results)
            moved = self.moved_results((name, call), module, [t for _, t in results])
            after = tuple(self._new(moved[i]) if i in moved else v for i, v in enumerate(before))
            self._add(
                Event("leave", type(module).__name__, (name, call, "out"), before, after, tuple(n for n, _ in results))
            )
            if moved:
                output = replaced(output, {id(t): moved[i] for i, (_, t) in enumerate(results) if i in moved})
        self._scopes.pop()
        return output

    def _atom(self, module: nn.Module, entered: tuple[int, ...], output: Any) -> None:
        name, call = self._scopes[-1]
        held = dict(module.named_parameters(remove_duplicate=False))
        parameters = [held[p] for p in self.parameter_inputs(name) if p in held]
        inputs = (*entered, *(self.number(p) for p in parameters))
        outputs = tuple(self._new(t) for t in tensors_in(output))
        self._add(Event("op", type(module).__name__, (name, call, "atom"), inputs, outputs, source=model_line()))

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """Run the model once. An exception of the model becomes the last event.

        Returns:
            What the model returned, or None after an exception.
        """
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) not in self._numbers:
                self.trace.parameters[self._new(parameter, copy=False)] = name
        handles: list[RemovableHandle] = []
        for name, module in self.model.named_modules():
            if any(above in self.atoms for above in ancestors(name)):
                continue
            # Behind the module's own hooks, as the moves of an applied plan are.
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            with torch.random.fork_rng(devices=[]), functions_of(self), self:
                torch.manual_seed(0)
                return self.model(**inputs)
        except Exception as error:
            self._fail("", (), error)
            self._add(self._failed[1])
            return None
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()
            self._numbers.clear()


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's forward."""
    if "forward" in vars(module):  # set on the instance
        return tuple(inspect.signature(module.forward).parameters)
    return _argument_names(type(module))


@cache
def _argument_names(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]


@contextmanager
def functions_of(recorder: Recorder) -> Iterator[None]:
    """While it lasts, calls of autograd.Function are told to the recorder."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        call = lambda: original.__func__(cls, *args, **kwargs)  # noqa: E731
        return recorder.applied_function(cls, call, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = original


def record(model: nn.Module, inputs: Mapping[str, Any], atoms: Iterable[str] = ()) -> Trace:
    """Run a model once and record it.

    Raises:
        Exception: what the model raises.
    """
    recorder = Recorder(model, atoms)
    recorder.run(inputs)
    if recorder.trace.crash is not None:
        model(**inputs)
        raise AssertionError(f"raises only when it is recorded: {recorder.trace.crash.message}")
    return recorder.trace


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor has none
        return 0


def _base(tensor: Tensor) -> int:
    return id(tensor if tensor._base is None else tensor._base)
