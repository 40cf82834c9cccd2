"""Recording the operations of a forward run: a torch function mode."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardplan.core.search_bounds import BOUNDS
from shardplan.torchlib.heads_of_weights import ATTENTION, attention_of_heads
from shardplan.torchlib.modes import check_sizes
from shardplan.torchlib.private import private

from .functions import Body
from .lines import model_line, raising_line
from .nests import replaced, tensors_in
from .probing import parts_of
from .trace import Event, Place, Trace

# Functions whose result is uninitialised memory.
UNFILLED = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
# Questions about a tensor; nothing that they return is a value of the model.
QUIET = frozenset(
    "__get__ __set__ __len__ __repr__ __bool__ __int__ __float__ __index__ __format__ __hash__ __contains__ __array__ "
    "dim size numel nelement ndimension stride storage_offset is_floating_point is_complex is_contiguous data_ptr "
    "element_size item tolist numpy get_device requires_grad_ retain_grad register_hook untyped_storage storage "
    "is_same_size equal allclose backward __delitem__ dtype finfo is_tensor is_storage broadcast_shapes".split()
)

# The questions whose answers depend on the tensor's values.
TELLING = frozenset(
    "__bool__ __int__ __float__ __index__ __contains__ __array__ item tolist numpy equal allclose".split()
)
# Questions how a tensor's values are to another value.
COMPARING = frozenset("eq ne lt le gt ge contains isin".split())


# The rounding of operations in half precision, relative to the result.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class OperationRecorder(TorchFunctionMode):
    """Records the operations of a run.

    Args:
        model: the model that runs.
        atoms: modules that count as one event; their operations and the modules inside them are not recorded.
        probes: operation -> the operands for which `Trace.parts` reports whether they contribute to its result.
        answers: which of `Trace.answers` are changed, and how.
        emptied: operations whose operands of booleans and integers are filled with zeros before.
        planted: operation, or a module's arguments -> what its result, or the argument, of booleans or integers is instead.
    """

    def __init__(
        self,
        model: nn.Module,
        atoms: Iterable[str] = (),
        probes: Mapping[Place, Iterable[int]] = MappingProxyType({}),
        answers: Mapping[int, Callable[[Any], Any]] = MappingProxyType({}),
        emptied: Collection[Place] = (),
        planted: Mapping[Place, Tensor] = MappingProxyType({}),
    ):
        super().__init__()
        self.trace = Trace()
        self.probes, self.emptied, self.planted = probes, emptied, planted
        self.answers = answers
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
        self._alive: list[Tensor] = []  # a number is valid while no other tensor can get the same id
        self._writes: dict[int, list[int]] = {}  # id of a base -> values that were written into it
        self._scopes: list[tuple[str, int]] = [("", 0)]
        self._calls: Counter[str] = Counter()
        self._positions: Counter[tuple[str, int]] = Counter()
        self._inside = 0  # the number of running atoms and operations
        self._entered: list[tuple[int, ...]] = []
        self._bodies: list[Body] = []  # of running autograd.Functions
        # In torch.vmap, the values that its function reads in addition to its arguments.
        self._mapped: dict[int, None] | None = None
        self._failed: tuple[Exception, Event] | None = None

    def runs_inside(self, module: str) -> bool:
        """Whether a forward of a module runs now."""
        return any(name == module for name, _ in self._scopes)

    # Methods for subclasses.

    def before_operation(self, name: str, operands: list[Tensor]) -> None:
        """Called before each recorded operation; it may raise an exception in the model's code."""

    def settle_choice(self, place: Place, name: str, operands: list[Tensor], results: list[Tensor]) -> None:
        """Change, in place, results that an operation chose by floating-point values (indices, a mask), or that one rank cannot know."""

    def in_place_of(self, func: Callable[..., Any], args: tuple, kwargs: dict) -> Callable[..., Any]:
        """The function that runs instead of an operation, under the operation's name."""
        return func

    # Values.

    def number(self, tensor: Tensor, reading: str | None = None) -> int:
        """The number of a tensor's present value; a new number for a tensor that is new or was changed in place."""
        known = self._numbers.get(id(tensor))
        version = _version(tensor)
        if known is not None and known[0] == version:
            return known[1]
        before = () if known is None else (known[1],)
        written = tuple(self._writes.get(_base(tensor), ()))
        new = self._new(tensor, (*before, *written))
        name = self.trace.parameters.get(known[1], self.trace.later.get(known[1])) if known is not None else None
        if name is not None:
            self.trace.later[new] = name
        if reading is not None:
            module, call = self._scopes[-1]
            self._add(Event("read", "", (module, call, f"{self._position()}.{reading}"), before + written, (new,)))
        return new

    def _new(self, tensor: Tensor, made_from: Iterable[int] = (), *, copy: bool = True, computed: bool = False) -> int:
        """A new number for a tensor.

        Args:
            made_from: the values from which it was made.
            copy: keep a copy of its present content; else its content at the end of the run is kept.
            computed: an operation computed it, and rounded.
        """
        number = len(self.trace.values)
        self.trace.values.append(tensor.detach().clone() if copy else tensor.detach())
        inside = bool(self._bodies) and tensor.is_floating_point()
        self.trace.requires_grad.append(
            tensor.requires_grad or (inside and any(self.trace.requires_grad[i] for i in made_from))
        )
        before = max((self.trace.rounding[i] for i in made_from), default=0.0)
        self.trace.rounding.append(max(before, ROUNDING.get(tensor.dtype, 0.0)) if computed else before)
        self._numbers[id(tensor)] = (_version(tensor), number)
        self._alive.append(tensor)
        return number

    def _told(self, *tensors: Tensor) -> None:
        """Record that code reads the content of tensors."""
        self.trace.kept.update(number for number in self._known(tensors) if number >= 0)

    def _known(self, tensors: Iterable[Tensor]) -> list[int]:
        """The number of each tensor that has one, of the value that it had when it got it; -1 for others."""
        return [self._numbers.get(id(t), (0, -1))[1] for t in tensors]

    def _note_compared(self, args: tuple, among: bool) -> None:
        numbers = {one for one in args if type(one) is int}
        if among and isinstance(args[-1], Tensor) and args[-1].numel() <= BOUNDS.numbers_compared:
            numbers.update(int(one) for one in args[-1].flatten().tolist())
        for known in self._known(t for t in args if isinstance(t, Tensor) and not t.is_floating_point()):
            if numbers and known >= 0:
                self.trace.compared.setdefault(known, set()).update(numbers)

    def note_kept(self) -> None:
        """After the run, note the values that code has kept and may read later."""
        own = Counter(map(id, self._alive))
        held = (
            sys.getrefcount(self._alive[number]) - 1 for number in range(len(self._alive))
        )  # without those of the argument
        self.trace.kept.update(n for n, count in enumerate(held) if count > own[id(self._alive[n])])

    def _add(self, event: Event) -> None:
        self.trace.events.append(event)
        self.trace.at[event.place] = event

    def _position(self) -> int | str:
        """The position in the code of the running module or, in the body of an autograd.Function, in this body."""
        scope = self._scopes[-1]
        body = self._bodies[-1] if self._bodies else None
        here = self._positions[scope]
        return f"{body.label}/{here - body.start}" if body is not None and body.scope == scope else here

    # Operations.

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if not self._inside and name.strip("_") in COMPARING:
            self._note_compared(args, name == "isin")
        if self._inside or (name in QUIET and name != "__get__"):
            if not self._inside and name in TELLING:
                self._told(*tensors_in(args), *tensors_in(kwargs))
            answer = self._guarded(func, args, kwargs, name)
            return self._answered(func, args, kwargs, answer) if not self._inside and name in TELLING else answer
        if func is ATTENTION:  # it multiplies matrices and splits heads in one call: recorded step by step
            with self:
                return attention_of_heads(*args, **kwargs)
        if name == "__get__":
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor):
                return result
            if any(result is t for t in args):
                return result
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            if name in ("_base", "grad"):
                return result
        return self._record(func, name, args, kwargs)

    def _answered(self, func: Callable[..., Any], args: tuple, kwargs: dict, answer: Any) -> Any:
        place = len(self.trace.answers)
        self.trace.answers.append(next(iter(self._known(tensors_in(args))), -1))
        if place not in self.answers:
            return answer
        if isinstance(answer, bool | int | float):
            return type(answer)(self.answers[place](answer))
        return func(*(self.answers[place](t) if isinstance(t, Tensor) else t for t in args), **kwargs)

    def _guarded(self, func: Any, args: tuple, kwargs: dict, name: str) -> Any:
        if self._mapped is not None:
            known = self._known((*tensors_in(args), *tensors_in(kwargs)))
            self._mapped.update((i, None) for i in known if i >= 0 and self.trace.requires_grad[i])
        try:
            check_sizes(func, args, kwargs)
            return func(*args, **kwargs)
        except Exception as error:
            self._fail(name, self._entered[-1] if self._entered else (), error)
            raise

    def _record(self, func: Callable[..., Any], name: str, args: tuple, kwargs: dict) -> Any:
        operands = [*tensors_in(args), *tensors_in(kwargs)]
        if any(map(self._is_wrapped, operands)):
            return func(*args, **kwargs)  # inside torch.vmap
        with self._paused():
            inputs = tuple(self.number(t, f"{i}") for i, t in enumerate(operands))
            self._note_captured(inputs)
            versions = [_version(t) for t in operands]
            func = self.in_place_of(func, args, kwargs)
            try:
                self.before_operation(name, operands)
                check_sizes(func, args, kwargs)
                self._probe(func, args, kwargs, operands)
                if (*self._scopes[-1], self._position()) in self.emptied:
                    for t in operands:
                        _ = t if t.is_floating_point() else t.zero_()
                result = func(*args, **kwargs)
            except Exception as error:
                self._fail(name, inputs, error)
                raise
            self._add_operation(name, operands, inputs, versions, result)
            return result

    def _add_operation(
        self, name: str, operands: list[Tensor], inputs: tuple[int, ...], versions: list[int], result: Any
    ) -> None:
        written = [t for t, version in zip(operands, versions, strict=True) if _version(t) != version]
        results = [*tensors_in(result)] or written
        if name in UNFILLED:
            for t in results:
                t.detach().zero_()  # uninitialised memory may differ between ranks
        if not results:
            self._told(*operands)
            return
        for t in written:
            into = self._writes.setdefault(_base(t), [])
            into += [i for i in inputs if i not in into]
        place = (*self._scopes[-1], self._position())
        self._positions[self._scopes[-1]] += 1
        untouched = {id(t) for t in operands} - {id(t) for t in written}
        if not written and any(t.is_floating_point() for t in operands):
            self.settle_choice(place, name, operands, [t for t in results if id(t) not in untouched])
        if place in self.planted:
            instead = self.planted[place]
            chosen = (t for t in results if (t.dtype, t.shape) == (instead.dtype, instead.shape))
            next(chosen, instead).copy_(instead)
        outputs = tuple(
            self._numbers[id(t)][1] if id(t) in untouched else self._new(t, inputs, computed=True) for t in results
        )
        self._add(Event("op", name, place, inputs, outputs, source=model_line(), writes=bool(written)))

    def _probe(self, func: Callable[..., Any], args: tuple, kwargs: dict, operands: list[Tensor]) -> None:
        """Run the next operation on changed operands, if the operands that contribute must be known."""
        place = (*self._scopes[-1], self._position())
        if place not in self.probes:
            return
        if func is torch.autograd.grad:  # it reads the graph of what it differentiates, not the values
            unread = {id(t) for t in tensors_in(kwargs["outputs"] if "outputs" in kwargs else args[0])}
            self.trace.parts[place] = {i: id(operands[i]) not in unread for i in self.probes[place]}
            return

        def again(changed: Sequence[Tensor]) -> list[Tensor]:
            new = {id(old): t for old, t in zip(operands, changed, strict=True)}
            args_, kwargs_ = replaced(args, new), {name: replaced(value, new) for name, value in kwargs.items()}
            result = func(*args_, **kwargs_)
            return [*tensors_in(result)] or list(changed)

        self.trace.parts[place] = parts_of(again, operands, self.probes[place])

    def _fail(self, name: str, inputs: tuple[int, ...], error: Exception) -> Event:
        """Record the event of an exception, at the place where the model first raised it."""
        if self._failed is None or self._failed[0] is not error:  # the model may have caught an earlier one
            module, call = self._scopes[-1]
            text = f"{type(error).__name__}: {error}"
            event = Event("crash", name, (module, call, "crash"), inputs, source=raising_line(error), message=text)
            self._failed = (error, event)
        return self._failed[1]

    # Functions that the mode does not see as one call.

    def scripted_function(self, name: str, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Record a scripted function as one operation."""
        return call(*args, **kwargs) if self._inside else self._record(call, name, args, kwargs)

    def mapped_function(self, name: str, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Record a call of torch.vmap as one operation on its arguments and on the other values that its function reads."""
        if self._inside:
            return call(*args, **kwargs)
        operands = [*tensors_in(args), *tensors_in(kwargs)]
        with self._paused():
            inputs = tuple(self.number(t, f"{i}") for i, t in enumerate(operands))
            self._mapped, versions = {}, [_version(t) for t in operands]
            try:
                result = call(*args, **kwargs)
            except Exception as error:
                self._fail(name, inputs, error)
                raise
            finally:
                captured, self._mapped = self._mapped, None
            self._add_operation(name, operands, tuple(dict.fromkeys((*inputs, *captured))), versions, result)
            return result

    def applied_function(self, name: str, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Record an autograd.Function as one operation on its arguments. Where its body runs modules of the model, or reads
        other values of the model, record the operations of the body as if they were in the code around it, and its backward
        were theirs."""
        if self._inside:
            return call(*args, **kwargs)
        operands = [*tensors_in(args), *tensors_in(kwargs)]
        with self._paused():
            inputs = tuple(self.number(t, f"{i}") for i, t in enumerate(operands))
            self._probe(call, args, kwargs, operands)
        self._note_captured(inputs)
        trace, scope = self.trace, self._scopes[-1]
        start, label, versions = self._positions[scope], self._position(), [_version(t) for t in operands]
        kept = (len(trace.events), len(trace.values), len(self._alive), dict(self._numbers))
        writes = {base: list(into) for base, into in self._writes.items()}
        body = Body(scope, label, start, frozenset(inputs), len(trace.values))
        self._bodies.append(body)
        try:
            result = call(*args, **kwargs)
        except Exception as error:
            self._fail(name, inputs, error)
            raise
        finally:
            self._bodies.pop()
        with self._paused():
            self._positions[scope] = start
            if body.opened:
                self._close(name, inputs, result)
            else:
                self._forget(*kept)
                self._writes = writes
                self._add_operation(name, operands, inputs, versions, result)
        return result

    def _close(self, name: str, inputs: tuple[int, ...], result: Any) -> None:
        """After a body that stays recorded, number results that are other tensors than the body's (views) too."""
        place = (*self._scopes[-1], self._position())
        self._positions[self._scopes[-1]] += 1
        results = [*tensors_in(result)]
        if any(self._numbers.get(id(t), (-1,))[0] != _version(t) for t in results):
            outputs = tuple(self._new(t, inputs, computed=True) for t in results)
            self._add(Event("op", name, place, inputs, outputs, source=model_line()))

    def _forget(self, events: int, values: int, alive: int, numbers: dict[int, tuple[int, int]]) -> None:
        """Drop everything that was recorded since these counts."""
        trace = self.trace
        for event in trace.events[events:]:
            del trace.at[event.place]
        del trace.events[events:], trace.values[values:], trace.requires_grad[values:], trace.rounding[values:]
        del self._alive[alive:]
        self._numbers = numbers

    def _note_captured(self, inputs: Iterable[int]) -> None:
        """Open a body that reads values of the model that were not passed to it, and the bodies around it."""
        for body in self._bodies:
            if any(i < body.known and i not in body.given and self.trace.requires_grad[i] for i in inputs):
                body.opened = True

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Within this context, nothing is recorded."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor has no version
        return 0


def _base(tensor: Tensor) -> int:
    return id(tensor if tensor._base is None else tensor._base)
