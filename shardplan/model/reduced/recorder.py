"""Recording a forward run: its operations, and the arguments and results of every module, by hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardplan.core.tree import ancestors
from shardplan.model.forward_code import argument_names

from .functions import functions_of
from .generators import generator_states
from .lines import model_line
from .nests import named_results, replaced, replaced_at, tensors_in
from .probing import parts_of
from .recorded_operations import OperationRecorder
from .trace import Event, Place, Trace
from .weights import writes_to


class Recorder(OperationRecorder):
    """Records a run of a model. A subclass may move values between layouts at the boundaries of modules. The arguments are
    those of OperationRecorder."""

    def argument_shape(self) -> torch.Size:
        """The shape of the first argument of the module whose forward is running."""
        return self.trace.values[self._entered[-1][0]].shape

    # Methods for subclasses.

    def moved_arguments(self, scope: tuple[str, int], module: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
        """New values for some of a module's arguments, by name."""
        return {}

    def moved_results(
        self, scope: tuple[str, int], module: nn.Module, results: list[tuple[str, Tensor]]
    ) -> dict[int, Tensor]:
        """New values for some of the tensors in a module's result, by position among them.

        Args:
            results: the tensors, each with its key or position in what the module returned.
        """
        return {}

    def parameter_inputs(self, name: str) -> tuple[str, ...]:
        """The parameters that an atom reads."""
        return self._parameters[name]

    def argument_names(self, module: nn.Module) -> Sequence[str]:
        """The names of a module's arguments."""
        return argument_names(module)

    # Modules.

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._mapped is not None:
            return None
        name = self._names[id(module)]
        self._calls[name] += 1
        for body in self._bodies:
            body.opened = True
        with self._paused():
            inputs = self._arguments(module, args, kwargs)
            named = {n: v for n, v in inputs if isinstance(v, Tensor)}
            before = tuple(self.number(t, f"{name}.{n}") for n, t in named.items())
            self._scopes.append((name, self._calls[name]))
            moved = self.moved_arguments(self._scopes[-1], module, dict(inputs))
            place = (*self._scopes[-1], "in")
            if place in self.planted:
                instead = self.planted[place]
                given = (
                    n for n, t in {**named, **moved}.items() if (t.dtype, t.shape) == (instead.dtype, instead.shape)
                )
                moved |= dict.fromkeys([*given][:1], instead.clone())
            after = tuple(
                self._new(moved[n], (v,)) if n in moved else v for (n, _), v in zip(named.items(), before, strict=True)
            )
            self._add(Event("enter", type(module).__name__, place, before, after, tuple(named), model_line()))
            if moved:
                positions = [n for n, _ in inputs]
                args = tuple(moved.get(positions[i], a) for i, a in enumerate(args))
                kwargs = {n: moved.get(n, v) for n, v in kwargs.items()}
        self._entered.append(after)
        self._inside += name in self.atoms
        return args, kwargs

    def _arguments(self, module: nn.Module, args: tuple, kwargs: dict) -> list[tuple[str, Any]]:
        names = self.argument_names(module)
        positional = [(names[i] if i < len(names) else f"#{i}", a) for i, a in enumerate(args)]
        return [*positional, *kwargs.items()]

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if self._mapped is not None:
            return output
        name, call = self._scopes[-1]
        assert name == self._names[id(module)], (name, self._names[id(module)])
        entered = self._entered.pop()
        with self._paused():
            if name in self.atoms:
                self._inside -= 1
                self._atom(module, entered, args, kwargs, output)
            alone = 0 if isinstance(output, Tensor) else None
            self.trace.returned[name] = len(output) if type(output) in (tuple, list) else alone
            results = list(named_results(output))
            before = tuple(self.number(t, f"out.{n}") for n, t in results)
            moved = self.moved_results((name, call), module, results)
            after = tuple(self._new(moved[i], (v,)) if i in moved else v for i, v in enumerate(before))
            self._add(
                Event("leave", type(module).__name__, (name, call, "out"), before, after, tuple(n for n, _ in results))
            )
            if moved:
                output = replaced_at(output, moved)  # as the run-time does: a tensor may be there twice
        self._scopes.pop()
        return output

    def _atom(self, module: nn.Module, entered: tuple[int, ...], args: tuple, kwargs: dict, output: Any) -> None:
        place = (*self._scopes[-1], "atom")
        by_name = dict(module.named_parameters(remove_duplicate=False))
        parameters = {p: by_name[p] for p in self.parameter_inputs(place[0]) if p in by_name}
        inputs = (*entered, *(self.number(p) for p in parameters.values()))
        self._note_captured(inputs)
        if place in self.probes:
            given = [t for _, t in self._arguments(module, args, kwargs) if isinstance(t, Tensor)]

            def again(changed: Sequence[Tensor]) -> list[Tensor]:
                new = {id(old): t for old, t in zip(given, changed, strict=False)}
                for parameter, data in zip(parameters.values(), changed[len(given) :], strict=True):
                    parameter.data = data
                return [*tensors_in(module.forward(*replaced(args, new), **replaced(dict(kwargs), new)))]

            saved = [p.data for p in parameters.values()]
            try:
                self.trace.parts[place] = parts_of(again, [*given, *parameters.values()], self.probes[place])
            finally:
                for parameter, data in zip(parameters.values(), saved, strict=True):
                    parameter.data = data
        outputs = tuple(self._new(t, inputs, computed=True) for t in tensors_in(output))
        self._add(Event("op", type(module).__name__, place, inputs, outputs, source=model_line()))

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """Run the model once. An exception of the model becomes the last event.

        Returns:
            What the model returned, or None after an exception.
        """
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) not in self._numbers:
                self.trace.parameters[self._new(parameter, copy=False)] = name
        if self.planted or self.emptied:  # which write in place, also into views of the inputs
            inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        handles: list[RemovableHandle] = []
        for name, module in self.model.named_modules():
            if any(above in self.atoms for above in ancestors(name)):
                continue
            # These run before hooks on results and after hooks on arguments, like the moves of an applied plan. Hooks on the
            # model's results belong to its run.
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True, prepend=bool(name)))
        try:
            with torch.random.fork_rng(devices=[]), functions_of(self), self:
                torch.default_generator.manual_seed(0)
                before = generator_states()
                results = self.model(**inputs)
                self.trace.drew = generator_states() != before
            self.note_kept()
            return results
        except Exception as error:
            self._add(self._fail("", (), error))
            return None
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()
            self._numbers.clear()
            self._failed = None  # its frames keep what the model had entered: torch 2.11's checkpoints keep tensors until these are gone


def record(
    model: nn.Module,
    inputs: Mapping[str, Any],
    atoms: Iterable[str] = (),
    answers: Mapping[int, Callable[[Any], Any]] = MappingProxyType({}),
    emptied: Collection[Place] = (),
    planted: Mapping[Place, Tensor] = MappingProxyType({}),
) -> Trace:
    """Run a model once and record it. The arguments are those of `OperationRecorder`.

    Raises:
        Exception: what the model raises.
    """
    recorder, written = Recorder(model, atoms, answers=answers, emptied=emptied, planted=planted), writes_to(model)
    recorder.run(inputs)
    recorder.trace.written = written()
    if recorder.trace.crash is not None:
        model(**inputs)
        raise AssertionError(f"the model raises only when it is recorded: {recorder.trace.crash.message}")
    return recorder.trace
